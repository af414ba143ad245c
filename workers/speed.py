"""How fast this machine answers requests like those of an input: a sample of them is answered, and thrown away.

Prompts and answers cost differently, so both are measured: first prompts alone, with one token each, then whole
answers, whose prompts are in the cache by then.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from batchjobs.types import Endpoint, FinishReason, Request
from workers.engine.requests import EngineOutput, EngineRequest, PromptError

if TYPE_CHECKING:
    from workers.engine.engine import Engine

SAMPLED_REQUESTS = 256
MAX_SAMPLED_BYTES = 256 * 2**10
"""Larger requests are left out of the sample, which lies in memory."""
PROMPT_SHARE = 1 / 3  # of the time


class Sample:
    """Some requests of an input, each as likely as any other. Takes chunks of requests."""

    def __init__(self, size: int = SAMPLED_REQUESTS) -> None:
        self.requests: list[Request] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)

    def add(self, requests: Sequence[Request]) -> None:
        """The next chunk."""
        for request in requests:
            self._seen += 1
            place = self._random.randrange(self._seen)
            if place >= self._size and len(self.requests) == self._size:
                continue
            if len(orjson.dumps(request.body)) > MAX_SAMPLED_BYTES:
                continue
            if len(self.requests) < self._size:
                self.requests.append(request)
            else:
                self.requests[place] = request


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens a second by kind. ``answers`` of the sample, every choice counted, came to their end; ``answer_tokens`` is
    their mean length as far as that can be told, None where none ended."""

    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    requests: int
    answers: int
    answer_tokens: float | None
    seconds: float


def measure(engine: Engine, requests: Sequence[Request], seconds: float) -> Speed | None:
    """Answers the requests for so many seconds at most. None where nothing can be told: no token was made."""
    engine.warmup()
    ready = _encoded(engine, requests)
    started = time.monotonic()
    shortest = [replace(r, sampling=replace(r.sampling, max_tokens=1, min_tokens=0, n=1)) for r in ready]
    prompts = _run(engine, shortest, seconds * PROMPT_SHARE)
    answers = _run(engine, ready, seconds - prompts.seconds)
    if not prompts.computed or not answers.generated:
        return None
    prompt_speed = prompts.computed / prompts.seconds
    rest = max(answers.seconds - answers.computed / prompt_speed, answers.seconds / 2)
    return Speed(
        prompt_tokens_per_second=prompt_speed,
        answer_tokens_per_second=answers.generated / rest,
        requests=len(ready),
        answers=answers.ended,
        # Short answers end first: so the tokens of the others count too, as in the time left of a batch.
        answer_tokens=answers.generated / answers.ended if answers.ended else None,
        seconds=time.monotonic() - started,
    )


@dataclass(slots=True)
class _Ran:
    computed: int = 0
    generated: int = 0
    ended: int = 0
    seconds: float = 0.0


def _encoded(engine: Engine, requests: Sequence[Request]) -> list[EngineRequest]:
    ready = []
    for request in requests:
        body = request.body
        try:
            if request.endpoint == Endpoint.CHAT:
                ids = engine.encode_chat(body["messages"], body.get("chat_template_kwargs") or {})
            else:
                ids = engine.encode_prompt(body["prompt"])
            engine.compile_format(request.sampling.response_format)
        except PromptError:  # it is named elsewhere
            continue
        # Scores of prompts would keep them from the cache.
        ready.append(EngineRequest(request.index, ids, replace(request.sampling, prompt_logprobs=None)))
    return ready


def _run(engine: Engine, requests: Sequence[EngineRequest], seconds: float) -> _Ran:
    """Runs them until all have ended or the time is up, and leaves the engine empty."""
    ran, before, started = _Ran(), engine.stats(), time.monotonic()
    for request in requests:
        engine.add(request)
    while engine.has_work and time.monotonic() - started < seconds:
        ran.ended += _ended(engine.step())
    ran.ended += _ended(engine.settle())
    ran.seconds = time.monotonic() - started
    after = engine.stats()
    ran.computed = after.prompt_tokens - before.prompt_tokens
    ran.generated = after.generated_tokens - before.generated_tokens
    for request in requests:
        engine.cancel(request.request_id)
    return ran


def _ended(outputs: Sequence[EngineOutput]) -> int:
    return sum(choice.finish_reason is not FinishReason.ERROR for output in outputs for choice in output.choices)
