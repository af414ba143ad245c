"""The Python side of the queue: submit prompts, watch them, read the answers.

from batchjobs import Client

with Client() as client:
    batch = client.submit("prompts.jsonl", max_tokens=256)
    batch.wait(timeout=600)
    for result in batch.results():
        print(result.custom_id, result.text)
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from batchjobs.connections import connect_queue, connect_store
from batchjobs.control import Control
from batchjobs.errors import BatchjobsError, UsageError
from batchjobs.fields import listed
from batchjobs.following import follow_results
from batchjobs.inputs import Submittable, open_source
from batchjobs.models import asked_for
from batchjobs.results import Result
from batchjobs.retrying import Retry, retry
from batchjobs.sampling_fields import Defaults
from batchjobs.settings import Settings, load_settings
from batchjobs.submission import Plan, submit
from batchjobs.types import BatchInfo, BatchStatus, Counts, Priority
from batchjobs.waiting import wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store, WorkerRow

T = TypeVar("T")

SILENT_SECONDS = 10.0
"""A worker whose heartbeat in SQL is older may be cut off from the database; it says so over Redis."""


class Client(Control):
    """One producer's or operator's connection to the store and the queue. May be shared by threads.

    Args:
        settings: As :func:`batchjobs.load_settings` gives them; read from the usual places when None.
        overrides: Single settings by name, such as ``home=...`` or ``database_url=...``.

    Nothing is connected before it is needed. Once it is closed, whatever needs it raises BatchjobsError: its batches,
    and iterators that are under way. Raises UsageError for a setting that cannot be used.
    """

    def __init__(self, settings: Settings | None = None, **overrides: Any) -> None:
        if settings is not None and overrides:
            raise UsageError("give settings or single overrides, not both")
        self.settings = settings or load_settings(**overrides)
        self._store: Store | None = None
        self._queue: JobQueue | None = None
        self._lock = threading.Lock()
        self.is_closed = False

    @property
    def store(self) -> Store:
        """The SQL store. Raises ConnectionFailed when it cannot be reached, or BatchjobsError after ``close``."""
        with self._lock:
            self._check_open()
            if self._store is None:
                self._store = connect_store(self.settings)
            return self._store

    @property
    def queue(self) -> JobQueue:
        """The Redis queue. Raises ConnectionFailed when it cannot be reached, or BatchjobsError after ``close``."""
        with self._lock:
            self._check_open()
            if self._queue is None:
                self._queue = connect_queue(self.settings)
            return self._queue

    def _check_open(self) -> None:
        if self.is_closed:
            raise BatchjobsError("this client was closed; make a new one")

    def submit(
        self,
        source: Submittable,
        *,
        model: str | None = None,
        name: str | None = None,
        queue: Priority | str | None = None,
        key: str | None = None,
        on_invalid: Literal["reject", "skip"] = "reject",
        shard_size: int | None = None,
        system: str | None = None,
        model_version: str | None = None,
        progress: Callable[[int], None] | None = None,
        **defaults: Any,
    ) -> Batch:
        """Checks, stores and queues a batch.

        Args:
            source: A path, an open file, or an iterable of dicts with the fields of an input line. Files and iterables
                of any length are read as a stream: memory stays flat. (With ``key``, an iterable is first written to a
                temporary file.)
            model: The model that the batch asks for: only workers with it take the batch; default: the setting.
            name: Shown in lists.
            queue: ``high``, ``default`` or ``low``; default: the setting.
            key: The same key with the same content gives the same batch again.
            on_invalid: ``reject`` refuses everything for one bad line, ``skip`` makes bad lines failed requests.
            shard_size: Requests in one entry of the queue; default: the setting.
            system: A system message for chats without one.
            model_version: The only version of a model that may answer lines that name none, such as ``sha256:…``.
            progress: Called now and then with the number of requests stored so far. What it raises ends the
                submission, of which nothing stays; with ``key``, the same submission later finishes it.
            defaults: Sampling fields for lines that lack them: ``max_tokens=256, temperature=0``.

        Raises:
            InvalidInput: Lines were refused and nothing was stored; ``errors`` has them all.
            KeyConflict: ``key`` was used for other content.
            UsageError: An argument is wrong, there are no requests, or the file cannot be read.
            ConnectionFailed: The database cannot be reached. (An unreachable queue is a warning only.)
        """
        if on_invalid not in ("reject", "skip"):
            raise UsageError(f"on_invalid must be reject or skip, not {on_invalid!r}")
        plan = Plan(
            model=asked_for(model or self.settings.model),
            name=name,
            queue=_priority(queue or self.settings.queue),
            key=key,
            skip_invalid=on_invalid == "skip",
            shard_size=shard_size or self.settings.shard_size,
            defaults=Defaults({k: v for k, v in defaults.items() if v is not None}, system, model_version),
        )
        store = self.store
        try:
            made = submit(store, lambda: self.queue, [open_source(source)], plan, progress or (lambda stored: None))
        finally:
            _close_again(self, store)
        if made.warning is not None:
            warnings.warn(made.warning, stacklevel=2)
        return Batch(self, made.batch_id)

    def batch(self, batch_id: str) -> Batch:
        """A batch that was submitted before. Raises NotFound."""
        self.store.batch(batch_id)
        return Batch(self, batch_id)

    def batches(self, limit: int = 50) -> list[BatchInfo]:
        """The newest batches first."""
        return self.store.batches(limit)

    def query(self, sql: str, *, limit: int | None = None, timeout_seconds: float = 60.0) -> Iterator[dict[str, Any]]:
        """The rows of one SELECT, as dicts by column, streamed. ``docs/sql.md`` has the tables and views.

        Args:
            sql: One statement. It can read everything and change nothing.
            limit: Rows at most; None gives all.
            timeout_seconds: How long the database may work on it.

        Raises:
            UsageError: The statement is wrong, would write, or gives two columns one name.
            WaitTimeout: It takes longer than ``timeout_seconds``.
        """
        names, rows = self.store.select(sql, limit, timeout_seconds=timeout_seconds)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"the query gives several columns one name: {listed(twice)}; name them apart with AS")
        return while_open(self, lambda store: (dict(zip(names, row, strict=True)) for row in rows))

    def workers(self) -> list[WorkerRow]:
        """Workers that live, and those that ended or fell silent lately. The state of one that is cut off from the
        database is what it says of itself over Redis."""
        rows = self.store.workers()
        if not any(row.stopped_at is None and row.heartbeat_age_seconds > SILENT_SECONDS for row in rows):
            return rows
        notes = self.worker_notes()
        return [replace(row, state=notes[row.name]) if row.name in notes else row for row in rows]

    def worker_notes(self) -> dict[str, str]:
        """What living workers say over Redis that they wait for, by name; empty where Redis cannot be reached."""
        try:
            return self.queue.worker_notes()
        except BatchjobsError:
            return {}

    def retry_failed(self, batch_id: str) -> Retry:
        """Lets the failed requests of a batch run again. Raises NotFound, or UsageError if it was cancelled."""
        done = retry(self.store, lambda: self.queue, batch_id)
        if done.warning is not None:
            warnings.warn(done.warning, stacklevel=2)
        return done

    def close(self) -> None:
        """Leaves store and queue, for good. What was submitted goes on."""
        with self._lock:
            self.is_closed = True
            if self._queue is not None:
                self._queue.close()
            if self._store is not None:
                self._store.close()
            self._queue = self._store = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Batch:
    """One submission. Everything is read afresh from the store each time."""

    def __init__(self, client: Client, batch_id: str) -> None:
        self.client = client
        self.id = batch_id

    def __repr__(self) -> str:
        return f"Batch({self.id!r})"

    @property
    def info(self) -> BatchInfo:
        """Everything ``batchjobs status`` shows."""
        return self.client.store.batch(self.id)

    @property
    def status(self) -> BatchStatus:
        return self.info.status

    @property
    def counts(self) -> Counts:
        """Requests by state."""
        return self.info.counts

    def wait(self, timeout: float | None = None, seen: Callable[[BatchInfo], None] = lambda info: None) -> BatchInfo:
        """Returns when every request has its outcome; failed requests are no error here.

        ``seen`` is called with the state about once a second. Raises WaitTimeout after ``timeout`` seconds.
        """
        return wait_for_end(_store_while_open(self.client), self.id, timeout, seen)

    def results(self, follow: bool = False) -> Iterator[Result]:
        """The finished requests in input order, while the batch runs too. Reads in pages: memory stays flat.

        With ``follow``, each comes as soon as it and all before it have ended, and the last one ends the iteration.
        """
        for stored in while_open(
            self.client, lambda store: follow_results(store, self.id) if follow else store.results(self.id)
        ):
            if stored.completion is not None:
                yield Result.of(stored)

    def result(self, request: int | str) -> Result:
        """One request as it is now, by its index (from 0) or its custom_id. Raises NotFound."""
        store = self.client.store
        if isinstance(request, str):
            return Result.of(store.result_by_custom_id(self.id, request))
        return Result.of(store.result(self.id, request))

    def failures(self) -> dict[str, int]:
        """Failed requests by error code."""
        return self.client.store.failures(self.id)

    def cancel(self) -> Counts:
        """Cancels what has not ended; finished requests and partial texts stay. May be called again."""
        return self.client.cancel_batch(self.id)

    def pause(self, reason: str | None = None, release: bool = False) -> bool:
        """Lets no more token be made; what runs keeps its place and cache, or with ``release`` goes back to the queue.
        False: it was paused already, or has ended."""
        return self.client.pause_batch(self.id, reason, release)

    def resume(self) -> bool:
        """Lets it go on. False: it was not paused."""
        return self.client.resume_batch(self.id)

    def retry_failed(self) -> Retry:
        """Lets the failed requests run again; answers that are there stay as they are. May be called again.

        Refused lines can never run. An unreachable queue is a warning only: the requests run once a worker reaches it.
        Raises UsageError if the batch was cancelled.
        """
        return self.client.retry_failed(self.id)


def while_open(client: Client, read: Callable[[Store], Iterator[T]]) -> Iterator[T]:
    """The rows that ``read`` gives, as long as the client is open; then BatchjobsError."""
    store = client.store
    try:
        for row in read(_store_while_open(client)):
            yield row
            _ = client.store  # before the next one is read, which would connect again
    finally:
        _close_again(client, store)


def _store_while_open(client: Client) -> Store:
    return cast("Store", _StoreWhileOpen(client))


class _StoreWhileOpen:
    """The store, asked of the client at each call: it raises once the client is closed."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client.store, name)


def _close_again(client: Client, store: Store) -> None:
    """After a call that was under way while another thread closed the client: it may have connected anew."""
    if client.is_closed:
        store.close()


def _priority(value: Priority | str) -> Priority:
    try:
        return Priority(value)
    except ValueError:
        raise UsageError(f"queue must be {', '.join(Priority)}, not {value!r}") from None
