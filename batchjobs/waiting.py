"""Waiting for a batch to end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from batchjobs.errors import WaitTimeout
from batchjobs.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from batchjobs.types import BatchInfo

_FIRST_LOOK_SECONDS = 0.05
_LONGEST_SECONDS = 1.0


def wait_for_end(
    store: Store,
    batch_id: str,
    timeout: float | None = None,
    seen: Callable[[BatchInfo], None] = lambda info: None,
) -> BatchInfo:
    """Returns when every request has its outcome. ``seen`` is called after each look, about once a second.

    Raises:
        NotFound: There is no such batch.
        WaitTimeout: ``timeout`` seconds went by; 0 looks once.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_LOOK_SECONDS
    while True:
        info = store.batch(batch_id)
        seen(info)
        if info.status.is_final:
            return info
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(_too_late(info, timeout or 0))
            pause = min(pause, left)
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_SECONDS)


def _too_late(info: BatchInfo, timeout: float) -> str:
    left = plural(info.counts.total - info.counts.done, "request")
    return f"batch {info.id} did not end within {timeout:g} s: {left} left; it goes on, wait for it again"
