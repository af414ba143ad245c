"""Failed requests run again: back into the shards of their batch, and these into the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError
from batchjobs.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from batchjobs.types import Priority

_PAGE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What came of it: ``requests`` run again. ``refused`` lines are left, because they can never run, and ``held``
    requests because a worker holds their shard right now: another call takes them later. ``warning`` says why nothing
    was put into the queue yet, if so.
    """

    requests: int
    refused: int
    held: int
    warning: str | None = None


def retry(store: Store, connect: Callable[[], JobQueue], batch_id: str) -> Retry:
    """Lets the failed requests of a batch run again, and queues their shards. May be called again at any time.

    Raises:
        NotFound: There is no such batch.
        UsageError: It was cancelled.
        ConnectionFailed: The database cannot be reached. What was set back already runs; a second call takes the rest.
    """
    retried = store.retry_failed(batch_id)
    warning = _enqueue(store, connect, batch_id) if retried.requests else None
    return Retry(requests=retried.requests, refused=retried.refused, held=retried.held, warning=warning)


def _enqueue(store: Store, connect: Callable[[], JobQueue], batch_id: str) -> str | None:
    """SQL knows what is to be done, so an unreachable queue is no failure: a worker finds the shards later."""
    try:
        connect().enqueue(_claimable(store, batch_id))
    except BatchjobsError as error:
        return f"the requests are set back, but not queued yet: {error}. They run once a worker reaches the queue"
    return None


def _claimable(store: Store, batch_id: str) -> Iterator[tuple[ShardId, Priority]]:
    """The shards of the batch that a worker could claim; those that wait already are queued once all the same."""
    after = ShardId(batch_id, -1)
    while page := store.claimable(_PAGE, after=after):
        yield from (each for each in page if each[0].batch_id == batch_id)
        after = page[-1][0]
        if after.batch_id != batch_id:
            return
