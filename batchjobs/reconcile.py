"""Puts back into Redis what SQL says is to be done and Redis lacks: after a flush, a crash, a submit without Redis.

What a worker had begun goes to the front: a crash must not send it behind all that waits. Before that SQL itself is
tidied: requests that kill their workers, batches that were cancelled, submissions that were cut and never finished.

Running it too often, at once from everywhere, or in the middle of anything is harmless: a shard that is queued though
somebody runs it is refused by SQL when it is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from batchjobs.types import Priority, ShardId

ABANDONED_SECONDS = 24 * 3600.0
"""A submission that was cut and not run again for so long is discarded."""

_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What one run did: shards queued again, and requests of cancelled batches that got their outcome; shards ``split``
    into single requests, and such that ``failed`` because their workers died too often, or could not because the
    database ``refused`` it; batches ``discarded``."""

    queued: int = 0
    swept: int = 0
    split: int = 0
    failed: int = 0
    refused: tuple[str, ...] = ()
    discarded: int = 0


def reconcile(store: Store, queue: JobQueue, *, thorough: bool = False) -> Reconciled:
    """One run; while another process is at it, nothing is queued.

    Args:
        thorough: Compare every shard even when the queues seem long enough. Entries that SQL refuses, of a cancelled
            batch for example, can make up for missing ones in the count; workers drop them by and by.

    Raises:
        ConnectionFailed: Redis or the database cannot be reached. The next run does what is left.
    """
    isolated = store.isolate()
    done = Reconciled(
        discarded=store.discard_abandoned(ABANDONED_SECONDS),
        swept=store.sweep_cancelled(),
        split=isolated.split,
        failed=isolated.failed,
        refused=isolated.refused,
    )
    with queue.reconciling() as mine:
        if not mine:
            return done
        (queue.tidy if thorough else queue.unstrand)()
        begun = sum(queue.enqueue(page, at_front=True) for page in _missing(store, queue, begun=True))
        done = replace(done, queued=begun)
        claimable = store.claimable_count()
        # Entries of a shard that was split are still in the queues, where its requests are not yet.
        is_enough = not (thorough or done.split) and sum(queue.depths().values()) >= claimable
        if not claimable or is_enough:
            return done
        return replace(done, queued=done.queued + sum(queue.enqueue(page) for page in _missing(store, queue)))


def _missing(store: Store, queue: JobQueue, *, begun: bool = False) -> Iterator[list[tuple[ShardId, Priority]]]:
    after: ShardId | None = None
    while page := store.claimable(_PAGE, after=after, begun=begun):
        # Begun ones may wait far behind, from before a worker took them out of SQL.
        if missing := queue.missing(page, among_first=2 * len(page) if begun else None):
            # Some were claimed while we looked: SQL knew before they left Redis, so it is asked once more.
            claimable = set(store.claimable(len(page), after=after, begun=begun))
            yield [each for each in missing if each in claimable]
        after = page[-1][0]
