"""The engine in a thread of its own, between callers that add and cancel at any time and whoever takes the outcomes.

What it keeps true:
- Only the loop's thread touches the engine. Adds, cancels, looks and pauses take effect between two steps.
- While somebody is in :meth:`EngineLoop.pause`, no token is made, and everything else goes on: adds are taken, cancels
  deliver at once, looks are answered, and what runs keeps its place and its cache.
- Nobody waits for what cannot come. A loop that dies of an error keeps it in ``failure`` and calls no ``on_finish``:
  the requests did not fail, the engine did, and another one can run them. Whoever waits gets EngineStopped from it, and
  ``on_lost`` is called.

The engine outlives its loop: a new loop can go on with it, its cache included, unless it was the engine that died.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from workers.engine.driver import Driver
from workers.engine.inbox import EngineFull, Inbox, Unfinished, UpdateOrder
from workers.engine.outbox import EngineStopped, Handler, LostHandler, Outbox, StreamPiece
from workers.engine.requests import EngineOutput, EngineRequest, EngineStats

if TYPE_CHECKING:
    from batchjobs.types import Inflight, Progress
    from workers.engine.engine import Engine
    from workers.engine.staging import StagedModel
    from workers.engine.update import UpdateReport

__all__ = ["EngineFull", "EngineLoop", "EngineStopped", "StreamPiece"]

LAST_STEP_SECONDS = 5.0
"""For how long a stop whose time is over still waits for the step in progress."""


class EngineLoop:
    """Runs an engine in the background, once. All methods may be called from any thread.

    Handlers are called from the loop's thread and must be quick. They may call anything here but what waits for the
    loop itself (``pause``, ``progress``, a ``result`` that is not there): that raises RuntimeError. What a handler
    raises is logged. As a context manager it starts at once, and finishes everything at the end; after an error in the
    block it cancels.

    What takes an outcome (``result``, ``stream``, ``register_result_handler``) raises LookupError for a request that
    was never added or whose outcome was taken, and EngineStopped when the loop has ended without one. With a timeout it
    raises TimeoutError after so many seconds without news, and can be asked again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._outbox = Outbox()
        self._lock = self._outbox.lock
        self._inbox = Inbox(self._lock, engine.config.max_queue_size)
        self._is_over = False
        self._thread: threading.Thread | None = None

    # Life

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._is_over

    @property
    def is_paused(self) -> bool:
        """Whether it stands still because somebody holds a pause."""
        return self._inbox.is_paused and self.is_running

    def stats(self) -> EngineStats:
        return replace(self.engine.stats(), ticked_at=self._inbox.ticked_at)

    def warmup(self) -> None:
        """What the engine does once before its first step (compiling, capturing). Before the start only."""
        if self._thread is not None:
            raise RuntimeError("warm up before the start: the engine belongs to the loop's thread now")
        self.engine.warmup()

    def start(self) -> None:
        """Raises RuntimeError for a loop that was started or stopped before: make a new one around the same engine."""
        with self._lock:
            if self._thread is not None or self._inbox.stopping:
                raise RuntimeError("a loop runs once: make a new EngineLoop around the same engine")
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None, *, unfinished: Unfinished = "drop") -> bool:
        """Accept nothing more and end. Outcomes that nobody took yet stay here to be taken.

        Args:
            timeout: Seconds to wait for the end; None waits as long as it takes.
            unfinished: What becomes of requests that are not finished with the step in progress. ``drop``: they are
                lost; their ``on_finish`` is never called, ``on_lost`` is. ``cancel``: each gets its partial output,
                through its handler too. ``finish``: they are finished first, and cancelled when the time is over; those
                that are suspended are dropped.

        Returns:
            Whether the thread has ended. From a handler this is False: the loop ends when the handler has returned.

        Raises:
            RuntimeError: ``finish`` from within this thread's own pause, which could never end.
        """
        self._hasten(unfinished)
        if self.join(timeout) or unfinished != "finish" or self._is_own_thread:
            return self.join(0)
        self._hasten("cancel")
        return self.join(LAST_STEP_SECONDS)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended; whether it has. At once False from a handler."""
        if self._thread is None:
            return True
        if not self._is_own_thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(unfinished="finish" if kind is None else "cancel")

    @contextmanager
    def pause(self, timeout: float | None = None) -> Iterator[None]:
        """Within it the loop stands still and no token is made. It may be nested, and held by several threads at once;
        the loop goes on when the last one leaves. A holder may use the model; the engine still belongs to the loop.

        Raises:
            EngineStopped: The loop does not run, or ended before it stood still.
            TimeoutError: The step in progress took longer than ``timeout`` seconds.
            RuntimeError: Called from a handler.
        """
        with self._lock:
            self._check(self.is_running)
            self._inbox.hold()
            try:
                self._outbox.wait(self._outbox.news, lambda: self._inbox.is_standing, timeout, "a pause")
                self._check(not self._is_over)
            except BaseException:
                self._inbox.release()
                raise
        try:
            yield
        finally:
            self._inbox.release()

    # Requests

    def progress(self, timeout: float | None = None) -> dict[Hashable, tuple[Progress, ...]]:
        """How far each unfinished request is, see :meth:`Engine.progress`. What has been delivered is not among them.

        Raises:
            EngineStopped: The loop does not run, or ended before it could say.
            TimeoutError: The step in progress took longer than ``timeout`` seconds.
            RuntimeError: Called from a handler.
        """
        with self._lock:
            self._check(self.is_running)
            look = self._inbox.look()
            self._outbox.wait(self._outbox.news, lambda: look.seen is not None, timeout, "the progress of its requests")
            if look.seen is None:
                raise self._reason() from self.failure
            return look.seen

    def add(
        self,
        request: EngineRequest,
        on_finish: Handler | None = None,
        on_lost: LostHandler | None = None,
        *,
        wait: float | None = 0.0,
    ) -> None:
        """Queue a request. Its outcome goes to ``on_finish``; without one it is kept until somebody takes it.

        Args:
            on_finish: Called once with the outcome.
            on_lost: Called instead, with the reason, when none can come: the engine died, or the loop was stopped.
            wait: Seconds to wait for room where ``max_queue_size`` requests wait already; None waits for ever.

        Raises:
            EngineFull: There is no room.
            EngineStopped: The loop is not running.
            ValueError: A request with this id is here already.
        """
        with self._lock:
            self._check(self._accepts)
            self._inbox.wait_for_room(0 if self._is_own_thread else wait, self._outbox.news, lambda: self._accepts)
            self._check(self._accepts)
            self._outbox.open(request, on_finish, on_lost)
            self._inbox.add(request)

    def add_requests(
        self, requests: Iterable[EngineRequest], on_finish: Handler | None = None, *, wait: float | None = 0.0
    ) -> list[Hashable]:
        """:meth:`add` each; their ids. Where one is refused, those before it stay."""
        added = []
        for request in requests:
            self.add(request, on_finish, wait=wait)
            added.append(request.request_id)
        return added

    def cancel(self, request_id: Hashable) -> None:
        """End a request before the next step; its partial output is its outcome. Nothing happens to one that ended."""
        if not self._is_over:
            self._inbox.cancel(request_id)

    def suspend(self, request_ids: Iterable[Hashable]) -> None:
        """From before the next step on, no token of these requests is made until they are resumed; see
        :meth:`Engine.suspend`. Ids that are not here are passed over. They can be cancelled, and looked at."""
        self._inbox.suspend(tuple(request_ids), suspended=True)

    def resume(self, request_ids: Iterable[Hashable]) -> None:
        """Let suspended requests go on. Ids that are not here, or not suspended, are passed over."""
        self._inbox.suspend(tuple(request_ids), suspended=False)

    # Another model

    @property
    def is_updating(self) -> bool:
        """Whether an update was asked for and has not ended."""
        return bool(self._inbox.updates) and self.is_running

    def stage(self, source: str, revision: str | None = None) -> StagedModel:
        """See :meth:`Engine.stage`; in this thread, while the loop goes on."""
        return self.engine.stage(source, revision)

    def update_model(
        self, staged: StagedModel, inflight: Inflight | str = "recompute", timeout: float | None = None
    ) -> UpdateReport:
        """Go on with another model from between two steps on; see :meth:`Engine.update_model`.

        While requests are finished first, nothing begins that has not begun, and all else goes on. One that is
        suspended meanwhile is waited for too, until it is resumed or cancelled. It works during a pause too, but for
        ``finish``.

        When this has returned or raised, the loop lets go of ``staged``.

        Raises:
            UpdateRefused: It cannot be done; the old model is as before.
            EngineStopped: The loop does not run, or was stopped before it could be done.
            TimeoutError: It could not be done within ``timeout`` seconds; the old model stays.
            RuntimeError: Called from a handler.
        """
        order = UpdateOrder(staged, inflight)
        with self._lock:
            self._check(self._accepts)
            self._inbox.update(order)
            try:
                self._outbox.wait(self._outbox.news, lambda: order.is_done, timeout, "the update of its model")
            except TimeoutError:
                self._inbox.withdraw(order)  # what is being applied in this moment is waited for
                self._outbox.wait(self._outbox.news, lambda: order.is_done, None, "the update of its model")
                if order.report is None and order.error is None:
                    raise
            except BaseException:
                self._inbox.withdraw(order)
                raise
            error, order.error = order.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame: they would keep each other, and the staged model
            if order.report is None:
                raise self._reason() from self.failure
            return order.report

    def register_result_handler(
        self, request_id: Hashable, on_finish: Handler, on_lost: LostHandler | None = None
    ) -> None:
        """One more handler for a request; called at once, in this thread, where the outcome is kept here already."""
        self._outbox.listen(request_id, on_finish, on_lost)

    def result(self, request_id: Hashable, timeout: float | None = None) -> EngineOutput:
        """Wait for the outcome and take it, from a loop that has ended too."""
        return self._outbox.result(request_id, timeout)

    def results(self, timeout: float | None = None) -> Iterator[EngineOutput]:
        """The outcomes of requests without a handler, each as it is finished; ends when none is left to come.

        Where the loop has ended and some will never come, it raises EngineStopped after those that did.
        """
        return self._outbox.results(timeout)

    def stream(self, request_id: Hashable, timeout: float | None = None) -> Iterator[StreamPiece]:
        """The tokens and the text of a request with ``stream`` as they come; the last pieces bring the outcome.

        Nothing waits for the reader: what it has not read yet is kept. Leaving early does not cancel the request.

        Raises:
            ValueError: The request was added without ``stream``, or somebody reads it already.
        """
        return self._outbox.stream(request_id, self.engine.vocabulary, timeout)

    # Of any thread

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def _accepts(self) -> bool:
        return self.is_running and not self._inbox.stopping

    def _check(self, fine: bool) -> None:
        if not fine:
            raise self._reason() from self.failure

    def _reason(self) -> EngineStopped:
        if self.failure is not None:
            return EngineStopped(f"the engine died: {type(self.failure).__name__}: {self.failure}")
        return EngineStopped(f"the engine loop {'was stopped' if self._inbox.stopping else 'is not running'}")

    def _hasten(self, unfinished: Unfinished) -> None:
        with self._lock:
            self._inbox.stop(unfinished)
            self._outbox.news.notify_all()

    # Of the loop's thread

    def _run(self) -> None:
        self._end(Driver(self.engine, self._inbox, self._outbox).run())

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            self.failure = failure
            self._is_over = True
            reason = self._reason()
        reason.__cause__ = failure
        self._outbox.end(reason)
