"""Input lines -> a stored batch -> the queue. The one way in, for the command line and the client alike.

Lines are read, checked and given to a sink in chunks, so memory stays flat. The sink of a submission stores them; that
of a dry run (:mod:`batchjobs.validation`) only looks at them. Both refuse the same lines: it is done here. A batch is
open to workers only when all of it is stored: a submission that is cut leaves nothing that runs. With a key it is
finished by the same submission later; without one it is taken back.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from batchjobs.errors import BatchjobsError, InvalidInput, LineError, UsageError
from batchjobs.failpoints import reach
from batchjobs.inputs import Input, RereadableInput, fingerprint, numbered_lines
from batchjobs.interrupts import uninterrupted
from batchjobs.jsonl import InvalidLineError, parse_line
from batchjobs.line_map import LineMap
from batchjobs.sampling_fields import NO_DEFAULTS, Defaults
from batchjobs.store import DuplicateCustomId
from batchjobs.types import Endpoint, Priority, Request, ShardId

if TYPE_CHECKING:
    from batchjobs.queue import JobQueue
    from batchjobs.store import Store

CHUNK_REQUESTS = 1000
CHUNK_BYTES = 4 * 2**20
MAX_ERRORS = 50_000
"""Errors that are kept. Input with more invalid lines is not read to its end, or where these are skipped, the others
are counted: the database has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a batch is made from its input.

    ``key`` makes the submission repeatable. With ``skip_invalid``, bad lines become failed requests; otherwise one bad
    line refuses the whole input. ``model`` is what the batch asks for; None takes any worker's.
    """

    model: str | None = None
    name: str | None = None
    queue: Priority = Priority.DEFAULT
    key: str | None = None
    skip_invalid: bool = False
    shard_size: int = 64
    defaults: Defaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What came of it. ``created`` is False when the key named a batch that was there already, whole.

    ``line_model`` is the model that the lines name, if any. ``invalid`` counts skipped lines, ``errors`` are those of
    the first ``MAX_ERRORS`` of them. ``warning`` says why nothing was put into the queue yet, if so.
    """

    batch_id: str
    created: bool
    requests: int
    line_model: str | None = None
    invalid: int = 0
    errors: Sequence[LineError] = ()
    warning: str | None = None


Progress = Callable[[int], None]
"""Called after each chunk with the number of requests that the sink has so far."""


class Sink(Protocol):
    """Where the requests of an input go, a chunk at a time, in input order."""

    def add(self, requests: Sequence[Request], rejected: Mapping[int, LineError]) -> None:
        """Takes a chunk. ``rejected`` are lines of it that were refused, by index: their custom_id may be in use.

        Raises:
            DuplicateCustomId: Some ids were used before. The chunk comes again without these requests; what was taken
                the first time is to be passed over then.
        """


def submit(
    store: Store,
    connect: Callable[[], JobQueue],
    inputs: Sequence[Input],
    plan: Plan,
    progress: Progress = lambda stored: None,
) -> Submission:
    """Stores a batch and queues it. Closes the inputs.

    Raises:
        InvalidInput: Lines were refused; nothing stays stored.
        KeyConflict: The key was used for other content.
        UsageError: There are no requests, or a file cannot be read.
    """
    with contextlib.ExitStack() as opened:
        for source in inputs:
            opened.callback(source.close)
        if plan.key is None:
            return _submit(store, connect, inputs, plan, "", progress)
        rereadable: list[RereadableInput] = []
        for source in inputs:
            rereadable.append(source.rereadable())
            opened.callback(rereadable[-1].close)
        digest = fingerprint(rereadable, plan.model, plan.defaults)
        return _submit(store, connect, rereadable, plan, digest, progress)


