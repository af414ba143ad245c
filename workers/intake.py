"""Claims shards ahead of the engine's need, and has them read, in a thread of its own.

As much is held in waiting as fills half of the engine again, so that it never starves, or, where answers are so short
that this is done in no time, as much as a moment's work; not more, so that other workers get their share. Where the
queue is empty and some of them are idle, it gives back what its engine has not begun. `claims.py` takes the shards.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError, ConnectionFailed
from workers.backlog import Backlog
from workers.claims import Claims
from workers.held import ids
from workers.outage import Outage
from workers.pace import Pace
from workers.reader import Reader
from workers.recorder import MAX_BACKLOG
from workers.rq_states import Ending

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
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
        self._rq = rq
        self._loop = loop
        self._holdings = holdings
        self._reader = Reader(store, loop, holdings, recorder, outcomes, self.count_ended, observers)
        self._gate = gate
        self._returns = returns
        self._choices_a_shard = float(shard_size)
        self._added_at_step = 0
        self._max_requests = max_requests
        self._ahead = max(MIN_AHEAD, math.ceil(max_requests / 2))
        self._pace = Pace(lambda: holdings.finished)
        self._spare = 0
        """Choices that may still end before anything can be missing."""
        self._is_closed = False
        self._backlog = Backlog(lambda: recorder.backlog, MAX_BACKLOG)
        self._share_at = 0.0
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._sql = Outage("claiming work")
        self._claims = Claims(
            store,
            rq,
            holdings,
            serving,
            returns,
            self._sql,
            lease_seconds=lease_seconds,
            max_requests=max_requests,
            is_queue_broken=is_queue_broken,
        )

    @property
    def is_suspended(self) -> bool:
        """Whether `rq suspend` holds it."""
        return self._claims.is_suspended

    @property
    def is_clearing(self) -> bool:
        """Whether it waits for an empty engine, for a shard that is to run alone, or one runs alone."""
        return self._claims.is_clearing

    def wake(self) -> None:
        """There is something new in the queue."""
        self._claims.look_again()
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
            found = self._read() if self._claims.unread else self._claims.claim(self._shortage())
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
            self._claims.is_clearing = False
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
            if not self._claims.give_up([lease]):
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
        lease = self._claims.unread[0]
        if not self._holdings.has(lease):  # lost while the database was away
            self._claims.unread.popleft()
            return True
        choices = self._reader.read(lease, self._stopping.is_set)
        self._claims.unread.popleft()
        self._choices_a_shard += 0.2 * (max(1, choices) - self._choices_a_shard)
        self._added_at_step = self._loop.stats().steps
        return True
