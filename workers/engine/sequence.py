"""One request's live state inside the engine.

Invariants:
- ``computed`` tokens have their keys and values in ``pages``; a step or a prefix that is found raises it, preemption
  sets it back to 0.
- A token is sampled exactly when ``computed`` catches up with ``len(tokens)``: decode, chunked prefill and resuming
  after preemption are this one rule.
- ``logprobs``, ``times`` and (when asked for) ``top_logprobs`` grow together with the generated tokens.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from batchjobs.types import FinishReason, RequestError
from workers.engine.requests import EngineOutput

if TYPE_CHECKING:
    from workers.engine.requests import EngineRequest
    from workers.engine.text import StopMatcher, Vocabulary


class Sequence:
    """Mutable; owned by the scheduler and touched between steps only."""

    __slots__ = (
        "cached_tokens",
        "chain",
        "computed",
        "error",
        "finish_reason",
        "limit",
        "logprobs",
        "pages",
        "prompt_len",
        "registered",
        "request",
        "seed",
        "slot",
        "started",
        "started_at",
        "stop_ids",
        "stop_matcher",
        "times",
        "tokens",
        "top_logprobs",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        limit: int,
        seed: int,
        stop_ids: frozenset[int],
        stop_matcher: StopMatcher | None,
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.limit = limit  # generated tokens at most, the room in the model's context considered
        self.seed = seed
        self.stop_ids = stop_ids
        self.stop_matcher = stop_matcher
        self.computed = 0
        self.pages: list[int] = []
        self.chain = 0  # node of the last page that is in the prefix tree
        self.registered = 0  # leading pages that are in the tree, or whose twins are
        self.cached_tokens = 0  # prompt tokens that were there when the sequence first ran
        self.slot = -1  # index among the running sequences; -1 while waiting
        self.logprobs: list[float] = []
        self.times: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.started: float | None = None  # monotonic
        self.started_at: datetime | None = None  # the same instant by the wall clock
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """Tokens that are known but whose keys and values are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def start(self) -> None:
        """Anchor the clocks at the first admission; a resumed sequence keeps its anchor."""
        if self.started is None:
            self.started, self.started_at = time.monotonic(), datetime.now(UTC)

    def accept(self, token: int, logprob: float, top: list[tuple[int, float]] | None, now: float) -> None:
        """Append a sampled token (``now`` is monotonic) and decide whether the sequence ends with it."""
        assert self.started is not None
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.times.append(now - self.started)
        if top is not None:
            self.top_logprobs.append(top)
        if self._stops_at(token):
            self.finish_reason = FinishReason.STOP
        elif self.generated >= self.limit:
            self.finish_reason = FinishReason.LENGTH

    def _stops_at(self, token: int) -> bool:
        if self.generated >= self.request.sampling.min_tokens and token in self.stop_ids:
            return True
        return self.stop_matcher is not None and self.stop_matcher.feed(token, self.generated)

    def fail(self, code: str, message: str) -> None:
        self.finish_reason = FinishReason.ERROR
        self.error = RequestError(code=code, message=message)

    def output(self, vocabulary: Vocabulary) -> EngineOutput:
        assert self.finish_reason is not None
        self.start()  # a sequence that never ran starts and ends now
        assert self.started is not None
        assert self.started_at is not None
        generated = tuple(self.tokens[self.prompt_len :])
        text = vocabulary.decode(generated)
        if self.stop_matcher is not None and self.finish_reason is FinishReason.STOP:
            text = self.stop_matcher.cut(text)
        top = None
        if self.request.sampling.top_logprobs:
            top = tuple(tuple((i, p, vocabulary.text(i)) for i, p in best) for best in self.top_logprobs)
        now = time.monotonic() - self.started
        return EngineOutput(
            request_id=self.request.request_id,
            text=text,
            finish_reason=self.finish_reason,
            token_ids=generated,
            tokens=tuple(vocabulary.text(t) for t in generated),
            logprobs=tuple(self.logprobs),
            token_times=tuple(self.times),
            top_logprobs=top,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            started_at=self.started_at,
            first_token_at=self.started_at + timedelta(seconds=self.times[0]) if self.times else None,
            finished_at=self.started_at + timedelta(seconds=self.times[-1] if self.times else now),
            error=self.error,
        )
