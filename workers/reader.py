"""Reads the requests of claimed shards, tokenises them and hands them to the engine; takes their outcomes back.

A request that another worker with the same model has begun goes on behind what was stored of it. One without a seed
gets one of its own, the same on every worker, so that what goes on elsewhere is what would have come here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from batchjobs.errors import InvalidParameter
from batchjobs.failpoints import reach
from batchjobs.text import plural, shortened
from batchjobs.types import Endpoint, RequestError
from workers.engine.outbox import EngineStopped
from workers.engine.requests import EngineRequest, PromptError
from workers.held import ids, request_id
from workers.samplings import Samplings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchjobs.store import Store
    from batchjobs.types import Completion, Lease, Progress, Request, ShardId
    from workers.engine.engine import Engine
    from workers.engine.loop import EngineLoop
    from workers.engine.requests import EngineOutput
    from workers.holdings import Holdings
    from workers.outcomes import Outcomes
    from workers.recorder import Recorder

log = logging.getLogger("batchjobs.worker")


class Observer(Protocol):
    """Whoever counts what the worker does. The engine's thread calls it: it must be quick."""

    def finished(self, choices: Sequence[EngineOutput]) -> None:
        """A request of this worker has its outcome."""

    def updated(self, result: Literal["done", "refused", "failed"]) -> None:
        """A model update came to its end: failed is one that broke in the middle."""


class Reader:
    """For one thread, but for what the engine's thread calls. ``on_finish`` is called by it, after each request, with
    the number of its choices."""

    def __init__(
        self,
        store: Store,
        loop: EngineLoop,
        holdings: Holdings,
        recorder: Recorder,
        outcomes: Outcomes,
        on_finish: Callable[[int], None],
        observers: Observer | None = None,
    ) -> None:
        self._store = store
        self._loop = loop
        self._holdings = holdings
        self._recorder = recorder
        self._outcomes = outcomes
        self._on_finish = on_finish
        self._observers = observers
        self._samplings = Samplings()

    def read(self, lease: Lease, is_stopping: Callable[[], bool]) -> int:
        """Hands the unfinished requests of a shard to the engine, one by one; stops in the middle when told to, and
        where somebody gives the shard back.

        Returns:
            How many choices they ask for.

        Raises:
            ConnectionFailed: The database cannot be reached; nothing was read.
        """
        requests = self._store.pending_requests(lease)
        begun = self._store.checkpoints(lease, self._loop.engine.model_version)
        reach("after_read")
        choices = {request.index: request.n for request in requests}
        self._holdings.fill(lease, choices)
        if not requests:
            self._holdings.lose(lease)
        described = _described(len(requests), begun)
        log.info("claimed shard %s (%s, attempt %d)", lease.shard, described, lease.attempt, extra=ids(lease.shard))
        for request in requests:
            if is_stopping() or not self._submit(lease, request, begun.get(request.index, ())):
                break
        return sum(choices.values())

    def _submit(self, lease: Lease, request: Request, begun: tuple[Progress, ...]) -> bool:
        """False when nothing more of the shard is wanted, or the engine takes nothing more."""
        if not self._holdings.wants(lease, request.index):
            if not self._holdings.has(lease):
                return False
            self._record(lease, self._outcomes.cancelled(lease, request.index))
            return True
        try:
            sampling = self._samplings.of(request, lease.shard.batch_id)
            prompt_ids = encode(self._loop.engine, request)
            self._loop.engine.compile_format(sampling.response_format)
        except (PromptError, InvalidParameter) as error:
            code = error.code if isinstance(error, PromptError) else "invalid_request"
            self._fail(lease, request.index, code, str(error))
        except Exception as error:  # noqa: BLE001  whatever a tokenizer does with this text, it is this request's alone
            fields = ids(lease.shard, request.index)
            log.error("request %d of shard %s cannot be tokenised: %r", *_place(lease, request), error, extra=fields)
            self._fail(lease, request.index, "tokenization_failed", shortened(f"{type(error).__name__}: {error}", 300))
        else:
            name, made_by = request_id(lease, request.index), (self._outcomes.worker, lease.attempt)
            return self._add(lease, request, EngineRequest(name, prompt_ids, sampling, begun=begun, made_by=made_by))
        return True

    def _add(self, lease: Lease, request: Request, engine_request: EngineRequest) -> bool:
        try:
            with self._holdings.adding(lease, request.index) as suspended:
                if suspended:
                    engine_request = replace(engine_request, suspended=True)
                if suspended is not None:  # else it was given back in this moment
                    self._loop.add(engine_request, partial(self._take, lease, request))
        except EngineStopped:  # the main thread has seen it too, and gives everything back
            return False
        return True

    def _take(self, lease: Lease, request: Request, output: EngineOutput) -> None:
        """Runs in the engine's thread, which passes over what is raised here: every request must get an outcome."""
        try:
            choices = self._outcomes.of(output, lease, request)
        except Exception as error:
            fields = ids(lease.shard, request.index)
            log.exception("the outcome of request %d of shard %s cannot be read", *_place(lease, request), extra=fields)
            problem = RequestError(code="internal_error", message=shortened(f"{type(error).__name__}: {error}", 300))
            choices = self._outcomes.failed(lease, request.index, problem)
        if self._record(lease, choices) and self._observers is not None:
            self._observers.finished(output.choices)
        self._on_finish(len(output.choices))

    def _fail(self, lease: Lease, index: int, code: str, message: str) -> None:
        self._record(lease, self._outcomes.failed(lease, index, RequestError(code=code, message=message)))

    def _record(self, lease: Lease, choices: tuple[Completion, ...]) -> bool:
        """Whether anybody wants it."""
        is_wanted = self._holdings.finish(lease, choices[0].index)
        if is_wanted:
            self._recorder.put(lease, choices)
        return is_wanted


def encode(engine: Engine, request: Request) -> tuple[int, ...]:
    """The request's prompt as token ids.

    Raises:
        PromptError: It cannot be run.
    """
    if request.endpoint == Endpoint.CHAT:
        return engine.encode_chat(request.body["messages"], request.body.get("chat_template_kwargs") or {})
    return engine.encode_prompt(request.body["prompt"])


def _place(lease: Lease, request: Request) -> tuple[int, ShardId]:
    return request.index, lease.shard


def _described(requests: int, begun: Mapping[int, object]) -> str:
    return plural(requests, "request") + (f", {len(begun)} of them begun" if begun else "")
