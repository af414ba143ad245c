"""Holds the engine's pause for as long as an operator wants it, from a thread of its own.

Entering a pause waits for the step in progress, and it must be left by the thread that entered it. What hears the
operators' orders must not wait meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from workers.engine.outbox import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.engine.loop import EngineLoop
    from workers.mode import Mode


class Standstill(threading.Thread):
    """While it is wanted no token is made. It ends by :meth:`close`, which comes after the end of the loop: a pause
    that ends before would let tokens be made that nobody wants."""

    def __init__(self, loop: EngineLoop, mode: Mode) -> None:
        super().__init__(name="standstill", daemon=True)
        self.failure: BaseException | None = None
        self._loop = loop
        self._mode = mode
        self._changed = threading.Condition()
        self._is_wanted = self._is_closing = False

    def want(self, is_wanted: bool) -> None:
        with self._changed:
            self._is_wanted = is_wanted
            self._changed.notify_all()

    def run(self) -> None:
        try:
            while self._wait(lambda: self._is_wanted):
                with suppress(EngineStopped), self._loop.pause():
                    self._tell(True)
                    self._wait(lambda: not self._is_wanted)
                self._tell(False)
                if not self._loop.is_running:  # the main thread sees it too
                    self._wait(lambda: False)
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _tell(self, stands_still: bool) -> None:
        self._mode.stands_still = stands_still
        self._mode.on_change()

    def _wait(self, until: Callable[[], bool]) -> bool:
        """False: it is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or until())
            return not self._is_closing

    def close(self, timeout: float | None = None) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self.is_alive():
            self.join(timeout)
