"""How fast a batch goes, and how long it will still take."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchjobs.types import BatchInfo, BatchStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import WorkerRow


def live_speed(workers: Sequence[WorkerRow]) -> float | None:
    """Tokens per second of the busy workers together, whichever batch they work on; None if none is busy."""
    busy = [worker.tokens_per_second for worker in workers if worker.state == "busy"]
    return sum(busy) if busy else None


def tokens_so_far(info: BatchInfo) -> int:
    """Tokens generated, those of unfinished answers included as far as they were stored."""
    return info.tokens.completion + info.tokens.in_progress


def tokens_per_second(info: BatchInfo, live: float | None = None) -> float | None:
    """The ``live`` speed while the batch runs: None where no worker is busy, and while it is paused, for what workers
    make then is of other batches. At its end the mean: its tokens by the time since the first request was taken up."""
    if not info.status.is_final:
        is_on = info.status == BatchStatus.RUNNING and not info.paused
        return round(live, 1) if is_on and live is not None else None
    seconds = _running_seconds(info)
    return round(tokens_so_far(info) / seconds, 1) if seconds and tokens_so_far(info) else None


def eta_seconds(info: BatchInfo, live: float | None) -> float | None:
    """Seconds to the end at the speed of the moment; None while that cannot be said: nothing has finished yet, or
    nobody makes tokens."""
    left = tokens_left(info)
    if left is None or not live or info.status != BatchStatus.RUNNING or info.paused:
        return None
    return round(left / live, 1)


def tokens_left(info: BatchInfo) -> float | None:
    """Tokens that the unfinished answers still need, as far as the others tell; None while none has finished.

    Short answers finish first, so the mean of the finished ones is too small, most of all at the start. Here the tokens
    of unfinished answers count, too, and their number does not: (finished + in progress) / finished answers. That is
    the likeliest mean where an answer's end may come at any token. An answer that is longer than the mean already is
    taken to need half of it again, so that the time left never becomes 0 while something runs.
    """
    if not info.counts.completed:
        return None
    mean = tokens_so_far(info) / info.counts.completed
    whole = mean * (info.counts.queued + info.counts.running)
    return max(whole - info.tokens.in_progress, whole / 2)


def _running_seconds(info: BatchInfo) -> float | None:
    if info.started_at is None:
        return None
    return ((info.finished_at or datetime.now(UTC)) - info.started_at).total_seconds()
