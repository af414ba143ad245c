"""Takes shards from the queue and leases them, as many as are asked for, and gives back what it got beyond that.

While some workers are idle, one that has enough takes no more than an equal part of the queue.

A shard that took its workers down before runs alone: nothing more is claimed until the engine is empty, then it is
taken, and nothing beside it. So whatever it does it does to no other, and a crash can be nobody else's fault.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError, ConnectionFailed
from batchjobs.failpoints import reach
from workers.held import ids
from workers.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from batchjobs.types import Lease, ShardId
    from workers.holdings import Holdings
    from workers.returns import Returns
    from workers.rq_worker import RqWorker
    from workers.serving import Serving

log = logging.getLogger("batchjobs.worker")

EMPTY_SECONDS = 0.5
"""How long a queue that was empty is not looked at again."""

MAX_PROBE = 128
"""Shards taken at once while SQL refuses all of them, as after the cancellation of a large batch."""

LONGEST_FOREIGN_PAUSE_SECONDS = 4.0
"""How long it looks at nothing when, again and again, all that is queued is for other models."""


class Claims:
    """For the intake's thread.

    Args:
        sql: What is known of the database, for whoever else uses it.
        is_queue_broken: Whether Redis takes nothing more (it is full, say), so that the queue lacks what SQL has.
    """

    def __init__(
        self,
        store: Store,
        rq: RqWorker,
        holdings: Holdings,
        serving: Serving,
        returns: Returns,
        sql: Outage,
        *,
        lease_seconds: float,
        max_requests: int,
        is_queue_broken: Callable[[], bool],
    ) -> None:
        self.is_suspended = False
        self.is_clearing = False
        """Whether it waits for an empty engine, for a shard that is to run alone, or one runs alone."""
        self.unread: deque[Lease] = deque()
        """What was claimed and not read yet, the first first."""
        self._store = store
        self._rq = rq
        self._holdings = holdings
        self._serving = serving
        self._returns = returns
        self._lease_seconds = lease_seconds
        self._max_requests = max_requests
        self._is_queue_broken = is_queue_broken
        self._probe = 1
        self._empty_until = 0.0
        self._foreign_pause = EMPTY_SECONDS
        self._redis_away_until = 0.0
        self._sql = sql
        self._redis = Outage("taking shards from Redis")

    def look_again(self) -> None:
        """There is something new in the queue: no pause holds any longer."""
        self._empty_until = 0.0
        self._redis_away_until = 0.0

    def claim(self, wanted: int) -> bool:
        """Up to so many shards, now in ``unread``. Whether there may be more at once. Raises BatchjobsError."""
        if not wanted or time.monotonic() < self._empty_until:
            return False
        if time.monotonic() < self._redis_away_until:
            return self._claim_without_redis(wanted)
        try:
            popped = self._pop(wanted)
        except ConnectionFailed as error:
            self._redis_away_until = time.monotonic() + self._redis.failed(error)
            return self._claim_without_redis(wanted)
        self._redis.over()
        reach("after_pop")
        if not popped:
            if self._is_queue_broken() and not self.is_suspended and self._claim_without_redis(wanted):
                return True
            self._empty_until = time.monotonic() + EMPTY_SECONDS
            return False
        try:
            # What is held here under a lease that ran out meanwhile goes on when that is renewed.
            others = [shard for shard in popped if not self._holdings.holds(shard)]
            leases = self._lease(others)
            refused = set(popped) - {lease.shard for lease in leases}
            served = self._serving.names, self._serving.version
            foreign = self._store.for_other_models(refused, *served) if refused else set()
        except BatchjobsError:
            with contextlib.suppress(ConnectionFailed):
                self._rq.put_back(popped)
            raise
        reach("after_claim")
        leases.sort(key=lambda lease: popped.index(lease.shard))  # the order of the queues
        self._settle(popped, leases, wanted, foreign)
        if not leases and len(foreign) == len(popped):
            return self._pass_over(wanted)
        self._probe = 1 if leases else min(2 * self._probe, MAX_PROBE)
        self._foreign_pause = EMPTY_SECONDS
        return True

    def _pass_over(self, wanted: int) -> bool:
        """All that was popped is for other models. What this one can serve may stand far behind them in the queue, so
        SQL is asked for it. Where there is none there is no hurry to look again."""
        if self._claim_without_redis(wanted):
            self._foreign_pause = EMPTY_SECONDS
            return True
        self._empty_until = time.monotonic() + self._foreign_pause
        self._foreign_pause = min(2 * self._foreign_pause, LONGEST_FOREIGN_PAUSE_SECONDS)
        return False

    def _lease(self, shards: list[ShardId]) -> list[Lease]:
        served = self._serving.names, self._serving.version
        return self._store.claim(shards, self._rq.name, self._lease_seconds, *served)

    def _pop(self, wanted: int) -> list[ShardId]:
        view = self._rq.look()
        if view.suspended != self.is_suspended:
            log.info("suspended by `rq suspend`" if view.suspended else "resumed by `rq resume`")
            self.is_suspended = view.suspended
        if view.suspended:
            return []
        share = view.depth // (1 + view.idle_others)
        is_starving = self._holdings.unfinished < self._max_requests
        count = min(wanted, max(share, 1) if is_starving else share)
        return self._rq.pop(max(count, self._probe), view) if count else []

    def _settle(self, popped: list[ShardId], leases: list[Lease], wanted: int, foreign: set[ShardId]) -> None:
        """Keeps what is wanted of what was claimed, and lets the rest go. Shards for other models go to the end."""
        kept = self._wanted(leases, wanted)
        surplus = [lease for lease in leases if lease not in kept]
        claimed = {lease.shard for lease in leases}
        is_released = self.give_up(surplus)
        try:
            try:
                self._rq.start(lease.shard for lease in kept)
            finally:
                self._take(kept)
            reach("after_start")
            self._rq.drop(shard for shard in popped if shard not in claimed and shard not in foreign)
            self._rq.put_back((shard for shard in popped if shard in foreign), at_front=False)
            (self._rq.put_back if is_released else self._rq.drop)(lease.shard for lease in surplus)
        except ConnectionFailed as error:  # SQL has them as ours; the next heartbeat shows them, the next look repairs
            self._redis.failed(error)

    def give_up(self, leases: list[Lease]) -> bool:
        """Gives leases back that nothing was begun with. False: as soon as the database is there again."""
        try:
            self._returns.release(leases)
        except ConnectionFailed as error:
            self._sql.failed(error)
            return False
        return True

    def _wanted(self, leases: list[Lease], wanted: int) -> list[Lease]:
        """Which of the claimed shards to keep: the first ones, or one that runs alone, once nothing else is here."""
        alone = next((lease for lease in leases if lease.alone), None)
        if alone is None:
            return leases[:wanted]
        if not self.is_clearing:
            said = "shard %s took its worker down before: it runs alone, the rest is finished first"
            log.warning(said, alone.shard, extra=ids(alone.shard))
        self.is_clearing = True
        return [] if len(self._holdings) else [alone]

    def _claim_without_redis(self, wanted: int) -> bool:
        """SQL is the truth: while Redis is away or full, work is taken from it directly. Of what is oldest some are
        chosen by chance, because other workers are choosing too."""
        serving, limit = self._serving, 8 * wanted + len(self._holdings)
        claimable = self._store.claimable(limit, models=serving.names, version=serving.version)
        found = [each for each in claimable if not self._holdings.holds(each[0])]
        chosen = dict(random.sample(found, min(wanted, len(found))))
        leases = self._lease(list(chosen))
        kept = self._wanted(leases, wanted)
        self._rq.adopt((lease.shard, chosen[lease.shard]) for lease in kept)
        self._take(kept)
        self.give_up([lease for lease in leases if lease not in kept])
        return bool(kept)

    def _take(self, leases: list[Lease]) -> None:
        """From now on anybody may give them back, so RQ's side has them before."""
        for lease in leases:
            self._holdings.take(lease)
            self.unread.append(lease)
