"""Holds one thread still between two of its passes, for whoever must not be disturbed by it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gate:
    """Open at first. It may be shut several times, and is open again when each of them is undone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut = 0
        self._is_inside = False

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """For the thread that is held: within it, it does its pass. False where the gate is shut."""
        with self._changed:
            self._is_inside = not self._shut
        try:
            yield self._is_inside
        finally:
            with self._changed:
                self._is_inside = False
                self._changed.notify_all()

    def shut(self) -> None:
        """No pass begins from now on. One that goes on is not waited for."""
        with self._changed:
            self._shut += 1

    def open(self) -> None:
        """Undoes one :meth:`shut`."""
        with self._changed:
            self._shut -= 1

    @contextmanager
    def shut_within(self) -> Iterator[None]:
        """Within it no pass goes on. For any thread but the one that passes."""
        self.shut()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_inside)
            yield
        finally:
            self.open()
