"""The client for asyncio. All the work is done by :mod:`batchjobs.client`, in threads; nothing here blocks the loop.

from batchjobs import AsyncClient

async with AsyncClient() as client:
    batch = await client.submit("prompts.jsonl", max_tokens=256)
    async for result in batch.results(follow=True):
        print(result.custom_id, result.text)

No thread is held while something is waited for. A task that is cancelled leaves nothing running: what it had begun in a
thread has ended, or was taken back, before ``CancelledError`` goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from batchjobs.client import Batch, Client
from batchjobs.errors import WaitTimeout
from batchjobs.following import follow_results
from batchjobs.results import Result
from batchjobs.waiting import too_late

if TYPE_CHECKING:
    from types import TracebackType

    from batchjobs.inputs import Submittable
    from batchjobs.settings import Settings
    from batchjobs.types import BatchInfo

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_PAGE = 32
"""Results that are read at a time, while those before them are used."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


# -------------------------------------------------------------------------------------------------------- threads


def _begin(call: Callable[[], T]) -> asyncio.Future[T]:
    """Runs it in a thread. A future and no task: ``asyncio.run`` cancels tasks at its end, and threads go on."""
    return asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, call)


async def _end(running: asyncio.Future[Any]) -> None:
    """Waits until it has ended, however it ended and however often the task is cancelled meanwhile."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # seen, so that nobody complains


async def _run(call: Callable[[], T]) -> T:
    running = _begin(call)
    try:
        return await asyncio.shield(running)
    finally:
        await _end(running)


class _Layer(Generic[S]):
    """Over ``sync``, the object that does the work."""

    sync: S


def _threaded(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Layer[S], P], Coroutine[Any, Any, T]]:
    """The same method, to be awaited."""

    @wraps(call)
    async def threaded(self: _Layer[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _run(lambda: call(self.sync, *args, **kwargs))

    return threaded


async def _read_ahead(rows: Iterator[T]) -> AsyncGenerator[T, None]:
    """The rows, read by the page: while one is used, the next one comes."""
    coming = _begin(lambda: list(islice(rows, _PAGE)))
    try:
        while page := await asyncio.shield(coming):
            coming = _begin(lambda: list(islice(rows, _PAGE)))
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

    async def submit(self, source: Submittable, **options: Any) -> AsyncBatch:
        """As :meth:`batchjobs.Client.submit`; an iterable is iterated in a thread.

        If the task is cancelled meanwhile, nothing of the submission stays; with ``key``, what was stored so far waits
        for the same submission, which then finishes it.
        """
        given_up = threading.Event()
        progress = options.pop("progress", None)

        def stored(requests: int) -> None:
            if given_up.is_set():
                raise _GivenUp
            if progress is not None:
                progress(requests)

        running = _begin(lambda: self.sync.submit(source, progress=stored, **options))
        try:
            return AsyncBatch(await asyncio.shield(running))
        except asyncio.CancelledError:
            given_up.set()
            await _end(running)
            if options.get("key") is None and running.exception() is None:
                await _end(_begin(running.result().cancel))  # too late to be taken back
            raise

    async def batch(self, batch_id: str) -> AsyncBatch:
        """A batch that was submitted before. Raises NotFound."""
        return AsyncBatch(await _run(lambda: self.sync.batch(batch_id)))

    async def query(self, sql: str, *, limit: int | None = None, timeout_seconds: float = 60.0) -> list[dict[str, Any]]:
        """The rows of one SELECT, as :meth:`batchjobs.Client.query` gives them, all at once."""
        return await _run(lambda: list(self.sync.query(sql, limit=limit, timeout_seconds=timeout_seconds)))

    batches = _threaded(Client.batches)
    workers = _threaded(Client.workers)
    pause_workers = _threaded(Client.pause_workers)
    resume_workers = _threaded(Client.resume_workers)
    close = _threaded(Client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncBatch(_Layer[Batch]):
    """:class:`batchjobs.Batch` for asyncio. Everything is read afresh each time; ``sync`` is the batch behind it."""

    def __init__(self, batch: Batch) -> None:
        self.sync = batch

    @property
    def id(self) -> str:
        return self.sync.id

    def __repr__(self) -> str:
        return f"AsyncBatch({self.id!r})"

    async def info(self) -> BatchInfo:
        """Everything ``batchjobs status`` shows; ``status`` and ``counts`` are in it."""
        return await _run(lambda: self.sync.info)

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
                return await _run(lambda seen=looks.append: self.sync.wait(0, seen))  # type: ignore[misc]
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
            async with aclosing(_read_ahead(self.sync.results())) as rows:
                async for result in rows:
                    yield result
            return
        after_index = -1
        while True:
            look = _Look(self.sync, after_index)
            async with aclosing(_read_ahead(look.results())) as rows:
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


class _GivenUp(BaseException):
    """Nobody waits for the submission any more."""


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
        store = self._batch.client.store
        try:
            for stored in follow_results(
                store, self._batch.id, after_index=self._after_index, poll_seconds=0, seen=self._seen
            ):
                yield Result.of(stored)
            self.is_last = True
        except _NextLook:
            return

    def _seen(self, info: BatchInfo) -> None:
        self._looks += 1
        if self._looks > 1:
            raise _NextLook
