"""The results of a batch as they come, in input order: a batch read from its first request to its last one, waiting
wherever the next one has not ended yet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from batchjobs.types import BatchStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.store import Store, StoredResult
    from batchjobs.types import BatchInfo


def follow_results(
    store: Store,
    batch_id: str,
    *,
    after_index: int = -1,
    poll_seconds: float = 1.0,
    seen: Callable[[BatchInfo], None] = lambda info: None,
) -> Iterator[StoredResult]:
    """The requests of a batch in input order, each as soon as it and all before it have ended.

    Returns when the batch has ended. Nothing is read twice: each look goes on behind the last request that came. So a
    request that is retried after it came does not come again. Memory does not grow with the batch.

    Args:
        after_index: Begins behind this request, to go on with an interrupted reading.
        poll_seconds: How long to wait between two looks while the next request has not ended.
        seen: Called with the state of the batch at each look.

    Raises:
        NotFound: There is no such batch, or it was taken back while it was submitted.
    """
    while True:
        info = store.batch(batch_id)  # before the results: one that ends in between is seen at the next look
        seen(info)
        for found in store.results(batch_id, after_index=after_index):
            if found.completion is None:
                break
            after_index = found.request.index
            yield found
        else:
            if info.status.is_final:
                return
        if info.status == BatchStatus.CANCELLING:
            store.sweep_cancelled()  # no worker may be left that would do it
        time.sleep(poll_seconds)
