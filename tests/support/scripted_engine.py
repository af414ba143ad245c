"""An engine without a model whose steps wait for the test: for what can happen between two steps of a loop.

Every running request gets a token a step; its n-th token has id ``n``, the logprob ``-n`` and the time ``n / 10``. As
in an engine with double buffering, a step's tokens are known at the next step, or when the engine is settled.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

from batchjobs.types import FinishReason, Progress, SamplingParams
from tests.support.waiting import eventually
from workers.engine.requests import EngineDelta, EngineOutput, EngineRequest, EngineStats
from workers.engine.text import Vocabulary

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def request(name: Hashable, tokens: int = 3, *, stream: bool = False, n: int = 1) -> EngineRequest:
    return EngineRequest(name, (5, 6, 7), SamplingParams(temperature=0, max_tokens=tokens, n=n), stream=stream)


@dataclass
class ScriptedConfig:
    max_queue_size: int = 0


@dataclass
class _Sequence:
    request: EngineRequest
    tokens: int = 0

    def progress(self) -> tuple[Progress, ...]:
        ids = tuple(range(1, self.tokens + 1))
        return tuple(
            Progress(
                choice=choice,
                token_ids=ids,
                tokens=tuple(map(str, ids)),
                logprobs=tuple(-float(n) for n in ids),
                token_times=tuple(n / 10 for n in ids),
                started_at=NOON,
            )
            for choice in range(self.request.sampling.n)
        )

    def output(self, reason: FinishReason, vocabulary: Vocabulary, choice: int = 0) -> EngineOutput:
        ids = tuple(range(1, self.tokens + 1))
        others = range(1, self.request.sampling.n) if choice == 0 else ()
        return EngineOutput(
            request_id=self.request.request_id,
            choice=choice,
            text=vocabulary.decode(ids),
            finish_reason=reason,
            token_ids=ids,
            tokens=tuple(map(str, ids)),
            logprobs=tuple(-float(n) for n in ids),
            token_times=tuple(n / 10 for n in ids),
            top_logprobs=None,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=0,
            started_at=NOON,
            first_token_at=NOON,
            finished_at=NOON,
            model_version="scripted",
            other_choices=tuple(self.output(reason, vocabulary, each) for each in others),
        )


@dataclass
class ScriptedEngine:
    """``gated``: each step waits for :meth:`allow`. ``fail_at``: this step (from 1) raises ``failure``."""

    config: ScriptedConfig = field(default_factory=ScriptedConfig)
    gated: bool = False
    fail_at: int = 0
    failure: Exception = field(default_factory=lambda: MemoryError("the device is full"))
    max_running: int = 1000
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(None))

    def __post_init__(self) -> None:
        self.steps = self.settled = self.warmed = 0
        self.threads: set[int] = set()
        self._allowed_steps = 0
        self._allowed = threading.Semaphore(0)
        self._waiting: dict[Hashable, _Sequence] = {}
        self._running: dict[Hashable, _Sequence] = {}
        self._suspended: dict[Hashable, _Sequence] = {}
        self._flight: list[_Sequence] = []
        self._ended: list[EngineOutput] = []  # while something was suspended
        self._deltas: list[EngineDelta] = []

    # For the test

    def allow(self, steps: int = 1) -> None:
        self._allowed_steps += steps
        self._allowed.release(steps)

    def await_step(self) -> None:
        """Returns when the loop is within a step that nobody allowed yet."""
        eventually(lambda: self.steps > self._allowed_steps, "the loop is in a step")

    @property
    def requests(self) -> set[Hashable]:
        return {*self._waiting, *self._running, *self._suspended}

    # For the loop

    def add(self, request: EngineRequest) -> None:
        self.threads.add(threading.get_ident())
        assert request.request_id not in self.requests
        (self._suspended if request.suspended else self._waiting)[request.request_id] = _Sequence(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._flight or self._ended)

    def step(self) -> list[EngineOutput]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.gated:
            self._allowed.acquire()
        if self.steps == self.fail_at:
            raise self.failure
        outputs = self._collect()
        while self._waiting and len(self._running) < self.max_running:
            name = next(iter(self._waiting))
            self._running[name] = self._waiting.pop(name)
        self._flight = list(self._running.values())
        return outputs

    def settle(self) -> list[EngineOutput]:
        self.threads.add(threading.get_ident())
        self.settled += 1
        return self._collect()

    def cancel(self, request_id: Hashable) -> EngineOutput | None:
        self.threads.add(threading.get_ident())
        places = (self._running, self._waiting, self._suspended)
        sequence = next((found for place in places if (found := place.pop(request_id, None)) is not None), None)
        return sequence.output(FinishReason.CANCELLED, self.vocabulary) if sequence is not None else None

    def suspend(self, request_ids: Iterable[Hashable]) -> None:
        self.threads.add(threading.get_ident())
        self._ended += self._collect()
        for name in request_ids:
            if (sequence := self._running.pop(name, None) or self._waiting.pop(name, None)) is not None:
                self._suspended[name] = sequence

    def resume(self, request_ids: Iterable[Hashable]) -> None:
        self.threads.add(threading.get_ident())
        for name in request_ids:
            if (sequence := self._suspended.pop(name, None)) is not None:
                self._waiting[name] = sequence

    def take_deltas(self) -> list[EngineDelta]:
        self.threads.add(threading.get_ident())
        deltas, self._deltas = self._deltas, []
        return deltas

    def progress(self) -> dict[Hashable, tuple[Progress, ...]]:
        self.threads.add(threading.get_ident())
        live = {**self._running, **self._waiting, **self._suspended}
        running = {name: sequence for name, sequence in live.items() if sequence.tokens}
        return {name: sequence.progress() for name, sequence in running.items()}

    def warmup(self) -> None:
        self.warmed += 1

    def stats(self) -> EngineStats:
        known = {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "suspended": len(self._suspended),
            "unbegun": len(self._waiting),
            "steps": self.steps,
        }
        return EngineStats(**{each.name: known.get(each.name, 0) for each in fields(EngineStats)})

    def _collect(self) -> list[EngineOutput]:
        flight, self._flight = self._flight, []
        ended, self._ended = self._ended, []
        for sequence in flight:
            name, sampling = sequence.request.request_id, sequence.request.sampling
            if name not in self._running:  # cancelled while the step ran
                continue
            sequence.tokens += 1
            if sequence.request.stream:
                token = sequence.tokens
                self._deltas += [
                    EngineDelta(
                        request_id=name, choice=choice, token_id=token, logprob=-float(token), token_time=token / 10
                    )
                    for choice in range(sampling.n)
                ]
            if sequence.tokens >= sampling.max_tokens:
                del self._running[name]
                ended.append(sequence.output(FinishReason.LENGTH, self.vocabulary))
        return ended
