"""An engine without a model: it emits words at a set speed, and behaves as :class:`workers.engine.EngineLoop` does.

The words depend on the prompt alone, so that a test knows every answer in advance. Two prompts are special: one that
holds "untokenizable" raises PromptError, and one that holds "explode" kills the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from batchjobs.types import FinishReason
from workers.engine.loop import EngineStopped
from workers.engine.requests import EngineOutput, EngineRequest, EngineStats, PromptError


class StubEngine:
    model_name = "stub"
    model_version = "stub-1"
    device = "cpu"
    dtype = "float32"
    max_model_len = 4096

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


def expected_text(prompt: str, max_tokens: int) -> str:
    """What the stub answers."""
    return " ".join(f"{len(prompt)}.{position}" for position in range(max_tokens))


@dataclass
class _Sequence:
    request: EngineRequest
    on_finish: Callable[[EngineOutput], None]
    started_at: datetime | None = None
    started: float = 0.0
    times: list[float] = field(default_factory=list)

    def output(self, reason: FinishReason) -> EngineOutput:
        now = datetime.now(UTC)
        count = len(self.times)
        words = tuple(f"{len(self.request.prompt_ids)}.{position}" for position in range(count))
        first = self.started_at + timedelta(seconds=self.times[0]) if self.started_at and self.times else None
        return EngineOutput(
            request_id=self.request.request_id,
            text=" ".join(words),
            finish_reason=reason,
            token_ids=tuple(range(count)),
            tokens=words,
            logprobs=tuple(-0.5 for _ in range(count)),
            token_times=tuple(self.times),
            top_logprobs=None,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=0,
            started_at=self.started_at or now,
            first_token_at=first,
            finished_at=now,
        )


class StubLoop:
    """One token for each running request every ``step_seconds``. ``hold`` and ``release`` stop it and let it go on."""

    def __init__(self, *, step_seconds: float = 0.0005, max_requests: int = 64) -> None:
        self.engine = StubEngine()
        self.failure: BaseException | None = None
        self._step_seconds = step_seconds
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, _Sequence] = {}
        self._running: dict[Hashable, _Sequence] = {}
        self._cancelled: set[Hashable] = set()
        self._stopping = threading.Event()
        self._open = threading.Event()
        self._open.set()
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

    def add(self, request: EngineRequest, on_finish: Callable[[EngineOutput], None]) -> None:
        with self._lock:
            if self._stopping.is_set() or not self.is_running:
                raise EngineStopped("the stub does not run") from self.failure
            if request.request_id in self._waiting or request.request_id in self._running:
                raise ValueError(f"request {request.request_id!r} is in the engine already")
            self._waiting[request.request_id] = _Sequence(request, on_finish)

    def cancel(self, request_id: Hashable) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
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
                for sequence, reason in self._cancel():
                    sequence.on_finish(sequence.output(reason))
                if self._open.is_set():
                    for sequence, reason in self._step():
                        sequence.on_finish(sequence.output(reason))
        except BaseException as error:  # noqa: BLE001
            self.failure = error

    def _cancel(self) -> list[tuple[_Sequence, FinishReason]]:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            found = [self._running.pop(i, None) or self._waiting.pop(i, None) for i in cancelled]
            return [(sequence, FinishReason.CANCELLED) for sequence in found if sequence is not None]

    def _step(self) -> list[tuple[_Sequence, FinishReason]]:
        with self._lock:
            self._steps += bool(self._running or self._waiting)
            while self._waiting and len(self._running) < self._max_requests:
                self._admit(next(iter(self._waiting)))
            ended = []
            for request_id, sequence in list(self._running.items()):
                sequence.times.append(time.monotonic() - sequence.started)
                self._tokens += 1
                if len(sequence.times) >= sequence.request.sampling.max_tokens:
                    ended.append((self._running.pop(request_id), FinishReason.LENGTH))
            return ended

    def _admit(self, request_id: Hashable) -> None:
        sequence = self._running[request_id] = self._waiting.pop(request_id)
        prompt = "".join(map(chr, sequence.request.prompt_ids))
        if "explode" in prompt:
            raise RuntimeError("the stub engine exploded")
        self._prompt_tokens += len(sequence.request.prompt_ids)
        sequence.started_at, sequence.started = datetime.now(UTC), time.monotonic()
