"""The end of a worker: what is finished is stored, what is not is checkpointed and given back, in this order.

Every step is tried whatever happened to the ones before it, but none that needs a server which did not answer a moment
ago: the end has its time, and what is left undone runs out by itself.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchjobs.errors import ConnectionFailed
from batchjobs.failpoints import reach
from batchjobs.text import plural
from workers.engine.outbox import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchjobs.store import Store
    from workers.checkpointer import Checkpointer
    from workers.commands import Commands
    from workers.engine.loop import EngineLoop
    from workers.holdings import Holdings
    from workers.intake import Intake
    from workers.periodic import Periodic
    from workers.recorder import Recorder
    from workers.returns import Returns
    from workers.rq_worker import RqWorker
    from workers.upkeep import Upkeep

log = logging.getLogger("batchjobs.worker")

GRACE_SECONDS = 20.0
"""For how long a shutdown waits for the step in progress, and then for the last outcomes to be stored."""

_THREAD_SECONDS = 1.0
_DATABASE, _REDIS = "the database", "Redis"


@dataclass(kw_only=True)
class Shutdown:
    """Of one worker. The threads in ``claiming`` end first; those in ``beating`` keep the leases until all is stored.

    Without ``checkpoints`` unfinished answers are begun anew by whoever gets them.
    """

    store: Store
    rq: RqWorker
    loop: EngineLoop
    holdings: Holdings
    recorder: Recorder
    returns: Returns
    checkpoints: Checkpointer | None
    upkeep: Upkeep
    claiming: Iterable[Commands | Intake | Periodic]
    beating: Iterable[Periodic]
    _away: set[str] = field(default_factory=set)  # servers that did not answer

    def run(self, *, in_order: bool) -> None:
        """Ends everything. Not ``in_order``: something broke, so what was held counts as an attempt."""
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in self.claiming:  # one that goes on could claim what is never given back
            thread.stop(max(_THREAD_SECONDS, deadline - time.monotonic()))
        self._try(_DATABASE, "storing unfinished answers", lambda: self._checkpoint(deadline))
        self.loop.stop(max(0.0, deadline - time.monotonic()))
        self._record(deadline)
        for thread in self.beating:
            thread.stop(_THREAD_SECONDS)
        reach("before_release")
        self._try(_DATABASE, "giving back leases", lambda: self._release(in_order))
        reach("after_release")
        self._try(_REDIS, "telling Redis", self.rq.flush)
        self._try(_REDIS, "giving shards back to Redis", self.rq.give_back)
        self._try(_DATABASE, "storing the last figures", self.upkeep.store_totals)
        state = "stopped" if in_order else "failed"
        self._try(_DATABASE, "retiring", lambda: self.store.retire_worker(self.rq.name, state))
        self._try(_REDIS, "leaving Redis", self.rq.close)

    def _checkpoint(self, deadline: float) -> None:
        """No token is made after what is stored here."""
        if self.checkpoints is None:
            return
        left = max(1.0, deadline - time.monotonic())
        with suppress(EngineStopped, TimeoutError), self.loop.pause(left):
            try:
                if saved := self.checkpoints.save(left):
                    log.info("stored %s for whoever goes on", plural(saved, "unfinished answer"))
            finally:
                self.loop.stop(left)

    def _record(self, deadline: float) -> None:
        lost = self.recorder.stop(max(1.0, deadline - time.monotonic()))
        if lost:
            self._away.add(_DATABASE)
            log.error("%s could not be stored; another worker makes them again", plural(lost, "outcome"))

    def _release(self, in_order: bool) -> None:
        leases = self.holdings.give_back()
        count = self.returns.release(leases if in_order else [])  # and what could not be released before
        if not in_order and leases:
            # Free at once, but the attempt counts: what broke this worker may be in one of these shards.
            self.store.renew(leases, 0)
            count += len(leases)
        if count:
            log.info("gave back %s", plural(count, "shard"))

    def _try(self, server: str, doing: str, step: Callable[[], object]) -> None:
        if server in self._away:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001
            log.warning("%s failed; what is left runs out by itself: %s", doing, error)
            if isinstance(error, ConnectionFailed):
                self._away.add(server)
