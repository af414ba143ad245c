"""Ctrl-C and SIGTERM where they would do harm: in the middle of a transaction.

Both unwind a command by an exception, which can come between any two steps of a library: a connection that was about to
be given back would keep its lock, and what the command still has to do would wait for itself.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

TERMINATED = 143


def terminated(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGTERM in commands."""
    raise SystemExit(TERMINATED)


_UNWINDING: dict[int, Callable[[int, FrameType | None], object]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: terminated,
}
"""Other handlers, such as a worker's, raise nothing and need not wait."""

_late: list[int] = []
"""Signals that came and have not been heeded yet."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What comes meanwhile is raised at the end of the block, or by :func:`heed`; a second one at once. Blocks may be
    nested, and other threads than the main one are never interrupted anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = [number for number, handler in _UNWINDING.items() if signal.getsignal(number) is handler]
    for number in kept:
        signal.signal(number, _keep)
    try:
        yield
    finally:
        for number in kept:
            signal.signal(number, _UNWINDING[number])
        if kept:
            heed()


def heed() -> None:
    """Raises what came, in a block where nothing has been begun yet."""
    if _late and threading.current_thread() is threading.main_thread():
        number = _late[0]
        _late.clear()
        _UNWINDING[number](number, None)


def _keep(number: int, frame: FrameType | None) -> None:
    if _late:
        heed()
    _late.append(number)
