"""Claims shards ahead of the engine's need, and has them read, in a thread of its own.

As much is held in waiting as fills half of the engine again, so that it never starves, or, where answers are so short
that this is done in no time, as much as a moment's work; not more, so that other workers get their share. While some
of them are idle, one that has enough takes no more than an equal part of the queue, and where the queue is empty, it
gives back what its engine has not begun.

A shard that took its workers down before runs alone: nothing more is claimed until the engine is empty, then it is
taken, and nothing beside it. So whatever it does it does to no other, and a crash can be nobody else's fault.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError, ConnectionFailed
from batchjobs.failpoints import reach
from workers.backlog import Backlog
from workers.held import ids
from workers.outage import Outage
from workers.pace import Pace
from workers.reader import Reader
from workers.recorder import MAX_BACKLOG
from workers.rq_states import Ending

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from batchjobs.types import Lease, ShardId
    from workers.engine.loop import EngineLoop
    from workers.gate import Gate
    from workers.holdings import Holdings
    from workers.outcomes import Outcomes
    from workers.reader import Observer
    from workers.recorder import Recorder
    from workers.returns import Returns
    from workers.rq_worker import RqWorker
    from workers.serving import Serving

log = logging.getLogger("batchjobs.worker")

POLL_SECONDS = 0.5
MIN_AHEAD = 16
SHARE_SECONDS = 1.0
AHEAD_SECONDS = 0.25
"""So much work is claimed ahead, at the pace of the last moments. A claim takes some milliseconds."""

MAX_PROBE = 128
"""Shards taken at once while SQL refuses all of them, as after the cancellation of a large batch."""

LONGEST_FOREIGN_PAUSE_SECONDS = 4.0
"""How long it looks at nothing when, again and again, all that is queued is for other models."""


class Intake(threading.Thread):
    """Fills the engine until stopped. While the ``gate`` is shut it stands still between two passes.

    Args:
        is_queue_broken: Whether Redis takes nothing more (it is full, say), so that the queue lacks what SQL has.
    """

    def __init__(
        self,
        store: Store,
        rq: RqWorker,
        loop: EngineLoop,
        holdings: Holdings,
        recorder: Recorder,
        outcomes: Outcomes,
        serving: Serving,
        gate: Gate,
        returns: Returns,
        *,
        lease_seconds: float,
        shard_size: int,
        max_requests: int,
        is_queue_broken: Callable[[], bool] = lambda: False,
        observers: Observer | None = None,
    ) -> None:
        super().__init__(name="intake", daemon=True)
        self.failure: BaseException | None = None
        self.is_suspended = False
        self.is_clearing = False
        """Whether it waits for an empty engine, for a shard that is to run alone, or one runs alone."""
        self._store = store
        self._rq = rq
        self._loop = loop
        self._holdings = holdings
        self._reader = Reader(store, loop, holdings, recorder, outcomes, self.count_ended, observers)
        self._serving = serving
        self._gate = gate
        self._returns = returns
        self._lease_seconds = lease_seconds
        self._choices_a_shard = float(shard_size)
        self._added_at_step = 0
        self._max_requests = max_requests
        self._is_queue_broken = is_queue_broken
        self._ahead = max(MIN_AHEAD, math.ceil(max_requests / 2))
        self._pace = Pace(lambda: holdings.finished)
        self._spare = 0
        """Choices that may still end before anything can be missing."""
        self._unread: deque[Lease] = deque()
        self._probe = 1
        self._is_closed = False
        self._backlog = Backlog(lambda: recorder.backlog, MAX_BACKLOG)
        self._empty_until = 0.0
        self._foreign_pause = POLL_SECONDS
        self._redis_away_until = 0.0
        self._share_at = 0.0
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._sql = Outage("claiming work")
        self._redis = Outage("taking shards from Redis")

    def wake(self) -> None:
        """There is something new in the queue."""
        self._empty_until = 0.0
        self._redis_away_until = 0.0
        self._share_at = 0.0
        self._woken.set()

    def make_room(self) -> None:
        """Something has ended here: perhaps more is wanted."""
        self._woken.set()

    def count_ended(self, choices: int) -> None:
        """So many choices have ended. Quick: the engine's thread calls it after each request."""
        self._spare -= choices
        if self._spare <= 0 and not self._woken.is_set():
            self._woken.set()

    def close(self) -> None:
        """Claims nothing more from now on. What is held is read still."""
        self._is_closed = True

    def stop(self, timeout: float | None = None) -> None:
        """Ends after the request in progress."""
        self._stopping.set()
        self._woken.set()
        if self.is_alive():
            self.join(timeout)

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._woken.clear()
                with self._gate.passing() as is_open:
                    pause = self._pass() if is_open else self._rest()
                if pause and not self._stopping.is_set():
                    self._woken.wait(pause)
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _pass(self) -> float:
        """One look, and what follows from it. Returns for how long there is nothing to do."""
        try:
            self._returns.release([])
            found = self._read() if self._unread else self._claim(self._shortage())
            if not found:
                self._share()
        except BatchjobsError as error:
            return self._sql.failed(error)
        self._sql.over()
        return 0.0 if found else POLL_SECONDS

    def _rest(self) -> float:
        """All that it does while the gate is shut."""
        try:
            self._returns.release([])
        except BatchjobsError as error:
            return self._sql.failed(error)
        return POLL_SECONDS

    def _shortage(self) -> int:
        """How many shards are missing until enough choices wait."""
        self._spare = 0
        if self._is_closed or self._backlog.look() or (self.is_clearing and len(self._holdings)):
            return 0
        if self.is_clearing:
            self.is_clearing = False
            return 1
        waiting, running = self._waiting()
        wanted = max(self._ahead, min(math.ceil(AHEAD_SECONDS * self._pace.per_second()), MAX_BACKLOG // 2))
        least = max(self._ahead, wanted // 2)  # several shards at once, where they are done that fast
        if waiting >= least:
            self._spare = 1 + waiting - least - max(0, self._max_requests - running)  # it may begin these at once
            return 0
        return math.ceil((wanted - waiting) / self._choices_a_shard)

    def _waiting(self) -> tuple[int, int]:
        """Choices that the engine has not begun, and those that run. Its own figure leaves out what was added since its
        last step; ours counts the choices that have ended of requests that go on."""
        stats = self._loop.stats()
        waiting = self._holdings.unfinished - stats.running
        if stats.steps > self._added_at_step + 1:
            waiting = min(waiting, stats.waiting + self._holdings.unread)
        return waiting, stats.running

    # Claiming

    def _claim(self, wanted: int) -> bool:
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
            self._empty_until = time.monotonic() + POLL_SECONDS
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
        self._foreign_pause = POLL_SECONDS
        return True

    def _pass_over(self, wanted: int) -> bool:
        """All that was popped is for other models. What this one can serve may stand far behind them in the queue, so
        SQL is asked for it. Where there is none there is no hurry to look again."""
        if self._claim_without_redis(wanted):
            self._foreign_pause = POLL_SECONDS
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
        is_released = self._give_up(surplus)
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

    def _give_up(self, leases: list[Lease]) -> bool:
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
        self._give_up([lease for lease in leases if lease not in kept])
        return bool(kept)

    def _take(self, leases: list[Lease]) -> None:
        """From now on anybody may give them back, so RQ's side has them before."""
        for lease in leases:
            self._holdings.take(lease)
            self._unread.append(lease)

    def _share(self) -> None:
        """Gives a shard that only waits here to another worker that has nothing to do."""
        waiting = self._loop.stats().waiting
        if not waiting or time.monotonic() < self._share_at:
            return
        self._share_at = time.monotonic() + SHARE_SECONDS
        try:
            view = self._rq.look()
            if view.suspended or view.depth or not view.idle_others:
                return
            lease = self._holdings.spare(waiting)
            if lease is None:
                return
            if not self._give_up([lease]):
                self._rq.end(lease.shard, Ending.LOST)  # it is queued again when it is released
                return
            self._rq.give_back([lease.shard])
            said = "gave shard %s, not begun here, to a worker that is idle"
            log.info(said, lease.shard, extra=ids(lease.shard))
        except ConnectionFailed as error:
            log.debug("did not share: %s", error)  # nothing depends on it; others say what is wrong

    # Reading

    def _read(self) -> bool:
        """Reads the shard claimed first into the engine."""
        lease = self._unread[0]
        if not self._holdings.has(lease):  # lost while the database was away
            self._unread.popleft()
            return True
        choices = self._reader.read(lease, self._stopping.is_set)
        self._unread.popleft()
        self._choices_a_shard += 0.2 * (max(1, choices) - self._choices_a_shard)
        self._added_at_step = self._loop.stats().steps
        return True
