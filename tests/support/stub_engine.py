"""An engine without a model: it emits words at a set speed, and behaves as :class:`workers.engine.EngineLoop` does.

The words depend on the prompt and the choice alone, so that a test knows every answer in advance. A token of a prompt
is a character. Some prompts are special:

- one that holds "untokenizable" raises PromptError, one that holds "explode" kills the engine's thread, and one that
  holds "exit" its whole process;
- of one that holds "uneven", choice 0 stops by itself after its first token; and of one that holds "faulty", choice 1
  fails after its first;
- a response format whose schema has ``"type": "impossible"`` fails as one of which no grammar can be made.

A request that was begun elsewhere goes on behind its tokens, which keep their logprobs and times. Two stubs with
different ``logprob`` show which of them made which token.

Its models are names such as ``other@stub-2``: a model and its version. One that holds "reload" has another shape, one
that holds "missing" cannot be found, and one that holds "broken" is refused in the middle of the update. After an
update tokens have the logprob ``UPDATED_LOGPROB``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, Inflight, Progress, RequestError, TokenText, VersionSpan
from workers.engine.outbox import EngineStopped
from workers.engine.requests import EngineOutput, EngineRequest, EngineStats, PromptError, PromptScores

UPDATED_LOGPROB = -0.125


class StubVocabulary:
    def text(self, token: int) -> str:
        return chr(token)


class StubEngine:
    model_name = "stub"
    device = "cpu"
    dtype = "float32"
    max_model_len = 4096
    vocabulary = StubVocabulary()

    def __init__(self, model_version: str = "stub-1") -> None:
        self.model_version = model_version
        self.model_details = {"architecture": "Stub"}

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if "untokenizable" in prompt:
            raise PromptError("invalid_prompt", "the stub does not take this prompt")
        if "bug" in prompt:
            raise ZeroDivisionError("a bug in a tokenizer")
        return tuple(ord(character) for character in prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = {}
    ) -> tuple[int, ...]:
        return self.encode_prompt("\n".join(str(message["content"]) for message in messages))

    def compile_format(self, response_format: Mapping[str, Any] | None) -> None:
        """The stub holds its answers to nothing."""


def expected_text(prompt: str, max_tokens: int, choice: int = 0) -> str:
    """What the stub answers."""
    return " ".join(_word(len(prompt), choice, position) for position in range(max_tokens))


def _word(prompt_tokens: int, choice: int, position: int) -> str:
    """The first choice has words such as ``8.0``, the second ``8.0b``, the third ``8.0c``."""
    mark = chr(ord("a") + choice) if choice else ""
    return f"{prompt_tokens}.{position}{mark}"


@dataclass
class _Choice:
    number: int
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: FinishReason | None = None
    error: RequestError | None = None

    def go_on(self, begun: Progress) -> None:
        self.token_ids, self.tokens = list(begun.token_ids), list(begun.tokens)
        self.logprobs, self.times = list(begun.logprobs), list(begun.token_times)
        self.spans = list(begun.version_spans)

    def take(self, logprob: float, seconds: float, version: str, made_by: tuple[str | None, int]) -> None:
        position = len(self.token_ids)
        span = VersionSpan(version=version, from_token=position, worker=made_by[0], attempt=made_by[1])
        if not self.spans or replace(self.spans[-1], from_token=position) != span:
            self.spans.append(span)
        self.token_ids.append(position)
        self.tokens.append(_word(self.prompt_tokens, self.number, position))
        self.logprobs.append(logprob)
        self.times.append(max([seconds, *self.times[-1:]]))

    def progress(self, started_at: datetime) -> Progress:
        return Progress(
            choice=self.number,
            token_ids=tuple(self.token_ids),
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            token_times=tuple(self.times),
            started_at=started_at,
            version_spans=tuple(self.spans),
        )


@dataclass
class _Sequence:
    """A request with its choices, which get their tokens side by side."""

    request: EngineRequest
    on_finish: Callable[[EngineOutput], None]
    started_at: datetime | None = None
    started: float = 0.0  # the same instant by the monotonic clock
    choices: list[_Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()
        for part in self.request.begun:
            self.choices[part.choice].go_on(part)
            self.started_at = part.started_at

    def clear(self) -> None:
        """From the beginning."""
        length = len(self.request.prompt_ids)
        self.choices = [_Choice(number, length) for number in range(self.request.sampling.n)]

    @property
    def prompt(self) -> str:
        return "".join(map(chr, self.request.prompt_ids))

    @property
    def going(self) -> list[_Choice]:
        """The choices that have not ended."""
        return [choice for choice in self.choices if choice.reason is None]

    @property
    def is_cancelled(self) -> bool:
        return any(choice.reason is FinishReason.CANCELLED for choice in self.choices)

    def start(self) -> None:
        now = datetime.now(UTC)
        self.started_at = self.started_at or now
        self.started = time.monotonic() - (now - self.started_at).total_seconds()
        for choice in self.going:
            self._look(choice)

    def advance(self, logprob: float, version: str) -> int:
        """A token for each choice that goes on. Returns how many there were."""
        going = self.going
        for choice in going:
            choice.take(logprob, time.monotonic() - self.started, version, self.request.made_by)
            self._look(choice)
        return len(going)

    def _look(self, choice: _Choice) -> None:
        """Whether it has ended with what it has."""
        count = len(choice.token_ids)
        if count and "uneven" in self.prompt and choice.number == 0:
            choice.reason = FinishReason.STOP
        elif count and "faulty" in self.prompt and choice.number == 1:
            choice.reason = FinishReason.ERROR
            choice.error = RequestError(code="non_finite_logits", message="the stub was told to fail")
        elif count >= self.request.sampling.max_tokens:
            choice.reason = FinishReason.LENGTH

    def progress(self) -> tuple[Progress, ...]:
        """Of each choice that has a token and did not fail."""
        if self.started_at is None:
            return ()
        good = (None, FinishReason.STOP, FinishReason.LENGTH)
        return tuple(c.progress(self.started_at) for c in self.choices if c.token_ids and c.reason in good)

    def end(self, reason: FinishReason, error: RequestError | None = None) -> None:
        for choice in self.going:
            choice.reason, choice.error = reason, error

    def output(self, version: str) -> EngineOutput:
        """``version`` is the engine's, for choices without a token."""
        first, *others = (self._output(choice, version) for choice in self.choices)
        return replace(first, prompt_scores=self._scores(), other_choices=tuple(others))

    def _output(self, choice: _Choice, version: str) -> EngineOutput:
        assert choice.reason is not None
        now = datetime.now(UTC)
        first = self.started_at + timedelta(seconds=choice.times[0]) if self.started_at and choice.times else None
        return EngineOutput(
            request_id=self.request.request_id,
            choice=choice.number,
            text=" ".join(map(str, choice.tokens)),
            finish_reason=choice.reason,
            token_ids=tuple(choice.token_ids),
            tokens=tuple(choice.tokens),
            logprobs=tuple(choice.logprobs),
            token_times=tuple(choice.times),
            top_logprobs=None,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=0,
            started_at=self.started_at or now,
            first_token_at=first,
            finished_at=now,
            error=choice.error,
            version_spans=tuple(choice.spans),
            model_version=choice.spans[-1].version if choice.spans else version,
        )

    def _scores(self) -> PromptScores | None:
        wanted = self.request.sampling.prompt_logprobs
        if wanted is None or self.started_at is None:
            return None
        ids = self.request.prompt_ids
        tops = tuple(((token, -0.25, chr(token)),) for token in ids[1:])
        return PromptScores(
            token_ids=ids,
            tokens=tuple(map(chr, ids)),
            logprobs=(None, *(-0.25 for _ in ids[1:])),
            top_logprobs=(None, *tops) if wanted else None,
        )


