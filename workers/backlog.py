"""What waits for the database, and when that is too much to begin more."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("batchjobs.worker")

PATIENCE_SECONDS = 5.0
"""Shorter waits are said to nobody: where answers take no time, the database is always the slower one."""


class Backlog:
    """Asked before each claim. ``count`` is how many outcomes wait, and more than ``most`` are too many."""

    def __init__(self, count: Callable[[], int], most: int, now: Callable[[], float] = time.monotonic) -> None:
        self.is_full = False
        self._count, self._most, self._now = count, most, now
        self._since = 0.0
        self._is_said = False

    def look(self) -> bool:
        """Whether so many outcomes wait that nothing more may be begun. The log says so when it lasts."""
        was_full, self.is_full = self.is_full, self._count() > self._most
        if self.is_full and not was_full:
            self._since = self._now()
        elif self.is_full and not self._is_said and self._now() - self._since >= PATIENCE_SECONDS:
            self._is_said = True
            log.warning("%d outcomes wait for the database: nothing more is claimed until it takes them", self._most)
        elif self._is_said and not self.is_full:
            self._is_said = False
            log.info("the database takes outcomes again: claiming goes on")
        return self.is_full
