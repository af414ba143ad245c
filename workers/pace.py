"""How fast a worker's requests have ended lately, so that it claims as much ahead as a moment's work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 0.1


class Pace:
    """For one thread. ``finished`` says how many have ended ever."""

    def __init__(self, finished: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._finished = finished
        self._clock = clock
        self._looked_at = clock()
        self._seen = finished()
        self._per_second = 0.0

    def per_second(self) -> float:
        """Over the last moments that were at least so long; half of it is forgotten with each."""
        now = self._clock()
        passed = now - self._looked_at
        if passed >= _LOOK_SECONDS:
            finished = self._finished()
            self._per_second = (self._per_second + (finished - self._seen) / passed) / 2
            self._looked_at, self._seen = now, finished
        return self._per_second
