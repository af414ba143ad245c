"""Waiting for what another thread or process does: by looking, with a deadline, never by sleeping and hoping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, seconds: float = 15.0) -> T:
    """Looks until it sees something true, and returns that. Fails after ``seconds``, saying ``what`` did not happen."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain until {what}; last seen: {seen!r}")
        time.sleep(0.01)
