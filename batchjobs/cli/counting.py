"""A number that grows, on stderr, for work whose end is not known: drawn on a terminal, else a line every 5 s."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from batchjobs.cli.console import is_live, rich_console, say
from batchjobs.cli.progress import PLAIN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FIRST_SECONDS = 1.0
"""Work that takes less shows nothing."""


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number so far: ``12,000 requests stored``."""
    if is_live(sys.stderr):
        with _drawn(what) as count:
            yield count
    else:
        yield _printed(what)


@contextlib.contextmanager
def _drawn(what: str) -> Iterator[Callable[[int], None]]:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        status = None

        def count(number: int) -> None:
            nonlocal status
            if status is None and time.monotonic() - started > _FIRST_SECONDS:
                status = stack.enter_context(rich_console(sys.stderr).status(""))
            if status is not None:
                status.update(f"{number:,} {what}")

        yield count


def _printed(what: str) -> Callable[[int], None]:
    last = time.monotonic()

    def count(number: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            say(f"{number:,} {what}")

    return count
