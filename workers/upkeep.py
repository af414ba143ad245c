"""What a worker does every few seconds to stay a good citizen: heartbeats and reconciliation.

The heartbeats stop when the engine does: a worker that hangs must lose its shards, not keep them for ever.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from batchjobs.errors import ConnectionFailed
from batchjobs.failpoints import reach
from batchjobs.reconcile import Reconciled, reconcile
from batchjobs.store import WorkerFigures
from batchjobs.text import plural

if TYPE_CHECKING:
    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from workers.engine.loop import EngineLoop
    from workers.engine.requests import EngineStats
    from workers.holdings import Holdings
    from workers.mode import Mode
    from workers.rq_worker import RqWorker

log = logging.getLogger("batchjobs.worker")

STALL_SECONDS = 120.0
"""An engine that has work and has not passed its loop for so long is taken to hang."""

UPDATE_SECONDS = 600.0
"""The same while a model is exchanged, which is one long pass."""

THOROUGH_SECONDS = 60.0
"""How often every shard is compared, whatever the counts say."""


class Upkeep:
    """The periodic duties, each to be called from a thread of its own."""

    def __init__(
        self,
        store: Store,
        queue: JobQueue,
        rq: RqWorker,
        loop: EngineLoop,
        holdings: Holdings,
        mode: Mode,
        *,
        lease_seconds: float,
        heartbeat_seconds: float,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._store = store
        self._queue = queue
        self._rq = rq
        self._loop = loop
        self._holdings = holdings
        self._mode = mode
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._stall_seconds = stall_seconds
        self._is_stalled = False
        self._next_beat = 0.0
        self._last_thorough = time.monotonic()
        self._refusals: set[str] = set()
        self._last_figures = (time.monotonic(), 0)

    def keep_leases(self) -> None:
        """Tells SQL that the worker lives, and renews its leases; those that are not ours any more are let go."""
        stats = self._loop.stats()
        if self._hangs(stats):
            return
        self._store.beat(self._rq.name, self._figures(stats))
        leases = self._holdings.leases
        if leases:
            kept = self._store.renew(leases, self._lease_seconds)
            for lease in leases:
                if lease.shard not in kept:
                    self._holdings.lose_unless_finished(lease)

    def store_totals(self) -> None:
        """Tells SQL, at the end, all that the worker has done since its last heartbeat."""
        stats = self._loop.stats()
        totals = WorkerFigures(
            state="idle",
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            preemptions=stats.preemptions,
        )
        self._store.beat(self._rq.name, totals)

    def keep_rq(self) -> None:
        """Tells Redis what ended, and with each heartbeat what goes on. A private server that died is started again."""
        if self._is_stalled:
            return
        try:
            if self._rq.flush():
                reach("after_ack")
            if time.monotonic() >= self._next_beat:
                self._rq.beat()
                self._next_beat = time.monotonic() + 0.9 * self._heartbeat_seconds
        except ConnectionFailed:
            self._rq.resubscribe()
            self._queue.revive()
            raise

    def beat_soon(self) -> None:
        """The next :meth:`keep_rq` tells Redis what goes on, whenever that was last."""
        self._next_beat = 0.0

    def reconcile(self) -> None:
        """Puts back into Redis what it lacks; one worker at a time does."""
        thorough = time.monotonic() - self._last_thorough > THOROUGH_SECONDS
        done = reconcile(self._store, self._queue, thorough=thorough)
        if thorough:
            self._last_thorough = time.monotonic()
        self._tell(done)

    def _tell(self, done: Reconciled) -> None:
        if done.queued:
            log.info("queued %s again", plural(done.queued, "shard"))
        if done.swept:
            log.info("cancelled %s that nobody held", plural(done.swept, "request"))
        if done.split:
            log.warning("split %s whose workers died into single requests", plural(done.split, "shard"))
        if done.failed:
            log.error("gave up %s whose workers died every time", plural(done.failed, "request"))
        if done.discarded:
            log.info("discarded %s that nobody finished", plural(done.discarded, "submission"))
        for refusal in set(done.refused) - self._refusals:
            log.error("the database refuses how work ends whose workers died, %s", refusal)
        self._refusals = set(done.refused)

    def _hangs(self, stats: EngineStats) -> bool:
        silent = time.monotonic() - stats.ticked_at
        longest = max(self._stall_seconds, UPDATE_SECONDS) if self._loop.is_updating else self._stall_seconds
        hangs = bool(stats.running + stats.waiting) and silent > longest
        if hangs and not self._is_stalled:
            log.error("the engine has not moved for %.0f s: heartbeats stop, and other workers take over", silent)
        if self._is_stalled and not hangs:
            log.warning("the engine moves again")
        self._is_stalled = hangs
        return hangs

    def _figures(self, stats: EngineStats) -> WorkerFigures:
        (then, before), now = self._last_figures, time.monotonic()
        self._last_figures = (now, stats.generated_tokens)
        unfinished = self._holdings.unfinished
        state = self._mode.state(is_busy=bool(unfinished), is_suspended=self._rq.is_suspended)
        made = 0 if state == "paused" else stats.generated_tokens - before  # what came before the pause is over
        return WorkerFigures(
            state=state,
            running=stats.running,
            waiting=max(0, unfinished - stats.running) + stats.suspended,
            kv_usage_ratio=stats.kv_usage_ratio,
            tokens_per_second=made / max(now - then, 1e-3),
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            preemptions=stats.preemptions,
        )