@dataclass
class StubStaged:
    """A model as the stub has it loaded."""

    source: str
    name: str
    version: str
    details: dict[str, Any] = field(default_factory=lambda: {"architecture": "Stub"})

    @property
    def why_not_hot(self) -> str | None:
        return "its layers have other shapes" if "reload" in self.source else None

    @property
    def is_hot(self) -> bool:
        return self.why_not_hot is None


@dataclass(frozen=True)
class StubReport:
    """As :class:`workers.engine.update.UpdateReport`, which needs torch."""

    old_version: str
    new_version: str
    old_model: str
    new_model: str
    is_reload: bool
    seconds: float = 0.0
    finished: int = 0
    restarted: int = 0
    recomputed: int = 0
    kept: int = 0


class StubLoop:
    """A token, with ``logprob``, for each running request every ``step_seconds``. ``hold`` stops it, and ``release``
    lets it go on."""

    def __init__(
        self,
        *,
        step_seconds: float = 0.0005,
        max_requests: int = 64,
        model_version: str = "stub-1",
        logprob: float = -0.5,
    ) -> None:
        self.engine = StubEngine(model_version)
        self.failure: BaseException | None = None
        self._logprob = logprob
        self._step_seconds = step_seconds
        self._max_requests = max_requests
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._pauses = 0
        self._is_standing = self._is_over = False
        self._waiting: dict[Hashable, _Sequence] = {}
        self._running: dict[Hashable, _Sequence] = {}
        self._cancelled: set[Hashable] = set()
        self._suspended: set[Hashable] = set()
        self._stopping = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.can_stage = threading.Event()
        """Cleared by a test, loading a model takes until it is set."""
        self.can_stage.set()
        self.is_staging = self.is_updating = self._is_finishing = False
        self._ticked_at = time.monotonic()
        self._steps = self._tokens = self._prompt_tokens = 0
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @contextmanager
    def pause(self, timeout: float | None = None) -> Iterator[None]:
        with self._lock:
            self._check()
            self._pauses += 1
        try:
            with self._lock:
                if not self._news.wait_for(lambda: self._is_standing or self._is_over, timeout):
                    raise TimeoutError("the stub did not stand still in time")
                self._check()
            yield
        finally:
            with self._lock:
                self._pauses -= 1

    def progress(self, timeout: float | None = None) -> dict[Hashable, tuple[Progress, ...]]:
        with self._lock:
            self._check()
            here = {**self._running, **self._waiting}
            found = {name: sequence.progress() for name, sequence in here.items()}
            return {name: parts for name, parts in found.items() if parts}

    def _check(self) -> None:
        if self._is_over or not self.is_running:
            raise EngineStopped("the stub does not run") from self.failure

    def add(self, request: EngineRequest, on_finish: Callable[[EngineOutput], None]) -> None:
        with self._lock:
            self._check()
            if self._stopping.is_set():
                raise EngineStopped("the stub was stopped")
            if request.request_id in self._waiting or request.request_id in self._running:
                raise ValueError(f"request {request.request_id!r} is in the engine already")
            self._waiting[request.request_id] = _Sequence(request, on_finish)
            if request.suspended:
                self._suspended.add(request.request_id)

    def cancel(self, request_id: Hashable) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def suspend(self, request_ids: Iterable[Hashable]) -> None:
        with self._lock:
            self._suspended |= {*request_ids} & {*self._waiting, *self._running}

    def resume(self, request_ids: Iterable[Hashable]) -> None:
        with self._lock:
            self._suspended -= {*request_ids}

    def stage(self, source: str, revision: str | None = None) -> StubStaged:
        self.is_staging = True
        self.can_stage.wait()
        self.is_staging = False
        if "missing" in source:
            raise UsageError(f"there is no model {source}")
        name, _, version = source.partition("@")
        return StubStaged(source, name, version)

    def update_model(self, staged: StubStaged, inflight: Inflight, timeout: float | None = None) -> StubReport:
        self.is_updating = True
        try:
            with self._lock:
                return self._update(staged, Inflight(inflight))
        finally:
            self.is_updating = False

    def _update(self, staged: StubStaged, inflight: Inflight) -> StubReport:
        self._check()
        begun = {name: sequence for name, sequence in self._running.items() if name not in self._cancelled}
        if inflight is Inflight.FINISH:
            if self._is_standing:
                raise UsageError("the engine is paused, so nothing can be finished")
            if begun.keys() & self._suspended:
                raise UsageError("answers that were begun are suspended")
            self._is_finishing = True
            self._news.wait_for(lambda: not self._running or self._is_over)  # for those suspended meanwhile too
            self._is_finishing = False
            self._check()
            begun = {name: each for name, each in begun.items() if not each.is_cancelled}
        if not staged.is_hot and not ({*self._running, *self._waiting} <= self._cancelled):
            raise UsageError("the engine holds requests")
        if "broken" in staged.source:
            raise UsageError("the smoke prompt's logits differ")
        if inflight is Inflight.RESTART:
            for sequence in self._running.values():
                sequence.clear()
        old = self.engine.model_version, self.engine.model_name
        self.engine.model_version, self.engine.model_name = staged.version, staged.name
        self._logprob = UPDATED_LOGPROB
        counts = {"finish": "finished", "restart": "restarted", "recompute": "recomputed", "keep": "kept"}
        return StubReport(
            old_version=old[0],
            new_version=staged.version,
            old_model=old[1],
            new_model=staged.name,
            is_reload=not staged.is_hot,
            **{counts[inflight]: len(begun)},
        )

    @property
    def is_standing(self) -> bool:
        """Whether it stands still, in somebody's pause."""
        with self._lock:
            return self._is_standing and self._pauses > 0

    def stats(self) -> EngineStats:
        with self._lock:
            running = [each for name, each in self._running.items() if name not in self._suspended]
            waiting = [each for name, each in self._waiting.items() if name not in self._suspended]
            held = {**self._running, **self._waiting}
            return EngineStats(
                running=sum(len(sequence.going) for sequence in running),
                waiting=sum(len(sequence.going) for sequence in waiting),
                suspended=sum(len(held[name].going) for name in self._suspended),
                kv_usage_ratio=len(self._running) / self._max_requests,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._tokens,
                preemptions=0,
                steps=self._steps,
                ticked_at=self._ticked_at,
            )

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._step_seconds):
                self._ticked_at = time.monotonic()
                for sequence in self._cancel():
                    sequence.on_finish(sequence.output(self.engine.model_version))
                for sequence in self._step():
                    sequence.on_finish(sequence.output(self.engine.model_version))
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        with self._lock:
            self._is_over = True
            self._news.notify_all()

    def _cancel(self) -> list[_Sequence]:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            found = [self._running.pop(i, None) or self._waiting.pop(i, None) for i in cancelled]
            self._suspended -= cancelled
            ended = [sequence for sequence in found if sequence is not None]
            for sequence in ended:
                sequence.end(FinishReason.CANCELLED)
            return ended

    def _step(self) -> list[_Sequence]:
        with self._lock:
            self._is_standing = self._pauses > 0
            if self._is_standing:
                self._news.notify_all()
            if self._is_standing or not self._open.is_set():
                return []
            self._steps += bool(self._running or self._waiting)
            while (request_id := self._next()) is not None:
                self._admit(request_id)
            ended = []
            for request_id, sequence in list(self._running.items()):
                if request_id in self._suspended:
                    continue
                self._tokens += sequence.advance(self._logprob, self.engine.model_version)
                if not sequence.going:
                    ended.append(self._running.pop(request_id))
            self._news.notify_all()
            return ended

    def _next(self) -> Hashable | None:
        """Who starts: suspended ones give way."""
        going = [name for name in self._running if name not in self._suspended]
        if self._is_finishing or len(going) >= self._max_requests:
            return None
        return next((name for name in self._waiting if name not in self._suspended), None)

    def _admit(self, request_id: Hashable) -> None:
        sequence = self._running[request_id] = self._waiting.pop(request_id)
        if "explode" in sequence.prompt:
            raise RuntimeError("the stub engine exploded")
        if "exit" in sequence.prompt:
            os._exit(9)
        sequence.start()
        schema = (sequence.request.sampling.response_format or {}).get("json_schema", {}).get("schema", {})
        if schema.get("type") == "impossible":
            sequence.end(FinishReason.ERROR, RequestError(code="invalid_response_format", message="no such type"))
        self._prompt_tokens += len(sequence.request.prompt_ids)