def _submit(
    store: Store,
    connect: Callable[[], JobQueue],
    inputs: Sequence[Input],
    plan: Plan,
    digest: str,
    progress: Progress,
) -> Submission:
    batch_id = None
    try:
        with uninterrupted():  # what is created is known, so that it can be taken back
            batch_id, created = _create(store, inputs, plan, digest)
        if not created:
            there = store.batch(batch_id)
            if there.submitted_at is not None:
                return Submission(batch_id=batch_id, created=False, requests=there.counts.total)
        loader = Loader(_Stored(store, batch_id), plan, progress)
        loader.load(inputs)
        reach("submit_before_open")
        shards = store.open_batch(batch_id)
    except BaseException as error:
        if batch_id is not None and (plan.key is None or isinstance(error, UsageError)):
            with contextlib.suppress(BatchjobsError):
                store.discard_batch(batch_id)
        raise
    reach("submit_after_open")
    warning = _enqueue(connect, batch_id, shards, plan.queue)
    reach("submit_after_enqueue")
    return Submission(
        batch_id=batch_id,
        created=True,
        requests=loader.requests,
        line_model=loader.line_model,
        invalid=loader.invalid,
        errors=loader.sorted_errors(),
        warning=warning,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """The sink of a submission."""

    store: Store
    batch_id: str

    def add(self, requests: Sequence[Request], rejected: Mapping[int, LineError]) -> None:
        self.store.add_requests(self.batch_id, requests, rejected)
        reach("submit_after_chunk")


def _create(store: Store, inputs: Sequence[Input], plan: Plan, digest: str) -> tuple[str, bool]:
    return store.create_batch(
        name=plan.name,
        key=plan.key,
        fingerprint=digest,
        model=plan.model,
        queue=plan.queue,
        shard_size=plan.shard_size,
        source="\n".join(_place(source.name) for source in inputs if source.name) or None,
        defaults=plan.defaults.as_json(),
    )


def _place(name: str) -> str:
    """Where an input is: a file by its absolute path, so that it can be found from elsewhere; others by their name."""
    return os.path.abspath(name) if os.path.isfile(name) else name


def _enqueue(connect: Callable[[], JobQueue], batch_id: str, shards: int, priority: Priority) -> str | None:
    """SQL has the batch, so a queue that cannot be reached is no failure: a worker finds the shards later."""
    try:
        connect().enqueue((ShardId(batch_id, number), priority) for number in range(shards))
    except BatchjobsError as error:
        return f"the batch is stored, but not queued yet: {error}. It starts by itself once a worker reaches the queue"
    return None


class Loader:
    """Streams the requests of an input into a sink, and keeps what is wrong with its lines.

    ``requests`` counts its lines, refused ones included and blank ones not; ``invalid`` those. ``line_model``
    is the model that they name; ``other_models`` are those in lines that were refused for them.
    """

    def __init__(self, sink: Sink, plan: Plan, progress: Progress = lambda stored: None) -> None:
        self.requests = 0
        self.invalid = 0
        self.line_model: str | None = None
        self.other_models: Counter[str] = Counter()
        self._sink = sink
        self._plan = plan
        self._progress = progress
        self._several = False
        self._names = ""
        self._lines = LineMap()
        self._errors: dict[int, LineError] = {}
        self._chunk: dict[int, Request] = {}
        self._chunk_bytes = 0
        self._rejected: dict[int, LineError] = {}

    def load(self, inputs: Sequence[Input]) -> None:
        """Reads all of it.

        Raises:
            InvalidInput: Lines were refused, or a file is no JSON Lines at all. What is good has gone to the sink.
            UsageError: There are no requests, or a file cannot be read.
        """
        self._several = len(inputs) > 1
        self._names = ", ".join(source.name or "the input" for source in inputs)
        reading, expected = None, 0
        for source, line_no, raw in numbered_lines(inputs):
            if line_no != expected or source is not reading:
                reading = source
                self._lines.begin(self.requests, source, line_no)
            expected = line_no + 1
            self._take(raw, self.requests, line_no)
            self.requests += 1
            if len(self._chunk) >= CHUNK_REQUESTS or self._chunk_bytes >= CHUNK_BYTES:
                self._flush()
        self._flush()
        if not self.requests:
            raise UsageError(f"no requests in {self._names}; nothing was stored")
        if self._errors and not self._plan.skip_invalid:
            raise InvalidInput(self._names, self.sorted_errors())

    def sorted_errors(self) -> list[LineError]:
        return [error for _, error in sorted(self._errors.items())]

    def _take(self, raw: bytes, index: int, line_no: int) -> None:
        try:
            request = parse_line(raw, line_no, index, self._plan.defaults)
            self._check_model(request, raw, line_no)
        except InvalidLineError as problem:
            self._refuse(index, problem.error, _endpoint_of(raw))
        else:
            self._chunk[index] = request
            self._chunk_bytes += len(raw)

    def _check_model(self, request: Request, raw: bytes, line_no: int) -> None:
        model = request.body.get("model")
        if model is None or model == self.line_model:
            return
        if self.line_model is not None:
            self.other_models[model] += 1
            message = f'model "{model}" differs from "{self.line_model}" in an earlier line; a batch has one model'
            field = "body.model" if b'"body"' in raw else "model"
            raise InvalidLineError(LineError(line_no, message, field, request.custom_id))
        self.line_model = model

    def _refuse(self, index: int, error: LineError, endpoint: Endpoint) -> None:
        source, _ = self._lines[index]
        # Most lines of a file have the same few things wrong with them.
        error = replace(error, message=sys.intern(error.message), source=source.name if self._several else None)
        self.invalid += 1
        if len(self._errors) < MAX_ERRORS:
            self._errors[index] = error
        self._chunk.pop(index, None)
        if self._plan.skip_invalid:
            custom_id = error.custom_id or f"request-{index}"
            self._chunk[index] = Request(index=index, custom_id=custom_id, endpoint=endpoint, body={})
            self._rejected[index] = error
        elif len(self._errors) >= MAX_ERRORS:
            raise InvalidInput(f"{self._names} (not read to the end)", self.sorted_errors())

    def _flush(self) -> None:
        while self._chunk:
            try:
                chunk = [self._chunk[index] for index in sorted(self._chunk)]
                self._sink.add(chunk, self._rejected)
                break
            except DuplicateCustomId as duplicates:
                self._refuse_duplicates(duplicates)
        self._chunk.clear()
        self._rejected.clear()
        self._chunk_bytes = 0
        self._progress(self.requests)

    def place_of(self, index: int) -> tuple[str | None, int]:
        """The line that a request came from, and its file where there are several."""
        source, line = self._lines[index]
        return (source.name if self._several else None), line

    def _refuse_duplicates(self, duplicates: DuplicateCustomId) -> None:
        for custom_id, index, first_index in duplicates.pairs:
            request = self._chunk[index]
            _, line = self._lines[index]
            first_source, first_line = self._lines[first_index]
            where = f"line {first_line} of {first_source.name}" if self._several else f"line {first_line}"
            message = f'custom_id "{custom_id}" was used before, on {where}'
            if custom_id in (f"request-{index}", f"request-{first_index}"):
                message += "; a plain line without one gets request- and its place, counted from 0"
            self._refuse(
                index, LineError(line, message, "custom_id", custom_id, "duplicate_custom_id"), request.endpoint
            )


def _endpoint_of(raw: bytes) -> Endpoint:
    """A guess for a line that was not understood, so that it is listed among its like."""
    return Endpoint.CHAT if b'"messages"' in raw[:CHUNK_BYTES] else Endpoint.COMPLETIONS
