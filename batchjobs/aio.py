"""The client for asyncio. All the work is done by :mod:`batchjobs.client`, in threads; nothing here blocks the loop.

from batchjobs import AsyncClient

async with AsyncClient() as client:
    batch = await client.submit("prompts.jsonl", max_tokens=256)
    async for result in batch.results(follow=True):
        print(result.custom_id, result.text)

No thread is held while something is waited for. When a task is cancelled, what had not begun is dropped at once, and
what had begun in a thread has ended before ``CancelledError`` goes on. Only a submission is left to its thread, which
takes it back once its source moves: it may be silent for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from batchjobs.client import Batch, Client, while_open
from batchjobs.errors import WaitTimeout
from batchjobs.following import follow_results
from batchjobs.results import Result
from batchjobs.submission_thread import SubmissionThread
from batchjobs.waiting import too_late

if TYPE_CHECKING:
    from types import TracebackType

    from batchjobs.inputs import Submittable
    from batchjobs.settings import Settings
    from batchjobs.store import Store, StoredResult
    from batchjobs.types import BatchInfo

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_PAGE = 32
"""Results that are read at a time, while those before them are used."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_THREADS = 8
"""Calls that run at a time, and submissions besides. Together they need about the connections of one database pool."""
_PARTING_SECONDS = 2.0
"""How long ``close`` waits for cancelled submissions that are being taken back."""


# -------------------------------------------------------------------------------------------------------- threads


def _begin(threads: Executor, call: Callable[[], T]) -> Future[T]:
    return threads.submit(contextvars.copy_context().run, call)


async def _end(running: Future[Any]) -> None:
    """Takes back what has not begun, and waits for what has, however often the task is cancelled meanwhile."""
    if running.cancel() or running.done():
        return
    ended = asyncio.wrap_future(running)
    while not ended.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    if not ended.cancelled():
        ended.exception()  # seen, so that nobody complains


async def _run(threads: Executor, call: Callable[[], T]) -> T:
    running = _begin(threads, call)
    try:
        return await asyncio.wrap_future(running)
    finally:
        await _end(running)


class _Layer(Generic[S]):
    """Over ``sync``, the object that does the work."""

    sync: S
    _threads: Executor


