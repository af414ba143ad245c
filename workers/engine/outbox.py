"""The requests of an :class:`EngineLoop` from their add until somebody took their outcome, and who waits for what.

What it keeps true:
- A request has one outcome, and it is taken once: by its handlers, by ``result``, by ``results``, or by the reader of
  its stream. Until then it stays here, and its id is not free.
- Nobody waits for what cannot come: when the loop has ended, every waiting caller gets EngineStopped.
- Nothing of the caller's (a handler, the reading of a stream) runs with the lock held.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.engine.requests import EngineDelta, EngineOutput, EngineRequest
from workers.engine.text import TextStream

if TYPE_CHECKING:
    from workers.engine.text import Vocabulary

log = logging.getLogger("batchjobs.engine")


class EngineStopped(RuntimeError):
    """The loop does not run (any more); the cause, if there was one, is chained."""


Handler = Callable[[EngineOutput], None]
LostHandler = Callable[[EngineStopped], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What is new of a streamed request: a token with the text that is certain since, or the end of a choice.

    ``token_time`` is in seconds since the request started. The last piece of a choice has no token: it holds the rest
    of the text, and the choice's ``output``. The texts of all pieces of a choice are together ``output.text``.
    """

    choice: int
    text: str
    token_id: int | None = None
    logprob: float | None = None
    token_time: float | None = None
    output: EngineOutput | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    request: EngineRequest
    news: threading.Condition
    handlers: list[tuple[Handler, LostHandler | None]] = field(default_factory=list)
    deltas: deque[EngineDelta] = field(default_factory=deque)  # tokens at most: n times max_tokens
    texts: list[TextStream] = field(default_factory=list)  # one a choice, from the first reading on
    is_read: bool = False  # by the reader of its stream, who gets the outcome too
    output: EngineOutput | None = None


