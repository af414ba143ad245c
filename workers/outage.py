"""A server that is away: said once, tried again with growing, jittered pauses, and said once more when it is back."""

from __future__ import annotations

import logging
import random
import time

log = logging.getLogger("batchjobs.worker")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0


class Outage:
    """One thread's view of the server it needs. ``doing`` completes "... failed" in the log."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def failed(self, error: Exception) -> float:
        """Notes a failure. Returns the seconds to wait before the next try."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("%s failed, trying again: %s", self._doing, error)
        pause = self._pause * random.uniform(0.5, 1.5)  # many workers must not come back in step
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause

    def over(self) -> None:
        """Notes a success."""
        if self._since is not None:
            log.info("%s works again after %.0f s", self._doing, time.monotonic() - self._since)
        self._since = None
        self._pause = FIRST_PAUSE_SECONDS
