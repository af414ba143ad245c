"""An engine that answers at once, so that what remains to be measured is everything around the engine.

It has the face of :class:`workers.engine.EngineLoop` and a thread of its own, but no model and no tokenizer: a token of
a prompt is a byte of it. Each answer has as many tokens as the request asks for, with texts, logprobs and times, so
that the rows are as long as real ones. It needs no torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate
from typing import Any, NoReturn

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, Progress, VersionSpan
from workers.engine.outbox import EngineStopped
from workers.engine.requests import EngineOutput, EngineRequest, EngineStats

TICK_SECONDS = 0.5
WORDS = (" river", " stone", " copper", " lantern", " orchard", " harbour", " winter", " engine")

Handler = Callable[[EngineOutput], None]


@cache
def made_up(first: int, count: int) -> dict[str, Any]:
    """An answer of so many tokens, made once and given often."""
    words = [WORDS[(first + place) % len(WORDS)] for place in range(count)]
    return {
        "text": "".join(words),
        "token_ids": tuple(range(1000 + first, 1000 + first + count)),
        "tokens": tuple(words),
        "logprobs": tuple(-0.123456789 * (place + first + 1) for place in range(count)),
        "token_times": tuple(accumulate([0.0123456789] * count)),
    }


class InstantEngine:
    model_name = "instant"
    model_version = "sha256:0f2a8d5c9b3e4711"
    device = "cpu"
    dtype = "float32"
    max_model_len = 4096

    def __init__(self) -> None:
        self.model_details: Mapping[str, Any] = {"architecture": "none"}

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return tuple(prompt.encode() if isinstance(prompt, str) else prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = {}
    ) -> tuple[int, ...]:
        return self.encode_prompt("\n".join(str(message["content"]) for message in messages))

    def compile_format(self, response_format: Mapping[str, Any] | None) -> None:
        """Answers are held to nothing."""


class InstantLoop:
    """Whatever was added has its outcome one turn later. Nothing runs for long enough to be cancelled."""

    is_updating = False

    def __init__(self) -> None:
        self.engine = InstantEngine()
        self.failure: BaseException | None = None
        self._added: deque[tuple[EngineRequest, Handler]] = deque()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._standing = threading.Lock()  # held during a turn, and by who is in a pause
        self._ticked_at = time.monotonic()
        self._steps = self._tokens = self._prompt_tokens = 0
        self._thread: threading.Thread | None = None

    # Life

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        self._stopping.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @contextmanager
    def pause(self, timeout: float | None = None) -> Iterator[None]:
        if not self._standing.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError("the step in progress took too long")
        try:
            yield
        finally:
            self._standing.release()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=0,
            waiting=len(self._added),
            kv_usage_ratio=0.0,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._tokens,
            preemptions=0,
            steps=self._steps,
            ticked_at=self._ticked_at,
        )

    # Requests

    def add(self, request: EngineRequest, on_finish: Handler) -> None:
        if self._stopping.is_set():
            raise EngineStopped("the engine was stopped")
        self._added.append((request, on_finish))
        if not self._news.is_set():
            self._news.set()

    def progress(self, timeout: float | None = None) -> dict[Hashable, tuple[Progress, ...]]:
        return {}

    def cancel(self, request_id: Hashable) -> None: ...

    def suspend(self, request_ids: Iterable[Hashable]) -> None: ...

    def resume(self, request_ids: Iterable[Hashable]) -> None: ...

    def stage(self, source: str, revision: str | None = None) -> NoReturn:
        raise UsageError("the instant engine has no model")

    # Of its thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._news.wait(TICK_SECONDS)
                self._news.clear()
                self._ticked_at = time.monotonic()
                with self._standing:
                    self._turn()
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _turn(self) -> None:
        while self._added and not self._stopping.is_set():
            request, on_finish = self._added.popleft()
            self._steps += 1
            output = self._answer(request)
            self._tokens += len(output.token_ids)
            self._prompt_tokens += output.prompt_tokens
            on_finish(output)

    def _answer(self, request: EngineRequest) -> EngineOutput:
        now = datetime.now(UTC)
        count = request.sampling.max_tokens
        worker, attempt = request.made_by
        version = self.engine.model_version
        return EngineOutput(
            request_id=request.request_id,
            **made_up(self._steps % len(WORDS), count),
            finish_reason=FinishReason.LENGTH,
            top_logprobs=None,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=0,
            started_at=now,
            first_token_at=now,
            finished_at=now,
            version_spans=(VersionSpan(version=version, worker=worker, attempt=attempt),),
            model_version=version,
        )
