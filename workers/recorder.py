"""Writes outcomes to SQL from a thread of its own, in batches. All rows of a request, one a choice, go together.

Rows are kept until SQL has them or refuses them for good. They are bounded by what the worker holds, and it claims
nothing while many wait. A commit whose outcome is unknown is simply run again: the store sees to it that a second time
changes nothing. Only what SQL has is reported as done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError
from batchjobs.failpoints import reach
from batchjobs.text import shortened
from batchjobs.types import Completion, Lease, RequestError
from workers.held import ids
from workers.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import Store
    from workers.holdings import Holdings
    from workers.outcomes import Outcomes

log = logging.getLogger("batchjobs.worker")

MAX_ROWS = 512
MAX_DELAY_SECONDS = 0.2
MAX_BACKLOG = 2048
"""More rows than this waiting, and the worker claims nothing more."""

NOT_STORED = "result_not_stored"
"""The error code of a request whose answer the database refused."""

_IDLE_SECONDS = 0.1

Record = tuple[Lease, tuple[Completion, ...]]
"""All the choices of one request."""


class Recorder(threading.Thread):
    """Takes completions from any thread; tells the holdings which shards are done or lost."""

    def __init__(self, store: Store, holdings: Holdings, outcomes: Outcomes) -> None:
        super().__init__(name="recorder", daemon=True)
        self.failure: BaseException | None = None
        self._store = store
        self._holdings = holdings
        self._outcomes = outcomes
        self._queue: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._put = self._settled = 0  # rows, ever: taken, and those that SQL has or has refused for good
        self._counted = threading.Condition()  # over both counts, and the order of the queue
        self._outage = Outage("recording outcomes")
        self._stopping = threading.Event()
        self._give_up_at = float("inf")

    def put(self, lease: Lease, choices: tuple[Completion, ...]) -> None:
        """Takes all the choices of a request. Quick: the engine's thread calls it."""
        with self._counted:
            self._put += len(choices)
            self._queue.put((lease, choices))

    @property
    def backlog(self) -> int:
        """Rows that SQL does not have yet."""
        return self._put - self._settled

    @property
    def is_failing(self) -> bool:
        """Whether the database is away."""
        return self._outage.is_on

    def flush(self, seconds: float) -> bool:
        """Waits until all that was put before has been written, for at most so long. Whether it has. What is put
        meanwhile is not waited for: answers may come without end."""
        with self._counted:
            wanted = self._put  # rows are settled in the order in which they were put
            return self._counted.wait_for(lambda: self._settled >= wanted, seconds)

    def _settle(self, rows: int) -> None:
        with self._counted:
            self._settled += rows
            self._counted.notify_all()

    def stop(self, seconds: float) -> int:
        """Writes what is left, for at most ``seconds``. Returns how many rows could not be written."""
        self._give_up_at = time.monotonic() + seconds
        self._stopping.set()
        if self.is_alive():
            self.join(seconds + 1)
        return self.backlog

    def run(self) -> None:
        try:
            while not (self._stopping.is_set() and self._queue.empty()):
                records = self._collect()
                if records and not self._persist(records):
                    return
                self._settle(_size(records))
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _collect(self) -> list[Record]:
        """One request at least, where there is one; then what comes within a moment, so that they share a
        transaction."""
        records: list[Record] = []
        rows = 0
        deadline = time.monotonic() + _IDLE_SECONDS
        while rows < MAX_ROWS:
            try:
                records.append(self._next(deadline))
            except queue.Empty:
                break
            rows += len(records[-1][1])
            if len(records) == 1 and self._more_is_coming():
                deadline = time.monotonic() + MAX_DELAY_SECONDS
        return records

    def _next(self, deadline: float) -> Record:
        try:
            return self._queue.get_nowait()  # most of the time there is one
        except queue.Empty:
            return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))

    def _more_is_coming(self) -> bool:
        return not self._stopping.is_set() and self._holdings.unfinished > 0

    def _persist(self, records: Sequence[Record]) -> bool:
        """Writes the rows, however often it takes. False: the time is up."""
        while True:
            try:
                self._write(records)
            except BatchjobsError as error:
                pause = self._outage.failed(error)
                if time.monotonic() + pause > self._give_up_at:
                    return False
                if self._stopping.is_set():
                    time.sleep(pause)
                else:
                    self._stopping.wait(pause)
            except Exception as error:  # noqa: BLE001  SQL refuses a row, whatever its reason
                return self._isolate(records, error)
            else:
                self._outage.over()
                return True

    def _write(self, records: Sequence[Record]) -> None:
        reach("before_record")
        recorded = self._store.record([(lease, choice) for lease, choices in records for choice in choices])
        reach("after_commit_before_ack")
        leases = {lease.shard: lease for lease, _ in records}
        for shard in recorded.stale:
            self._holdings.lose(leases[shard])
        for shard in recorded.done:
            self._holdings.done(shard)

    def _isolate(self, records: Sequence[Record], error: Exception) -> bool:
        """One row that SQL refuses must not keep the others out: halves are tried until its request stands alone. That
        request then fails with the reason; where even that is refused, the shard is let go."""
        if len(records) > 1:
            half = len(records) // 2
            return self._persist(records[:half]) and self._persist(records[half:])
        (lease, (refused, *_)), reason = records[0], _reason(error)
        fields = ids(lease.shard, refused.index)
        said = "the database refused the outcome of request %d of shard %s: %s"
        log.error(said, refused.index, lease.shard, reason, extra=fields)
        if refused.error is not None and refused.error.code == NOT_STORED:
            self._let_go(lease)
            return True
        problem = RequestError(code=NOT_STORED, message=f"the database refused the answer: {reason}")
        return self._persist([(lease, self._outcomes.failed(lease, refused.index, problem))])

    def _let_go(self, lease: Lease) -> None:
        """Free at once for another try; the attempt counts."""
        self._holdings.lose(lease)
        with suppress(BatchjobsError):  # else it runs out by itself
            self._store.renew([lease], 0)


def _size(records: Sequence[Record]) -> int:
    return sum(len(choices) for _, choices in records)


def _reason(error: BaseException) -> str:
    """What the driver said: the errors wrapped around it repeat the statement with all its values."""
    seen = {error}
    while error.__cause__ is not None and error.__cause__ not in seen:
        error = error.__cause__
        seen.add(error)
    return shortened(str(error) or type(error).__name__, 300)
