"""One thing done every few seconds in a thread of its own, so that a slow server delays nothing else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError
from workers.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable


class Periodic(threading.Thread):
    """Calls ``action`` every ``seconds``, and at once when woken, but not until ``rest`` seconds after the last time.

    A BatchjobsError is an outage: the action is tried again. Any other error ends the thread and stays in ``failure``.
    """

    def __init__(self, doing: str, seconds: float, action: Callable[[], None], *, rest: float = 0.0) -> None:
        super().__init__(name=doing, daemon=True)
        self.failure: BaseException | None = None
        self._seconds = seconds
        self._action = action
        self._rest = rest
        self._outage = Outage(doing)
        self._woken = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._woken.clear()
                pause = self._once()
                rest = min(self._rest, pause)
                if not self._stopping.wait(rest):  # woken meanwhile, it acts right behind it
                    self._woken.wait(pause - rest)
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _once(self) -> float:
        try:
            self._action()
        except BatchjobsError as error:
            return min(self._outage.failed(error), self._seconds)
        self._outage.over()
        return self._seconds

    @property
    def is_failing(self) -> bool:
        """Whether the server that it needs is away."""
        return self._outage.is_on

    def wake(self) -> None:
        self._woken.set()

    def stop(self, timeout: float | None = None) -> None:
        """Ends after the call in progress."""
        self._stopping.set()
        self._woken.set()
        if self.is_alive():
            self.join(timeout)
