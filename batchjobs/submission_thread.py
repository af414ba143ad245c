"""A submission that can be given up while its source is silent, for :mod:`batchjobs.aio`."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any

from batchjobs.client import Batch, Client
from batchjobs.errors import BatchjobsError

if TYPE_CHECKING:
    from batchjobs.inputs import Submittable


class _GivenUp(BaseException):
    """Nobody waits for the submission any more."""


class SubmissionThread(threading.Thread):
    """A submission in a thread of its own, because nobody knows how long its source is silent.

    Whether it came first to ``made`` or was given up is decided there: a future that was cancelled takes no result.
    """

    def __init__(self, client: Client, source: Submittable, options: dict[str, Any]) -> None:
        super().__init__(name="batchjobs-submission", daemon=True)
        self.made: Future[Batch] = Future()
        self._client = client
        self._source = source
        self._options = options
        self._progress = options.pop("progress", None)
        self._context = contextvars.copy_context()

    def run(self) -> None:
        try:
            batch = self._context.run(self._submit)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            if self.made.set_running_or_notify_cancel():
                self.made.set_exception(error)
            return
        if self.made.set_running_or_notify_cancel():
            self.made.set_result(batch)
        else:
            self._cancel(batch)

    def _submit(self) -> Batch:
        source = self._source
        is_file = isinstance(source, str | PathLike) or hasattr(source, "read")
        if isinstance(source, Iterable) and not is_file and not isinstance(source, Mapping):
            source = self._items(source)
        return self._client.submit(source, progress=self._stored, **self._options)

    def _items(self, source: Iterable[Any]) -> Iterator[Any]:
        for item in source:
            self._check_wanted()
            yield item
        self._check_wanted()

    def _stored(self, requests: int) -> None:
        self._check_wanted()
        if self._progress is not None:
            self._progress(requests)

    def _check_wanted(self) -> None:
        if self.made.cancelled():
            raise _GivenUp

    def cancel_what_was_made(self) -> None:
        if self.made.exception() is None:
            self._cancel(self.made.result())

    def _cancel(self, batch: Batch) -> None:
        """Too late to be taken back. With a key it stays: the same submission later finds it."""
        if self._options.get("key") is None:
            with suppress(BatchjobsError), Client(self._client.settings) as client:  # the other may be closed by now
                client.cancel_batch(batch.id)