class Outbox:
    """Thread-safe. ``lock`` is re-entrant and may be held by the caller; ``news`` tells of every change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self.thread_id: int | None = None  # of the one that puts: it must never wait here
        self._entries: dict[Hashable, _Entry] = {}
        self._expected: dict[Hashable, None] = {}  # unfinished, and for ``results`` or ``result`` when they end
        self._kept: dict[Hashable, EngineOutput] = {}  # finished, not taken; the oldest first
        self._streamed: set[Hashable] = set()  # unfinished, and with ``stream``
        self._ended: EngineStopped | None = None

    # Of the loop

    @property
    def is_streaming(self) -> bool:
        return bool(self._streamed)

    @property
    def unfinished(self) -> list[Hashable]:
        with self.lock:
            return [request_id for request_id, entry in self._entries.items() if entry.output is None]

    def open(self, request: EngineRequest, handler: Handler | None, lost: LostHandler | None) -> None:
        """Raises ValueError where the id is not free."""
        with self.lock:
            name = request.request_id
            if name in self._entries:
                state = "has an outcome that nobody took yet" if name in self._kept else "is in the engine already"
                raise ValueError(f"request {name!r} {state}")
            entry = self._entries[name] = _Entry(request, threading.Condition(self.lock))
            if handler is not None:
                entry.handlers.append((handler, lost))
            else:
                self._expected[name] = None
            if request.stream:
                self._streamed.add(name)

    def put_deltas(self, deltas: Iterable[EngineDelta]) -> None:
        with self.lock:
            for delta in deltas:
                entry = self._entries.get(delta.request_id)
                if entry is not None:
                    entry.deltas.append(delta)
                    entry.news.notify_all()

    def put(self, output: EngineOutput) -> None:
        """A request has ended: tell whoever waits, call its handlers."""
        name = output.request_id
        with self.lock:
            entry = self._entries.get(name)
            if entry is None or entry.output is not None:
                return
            entry.output = output
            self._expected.pop(name, None)
            self._streamed.discard(name)
            if entry.handlers:
                del self._entries[name]
            elif not entry.is_read:
                self._kept[name] = output
            entry.news.notify_all()
            self.news.notify_all()
        for handler, _ in entry.handlers:
            _call(handler, output)

    def end(self, reason: EngineStopped) -> None:
        """No outcome comes any more. What is finished can still be taken."""
        with self.lock:
            self._ended = reason
            unfinished = [entry for entry in self._entries.values() if entry.output is None]
            for entry in unfinished:
                entry.news.notify_all()
            self.news.notify_all()
        for entry in unfinished:
            for _, lost in entry.handlers:
                if lost is not None:
                    _call(lost, self._stopped())

    # Of the callers

    def wait(self, news: threading.Condition, is_so: Callable[[], bool], timeout: float | None, what: str) -> None:
        """With the lock held. Returns when it is so, or when the loop has ended. Raises TimeoutError."""
        if is_so() or self._ended is not None:
            return
        if threading.get_ident() == self.thread_id:
            raise RuntimeError(f"a handler runs in the engine's thread and would wait for ever for {what}")
        if not news.wait_for(lambda: is_so() or self._ended is not None, timeout):
            raise TimeoutError(f"waited {timeout:g} s for {what}")

    def listen(self, request_id: Hashable, handler: Handler, lost: LostHandler | None) -> None:
        with self.lock:
            entry = self._entry(request_id)
            if entry.output is None:
                if self._ended is not None:
                    raise self._stopped()
                entry.handlers.append((handler, lost))
                self._expected.pop(request_id, None)
                self.news.notify_all()
                return
            self._take(request_id)
        _call(handler, entry.output)

    def result(self, request_id: Hashable, timeout: float | None) -> EngineOutput:
        with self.lock:
            entry = self._entry(request_id)
            self.wait(entry.news, lambda: entry.output is not None, timeout, f"the outcome of request {request_id!r}")
            if entry.output is None:
                raise self._stopped()
            self._take(request_id)
            return entry.output

    def results(self, timeout: float | None) -> Iterator[EngineOutput]:
        while True:
            with self.lock:
                self.wait(self.news, lambda: bool(self._kept) or not self._expected, timeout, "the next outcome")
                if not self._kept:
                    if self._expected:
                        raise self._stopped()
                    return
                request_id, output = next(iter(self._kept.items()))
                self._take(request_id)
            yield output

    def stream(self, request_id: Hashable, vocabulary: Vocabulary, timeout: float | None) -> Iterator[StreamPiece]:
        with self.lock:
            entry = self._entry(request_id)
            if not entry.request.stream:
                raise ValueError(f"request {request_id!r} was added without stream=True")
            if entry.is_read:
                raise ValueError(f"the stream of request {request_id!r} is being read already")
        return self._read(entry, vocabulary, timeout)

    def _read(self, entry: _Entry, vocabulary: Vocabulary, timeout: float | None) -> Iterator[StreamPiece]:
        self._begin_reading(entry, vocabulary)
        is_complete = False
        try:
            while isinstance(news := self._next_of(entry, timeout), EngineDelta):
                yield StreamPiece(
                    choice=news.choice,
                    text=entry.texts[news.choice].feed(news.token_id),
                    token_id=news.token_id,
                    logprob=news.logprob,
                    token_time=news.token_time,
                )
            is_complete = True
            for output in news.choices:
                text = entry.texts[output.choice].flush(output.text)
                yield StreamPiece(choice=output.choice, text=text, output=output)
        finally:
            self._end_reading(entry, is_complete=is_complete)

    def _begin_reading(self, entry: _Entry, vocabulary: Vocabulary) -> None:
        request = entry.request
        with self.lock:
            if entry.is_read:
                raise ValueError(f"the stream of request {request.request_id!r} is being read already")
            entry.is_read = True
            # A reader goes on in the text where the one before it left.
            entry.texts = entry.texts or [TextStream(vocabulary, request.sampling) for _ in range(request.sampling.n)]
            self._expected.pop(request.request_id, None)
            self._kept.pop(request.request_id, None)
            self.news.notify_all()

    def _end_reading(self, entry: _Entry, *, is_complete: bool) -> None:
        """Read to the end, the outcome is taken. Left before, the request is like one that nobody streams."""
        name = entry.request.request_id
        with self.lock:
            entry.is_read = False
            if self._entries.get(name) is not entry:
                return
            if is_complete:
                self._take(name)
            elif entry.output is not None:
                self._kept[name] = entry.output
            elif not entry.handlers:
                self._expected[name] = None
            self.news.notify_all()

    def _next_of(self, entry: _Entry, timeout: float | None) -> EngineDelta | EngineOutput:
        with self.lock:
            what = f"the next token of request {entry.request.request_id!r}"
            self.wait(entry.news, lambda: bool(entry.deltas) or entry.output is not None, timeout, what)
            if entry.deltas:
                return entry.deltas.popleft()
            if entry.output is None:
                raise self._stopped()
            return entry.output

    def _entry(self, request_id: Hashable) -> _Entry:
        if (entry := self._entries.get(request_id)) is None:
            raise LookupError(f"request {request_id!r} is not here: it was never added, or its outcome was taken")
        return entry

    def _take(self, request_id: Hashable) -> None:
        self._entries.pop(request_id, None)
        self._kept.pop(request_id, None)

    def _stopped(self) -> EngineStopped:
        """A new one for each caller: an exception that is raised twice would carry both tracebacks."""
        assert self._ended is not None
        stopped = EngineStopped(*self._ended.args)
        stopped.__cause__ = self._ended.__cause__
        return stopped


def _call(handler: Callable[..., None], *args: object) -> None:
    """What a handler raises is its own: the loop goes on."""
    try:
        handler(*args)
    except Exception:
        log.exception("a handler of the engine's outcomes failed; the engine goes on")