def _threaded(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Layer[S], P], Coroutine[Any, Any, T]]:
    """The same method, to be awaited."""

    @wraps(call)
    async def threaded(self: _Layer[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _run(self._threads, lambda: call(self.sync, *args, **kwargs))

    return threaded


async def _read_ahead(threads: Executor, rows: Iterator[T]) -> AsyncGenerator[T, None]:
    """The rows, read by the page: while one is used, the next one comes."""
    coming = _begin(threads, lambda: list(islice(rows, _PAGE)))
    try:
        while page := await asyncio.wrap_future(coming):
            coming = _begin(threads, lambda: list(islice(rows, _PAGE)))
            for row in page:
                yield row
    finally:
        await _end(coming)


# ------------------------------------------------------------------------------------------------ client and batch


class AsyncClient(_Layer[Client]):
    """:class:`batchjobs.Client` for asyncio: the same arguments, the same errors, awaited. May be shared by tasks.

    ``sync`` is the client behind it. It has the orders that are left out here, such as ``update_model``.
    """

    def __init__(self, settings: Settings | None = None, **overrides: Any) -> None:
        self.sync = Client(settings, **overrides)
        self._threads = ThreadPoolExecutor(_THREADS, "batchjobs")  # they end with the last one who holds it
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._given_up: WeakSet[threading.Thread] = WeakSet()

    async def submit(self, source: Submittable, **options: Any) -> AsyncBatch:
        """As :meth:`batchjobs.Client.submit`; an iterable is iterated in a thread.

        A task that is cancelled meanwhile goes on at once. The thread notices with the next item of an iterable, or the
        next 1,000 lines of a file, and takes back what was stored; with ``key``, it waits for the same submission,
        which then finishes it. A source that never moves again keeps its thread, but no process from ending.
        """
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_THREADS))
        async with turn:
            thread = SubmissionThread(self.sync, source, options)
            thread.start()
            try:
                return AsyncBatch(await asyncio.wrap_future(thread.made), self._threads)
            except asyncio.CancelledError:
                if thread.made.cancel():
                    self._given_up.add(thread)
                else:  # it was made at this very moment
                    await _end(thread.made)
                    await _end(_begin(self._threads, thread.cancel_what_was_made))
                raise

    async def batch(self, batch_id: str) -> AsyncBatch:
        """A batch that was submitted before. Raises NotFound."""
        return AsyncBatch(await _run(self._threads, lambda: self.sync.batch(batch_id)), self._threads)

    async def query(self, sql: str, *, limit: int | None = None, timeout_seconds: float = 60.0) -> list[dict[str, Any]]:
        """The rows of one SELECT, as :meth:`batchjobs.Client.query` gives them, all at once."""
        return await _run(
            self._threads, lambda: list(self.sync.query(sql, limit=limit, timeout_seconds=timeout_seconds))
        )

    async def close(self) -> None:
        """As :meth:`batchjobs.Client.close`. Cancelled submissions get two seconds to be taken back."""

        def close() -> None:
            deadline = time.monotonic() + _PARTING_SECONDS
            for thread in list(self._given_up):
                thread.join(max(0.0, deadline - time.monotonic()))
            self.sync.close()

        await _run(self._threads, close)

    batches = _threaded(Client.batches)
    workers = _threaded(Client.workers)
    pause_workers = _threaded(Client.pause_workers)
    resume_workers = _threaded(Client.resume_workers)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncBatch(_Layer[Batch]):
    """:class:`batchjobs.Batch` for asyncio. Everything is read afresh each time; ``sync`` is the batch behind it."""

    def __init__(self, batch: Batch, threads: Executor) -> None:
        self.sync = batch
        self._threads = threads

    @property
    def id(self) -> str:
        return self.sync.id

    def __repr__(self) -> str:
        return f"AsyncBatch({self.id!r})"

    async def info(self) -> BatchInfo:
        """Everything ``batchjobs status`` shows; ``status`` and ``counts`` are in it."""
        return await _run(self._threads, lambda: self.sync.info)

    async def wait(
        self, timeout: float | None = None, seen: Callable[[BatchInfo], None] = lambda info: None
    ) -> BatchInfo:
        """Returns when every request has its outcome; failed requests are no error here.

        ``seen`` is called with the state about once a second. Raises WaitTimeout after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE_SECONDS
        while True:
            left = pause if deadline is None else deadline - time.monotonic()
            looks: list[BatchInfo] = []
            try:
                return await _run(self._threads, lambda seen=looks.append: self.sync.wait(0, seen))  # type: ignore[misc]
            except WaitTimeout:
                if left <= 0:
                    raise WaitTimeout(too_late(looks[-1], timeout or 0)) from None
            finally:
                for info in looks:
                    seen(info)
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def results(self, follow: bool = False) -> AsyncGenerator[Result, None]:
        """The finished requests in input order, as :meth:`batchjobs.Batch.results` gives them. A page is read ahead.

        To leave the loop early, wrap it: ``async with contextlib.aclosing(batch.results()) as results: ...``.
        """
        if not follow:
            async with aclosing(_read_ahead(self._threads, self.sync.results())) as rows:
                async for result in rows:
                    yield result
            return
        after_index = -1
        while True:
            look = _Look(self.sync, after_index)
            async with aclosing(_read_ahead(self._threads, look.results())) as rows:
                async for result in rows:
                    after_index = result.index
                    yield result
            if look.is_last:
                return
            await asyncio.sleep(_LONGEST_PAUSE_SECONDS)

    result = _threaded(Batch.result)
    failures = _threaded(Batch.failures)
    cancel = _threaded(Batch.cancel)
    pause = _threaded(Batch.pause)
    resume = _threaded(Batch.resume)
    retry_failed = _threaded(Batch.retry_failed)


class _NextLook(Exception):
    """What had ended was given out; the next look would come after a pause."""


class _Look:
    """One look of :func:`follow_results`, so that the pause behind it can be made in the loop."""

    def __init__(self, batch: Batch, after_index: int) -> None:
        self.is_last = False
        self._batch = batch
        self._after_index = after_index
        self._looks = 0

    def results(self) -> Iterator[Result]:
        try:
            for stored in while_open(self._batch.client, self._follow):
                yield Result.of(stored)
            self.is_last = True
        except _NextLook:
            return

    def _follow(self, store: Store) -> Iterator[StoredResult]:
        return follow_results(store, self._batch.id, after_index=self._after_index, poll_seconds=0, seen=self._seen)

    def _seen(self, info: BatchInfo) -> None:
        self._looks += 1
        if self._looks > 1:
            raise _NextLook
