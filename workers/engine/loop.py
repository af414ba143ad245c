"""The engine in a thread of its own, between callers that add and cancel at any time and handlers that take outcomes.

Adds and cancels are applied between two steps. A loop that dies of an error keeps it in ``failure``: it accepts nothing
more, so that no caller waits for an answer that cannot come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from workers.engine.requests import EngineOutput, EngineRequest, EngineStats

if TYPE_CHECKING:
    from workers.engine.engine import Engine

Handler = Callable[[EngineOutput], None]


class EngineStopped(RuntimeError):
    """The loop does not run (any more); the cause, if there was one, is chained."""


class EngineLoop:
    """Runs an engine in the background. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._ticked_at = time.monotonic()
        self._changed = threading.Condition()
        self._added: deque[EngineRequest] = deque()
        self._cancelled: deque[Hashable] = deque()
        self._handlers: dict[Hashable, Handler] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End after the step in progress. Unfinished requests are dropped without a call of their handler."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def add(self, request: EngineRequest, on_finish: Handler) -> None:
        """Queue a request; ``on_finish`` is called once, from the loop's thread, and must be quick.

        Raises:
            EngineStopped: The loop is not running.
            ValueError: A request with this id is here already.
        """
        with self._changed:
            if self._stopping or not self.is_running:
                raise EngineStopped("the engine loop is not running") from self.failure
            if request.request_id in self._handlers:
                raise ValueError(f"request {request.request_id!r} is in the engine already")
            self._handlers[request.request_id] = on_finish
            self._added.append(request)
            self._changed.notify_all()

    def cancel(self, request_id: Hashable) -> None:
        """Cancel a request before the next step; its partial output arrives through its handler."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        return replace(self.engine.stats(), ticked_at=self._ticked_at)

    def _run(self) -> None:
        try:
            while self._take_changes():
                for output in self.engine.step():
                    self._deliver(output)
        except BaseException as error:  # noqa: BLE001  # kept for every caller; the thread ends with it
            self.failure = error

    def _take_changes(self) -> bool:
        """Wait for work, apply adds and cancels; False when the loop shall end."""
        with self._changed:
            while not (self._stopping or self._added or self._cancelled or self.engine.has_work):
                self._ticked_at = time.monotonic()
                self._changed.wait(timeout=0.5)
            self._ticked_at = time.monotonic()
            if self._stopping:
                return False
            added, cancelled = list(self._added), list(self._cancelled)
            self._added.clear()
            self._cancelled.clear()
        for request in added:
            self.engine.add(request)
        for request_id in cancelled:
            if (output := self.engine.cancel(request_id)) is not None:
                self._deliver(output)
        return True

    def _deliver(self, output: EngineOutput) -> None:
        with self._changed:
            handler = self._handlers.pop(output.request_id, None)
        if handler is not None:
            handler(output)
