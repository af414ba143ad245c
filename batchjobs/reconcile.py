"""Puts back into Redis what SQL says is to be done and Redis lacks: after a flush, a crash, a submit without Redis.

Running it too often, at once from everywhere, or in the middle of anything is harmless: a shard that is queued though
somebody runs it is refused by SQL when it is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from batchjobs.types import Priority, ShardId

_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What one run did: shards queued again, and requests of cancelled batches that got their outcome."""

    queued: int = 0
    swept: int = 0


def reconcile(store: Store, queue: JobQueue, *, thorough: bool = False) -> Reconciled:
    """One run; while another process is at it, nothing is queued.

    Args:
        thorough: Compare every shard even when the queues seem long enough. Entries that SQL refuses, of a cancelled
            batch for example, can make up for missing ones in the count; workers drop them by and by.

    Raises:
        ConnectionFailed: Redis or the database cannot be reached. The next run does what is left.
    """
    swept = store.sweep_cancelled()
    with queue.reconciling() as mine:
        if not mine:
            return Reconciled(swept=swept)
        if thorough:
            queue.tidy()
        claimable = store.claimable_count()
        if not claimable or (not thorough and sum(queue.depths().values()) >= claimable):
            return Reconciled(swept=swept)
        queued = sum(queue.enqueue(page) for page in _missing(store, queue))
        return Reconciled(queued=queued, swept=swept)


def _missing(store: Store, queue: JobQueue) -> Iterator[list[tuple[ShardId, Priority]]]:
    after: ShardId | None = None
    while page := store.claimable(_PAGE, after=after):
        if missing := queue.missing(page):
            # Some were claimed while we looked: SQL knew before they left Redis, so it is asked once more.
            claimable = set(store.claimable(len(page), after=after))
            yield [each for each in missing if each in claimable]
        after = page[-1][0]
