"""What goes into the engine and what comes out. Frozen: the live state of a request is its Sequence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime

from batchjobs.types import (
    FinishReason,
    Progress,
    PromptScores,
    RequestError,
    SamplingParams,
    TokenText,
    TopLogprobs,
    VersionSpan,
)


class PromptError(Exception):
    """A prompt that cannot be run. ``error`` says why; no other request is concerned."""

    def __init__(self, code: str, message: str) -> None:
        self.error = RequestError(code=code, message=message)
        super().__init__(message)

    @property
    def code(self) -> str:
        return self.error.code

    @property
    def message(self) -> str:
        return self.error.message


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to be continued. ``request_id`` is the caller's own and must not be in the engine already.

    With ``stream`` every token is told of when it is drawn (:class:`EngineDelta`), beside the output at the end.
    ``begun`` is what another engine with the same model made of it before, at most one entry a choice: the answer goes
    on behind these tokens, which keep their logprobs and times, and with the same ``seed`` it draws what that engine
    would have drawn. What cannot be gone on from is left out. A stream tells of these tokens first.
    ``made_by`` is the worker and the attempt that the version spans of its tokens name. One that is ``suspended`` is
    added, and waits to be resumed.
    """

    request_id: Hashable
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False
    begun: tuple[Progress, ...] = ()
    made_by: tuple[str | None, int] = (None, 0)
    suspended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDelta:
    """One new token of a streamed request, of its ``choice``. Fields as in :class:`EngineOutput`, for one token."""

    request_id: Hashable
    choice: int
    token_id: int
    logprob: float
    token_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The outcome of one request: of its first choice, with the other ones in ``other_choices``.

    ``token_ids``, ``tokens``, ``logprobs``, ``token_times`` (and ``top_logprobs``, when asked for) have one entry a
    generated token, an end-of-sequence token included. ``logprobs`` are natural logarithms of the model's own
    distribution, before temperature, penalties and filters. ``token_times`` are seconds since ``started_at`` by a
    monotonic clock. Where a stop string cut the text, the tokens of the match are kept in these lists, not in the text.
    ``version_spans`` say which version of the model drew which tokens, the first from token 0 on. ``model_version`` is
    that of the last one; of an outcome without a token, the version that scored the prompt or that it ended under.
    """

    request_id: Hashable
    choice: int = 0
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    tokens: tuple[TokenText, ...]
    logprobs: tuple[float, ...]
    token_times: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None
    prompt_tokens: int
    cached_tokens: int
    started_at: datetime
    first_token_at: datetime | None
    finished_at: datetime
    error: RequestError | None = None
    prompt_scores: PromptScores | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    model_version: str
    other_choices: tuple[EngineOutput, ...] = ()

    @property
    def choices(self) -> tuple[EngineOutput, ...]:
        """All ``n`` of them, in order."""
        return (self, *self.other_choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Figures of a moment, and counters since the start.

    ``running`` and ``waiting`` count choices, those that gave way among the waiting; ``suspended`` counts those that
    are suspended, which are in neither; ``unbegun`` counts requests of which nothing has run yet, without the suspended
    ones. ``prompt_tokens`` counts prompt tokens computed (again after preemption too),
    ``generated_tokens`` those sampled, ``cached_tokens`` prompt tokens of finished requests that were found in the
    cache, ``recomputed_tokens`` rows that were computed before. ``preemptions`` counts sequences that gave way,
    ``offloaded_sequences`` those of them whose pages went to CPU memory, ``offloaded_pages`` the pages that are there
    now. ``ticked_at`` is the monotonic time of the loop's last pass, 0 without a loop.
    """

    running: int
    waiting: int
    kv_usage_ratio: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    suspended: int = 0
    unbegun: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    offloaded_sequences: int = 0
    offloaded_pages: int = 0
    ticked_at: float = 0.0
