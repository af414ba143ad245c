"""Gives shards back in good order: what there is of their answers is stored, their leases are released, Redis is told.

It does not count as an attempt. A lease that could not be released is released later; until then it is held by nobody
here, and runs out by itself.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from batchjobs.errors import ConnectionFailed
from batchjobs.text import plural
from workers.rq_states import Ending

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchjobs.store import Store
    from batchjobs.types import Lease
    from workers.checkpointer import Checkpointer
    from workers.holdings import Holdings
    from workers.recorder import Recorder
    from workers.rq_worker import RqWorker

log = logging.getLogger("batchjobs.worker")

STORE_SECONDS = 5.0
"""How long the engine's step in progress, and then the outcomes that are on their way, are waited for."""


class Returns:
    """Thread-safe. Without ``checkpoints`` unfinished answers are begun anew by whoever gets them."""

    def __init__(
        self,
        store: Store,
        rq: RqWorker,
        holdings: Holdings,
        recorder: Recorder,
        checkpoints: Checkpointer | None,
    ) -> None:
        self._store = store
        self._rq = rq
        self._holdings = holdings
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._unreleased: list[Lease] = []
        self._lock = threading.Lock()

    def release(self, leases: Collection[Lease]) -> int:
        """Releases leases that nothing was begun with, or whose answers are stored, and those that could not be
        released before. Returns how many it were.

        Raises:
            ConnectionFailed: The database cannot be reached. The next call, with any leases, releases them.
        """
        with self._lock:
            self._unreleased += leases
            released = len(self._unreleased)
            if released:
                self._store.release(self._unreleased)
                self._unreleased.clear()
            return released

    def give_back(self, leases: Collection[Lease], *, keeps_tokens: bool = True) -> int:
        """Gives back what is held under these leases, begun or not. It does not wait for one that is being read.

        Args:
            keeps_tokens: Store what there is of unfinished answers, for whoever goes on. Else also what was stored
                before is forgotten.

        Returns:
            The number of requests that have no outcome yet, of shards that were read.

        Raises:
            ConnectionFailed: The database cannot be reached. Everything is held as before.
        """
        if not leases:
            return 0
        self._holdings.hold_back(leases)
        try:
            self._store_all(leases, keeps_tokens)
        except BaseException:
            self._holdings.let_on(leases)
            raise
        gone = self._holdings.let_go(leases)
        shards = [lease.shard for lease in gone]
        try:
            self.release(list(gone))
            self._rq.give_back(shards)
        except ConnectionFailed as error:
            for shard in shards:  # it is queued again when it is released, or has run out
                self._rq.end(shard, Ending.LOST)
            log.warning("what was given back is found by others a little later: %s", error)
        if gone:
            log.info("gave back %s", plural(len(gone), "shard"))
        return sum(gone.values())

    def _store_all(self, leases: Collection[Lease], keeps_tokens: bool) -> None:
        if self._checkpoints is not None:
            if keeps_tokens:
                self._checkpoints.save(STORE_SECONDS, of=leases)
            else:
                self._checkpoints.forget(leases)
        if not self._recorder.flush(STORE_SECONDS):
            raise ConnectionFailed("nothing can be given back while finished answers wait for the database")
