"""The values that cross borders: between command line, store, queue, worker and engine. Frozen, and free of imports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeAlias

from batchjobs.errors import InvalidParameter

DEFAULT_MAX_TOKENS = 256
"""Tokens generated for a request that states no limit of its own."""

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

TokenText: TypeAlias = str | tuple[int, ...]
"""The text of one token, or its raw bytes where they are not valid UTF-8 by themselves."""

TopLogprobs: TypeAlias = tuple[tuple[int, float, TokenText], ...]
"""The most likely tokens at one position, best first: (token id, logprob, text)."""


class Endpoint(StrEnum):
    """What a request asks for, in OpenAI's terms. Plain ``prompt`` lines are completions, ``messages`` lines chats."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class RequestStatus(StrEnum):
    """The final state of a request, as its completion row holds it."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @classmethod
    def of_choices(cls, statuses: Iterable[RequestStatus]) -> RequestStatus:
        """The state of a request with several choices: that of its worst one. A request is only completed when all of
        its choices are; of the others, cancelled goes before expired, and expired before failed."""
        return max(statuses, key=_WORST_LAST.index)


_WORST_LAST = (RequestStatus.COMPLETED, RequestStatus.FAILED, RequestStatus.EXPIRED, RequestStatus.CANCELLED)


class BatchStatus(StrEnum):
    """Where a batch is. ``completed`` means that every request has an outcome, failures included."""

    LOADING = "loading"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.CANCELLED)


class Inflight(StrEnum):
    """What becomes of unfinished answers when a worker's model is updated.

    ``recompute``: they go on under the new weights, which read the prompt and the tokens so far anew. ``keep``: they go
    on with the keys and values that the old weights computed. ``finish``: they are finished first, by the old weights.
    ``restart``: they begin anew, and have nothing of the old weights.
    """

    RECOMPUTE = "recompute"
    KEEP = "keep"
    FINISH = "finish"
    RESTART = "restart"


class CommandKind(StrEnum):
    """An order to one worker that takes its time, and has an end."""

    UPDATE_MODEL = "update_model"
    DRAIN = "drain"


class FinishReason(StrEnum):
    """Why a text ended: at its own end, at ``max_tokens``, by a cancellation or by an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Priority(StrEnum):
    """The three queues, served in this order."""

    HIGH = "high"
    DEFAULT = "default"
    LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings follow the OpenAI API and, beyond it, vLLM.

    Args:
        max_tokens: Tokens to generate at most, 1 or more; 0 only with ``prompt_logprobs``, to score a prompt.
        temperature: 0 to 2. At 0 the most likely token is always taken (greedy).
        top_p: Over 0 to 1: the smallest set of tokens whose probabilities sum to this is kept.
        top_k: The number of most likely tokens to keep; 0 or -1 keeps all.
        min_p: 0 to 1: tokens less likely than this share of the most likely one are dropped.
        n: Choices to generate, 1 to 128, each drawn from a stream of its own: (seed, choice, position).
        seed: With the choice and the position, fixes every draw. A request without one gets one when it is stored.
        stop: Strings at which the text ends; the text ends right before the match.
        stop_token_ids: Ids at which generation ends, beside the model's own.
        min_tokens: No end of sequence and no stop token before this many tokens.
        ignore_eos: Go on after the model's end of sequence.
        presence_penalty: -2 to 2, subtracted once from the logit of each token generated so far.
        frequency_penalty: -2 to 2, subtracted as often as the token was generated.
        repetition_penalty: Over 0: logits of tokens in the prompt or the answer are divided (multiplied when negative).
        logit_bias: Added to the logits of these token ids, -100 to 100 each.
        top_logprobs: How many of the most likely tokens to report at each position, 0 to 20.
        prompt_logprobs: None, or report the logprob of each prompt token and this many of the likeliest ones, 0 to 20.
        response_format: None, or as in the OpenAI API: ``{"type": "json_object"}`` or ``{"type": "json_schema",
            "json_schema": {"schema": …}}``. The answer is held to it token by token.

    Raises:
        InvalidParameter: A value is out of range; ``field`` names it.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    n: int = 1
    prompt_logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidParameter(name, f"{name} must be a finite number")
        least = 1 if self.prompt_logprobs is None else 0
        _check("max_tokens", self.max_tokens >= least, f"{least} or more", self.max_tokens)
        _check("n", 1 <= self.n <= MAX_CHOICES, f"from 1 to {MAX_CHOICES}", self.n)
        _check("temperature", 0 <= self.temperature <= 2, "from 0 to 2", self.temperature)
        _check("top_p", 0 < self.top_p <= 1, "over 0 and at most 1", self.top_p)
        _check("top_k", self.top_k >= -1, "a positive number, or 0 or -1 for off", self.top_k)
        _check("min_p", 0 <= self.min_p <= 1, "from 0 to 1", self.min_p)
        _check("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2", self.presence_penalty)
        _check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2", self.frequency_penalty)
        _check("repetition_penalty", self.repetition_penalty > 0, "over 0", self.repetition_penalty)
        _check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens", self.min_tokens)
        _check("top_logprobs", 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "from 0 to 20", self.top_logprobs)
        scored = self.prompt_logprobs or 0
        _check("prompt_logprobs", 0 <= scored <= MAX_TOP_LOGPROBS, "from 0 to 20", scored)
        _check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer", self.seed)
        if len(self.stop) > MAX_STOP_STRINGS or any(not s for s in self.stop):
            raise InvalidParameter("stop", f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty")
        if self.response_format is not None and self.response_format.get("type") not in RESPONSE_FORMATS:
            wanted = f"response_format.type must be one of {', '.join(RESPONSE_FORMATS)}"
            raise InvalidParameter("response_format", wanted)
        if any(t < 0 for t in self.stop_token_ids):
            raise InvalidParameter("stop_token_ids", "stop_token_ids must not be negative")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise InvalidParameter("logit_bias", "logit_bias maps token ids to numbers from -100 to 100")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def as_fields(self) -> dict[str, Any]:
        """The values that differ from the defaults, and always ``max_tokens``, as plain JSON values."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: v for k, v in chosen.items() if k == "max_tokens" or v != getattr(_DEFAULTS, k)}
        for name in ("stop", "stop_token_ids"):
            if name in plain:
                plain[name] = list(plain[name])
        if "logit_bias" in plain:
            plain["logit_bias"] = {str(k): v for k, v in plain["logit_bias"].items()}
        return plain

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The inverse of :meth:`as_fields`; names that are not sampling fields are passed over."""
        known = {name: values[name] for name in _SAMPLING_FIELDS if name in values}
        if "logit_bias" in known:
            known["logit_bias"] = {int(k): float(v) for k, v in known["logit_bias"].items()}
        return cls(**known)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another seed; of all the values only this one is checked, so that it costs little."""
        _check("seed", -(2**63) <= seed < 2**63, "a 64-bit integer", seed)
        copy = object.__new__(SamplingParams)
        for set_value, value in zip(_SETTERS, _VALUES(self), strict=True):
            set_value(copy, value)
        object.__setattr__(copy, "seed", seed)
        return copy


def _check(name: str, valid: bool, wanted: str, value: object) -> None:
    if not valid:
        raise InvalidParameter(name, f"{name} must be {wanted}, not {value}")


_DEFAULTS = SamplingParams()
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
_SETTERS = [getattr(SamplingParams, name).__set__ for name in _SAMPLING_FIELDS]
_VALUES = attrgetter(*_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One input line, as it is stored: it never changes.

    ``index`` is its place in the batch, from 0, blank lines not counted. ``body`` holds ``prompt`` (text or token ids)
    or ``messages``, every sampling field that differs from its default, ``max_tokens``, and, where given, ``logprobs``,
    ``echo``, ``chat_template_kwargs``, ``metadata`` and the ``model`` that the line named.
    """

    index: int
    custom_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.from_fields(self.body)

    @property
    def model_version(self) -> str | None:
        """The only version of a model that may answer it; None takes any."""
        pinned = self.body.get("model_version")
        return None if pinned is None else str(pinned)

    @property
    def n(self) -> int:
        """How many choices it asks for."""
        return int(self.body.get("n", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """Why a request failed: a stable ``code`` for programs, a ``message`` for people."""

    code: str
    message: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Who drew the tokens of an answer from ``from_token`` (counted from 0) up to the next span: which version of the
    model, in which worker, at which attempt. An engine that runs by itself knows no worker and no attempt."""

    version: str
    from_token: int = 0
    worker: str | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """How likely the model found the prompt: one entry a prompt token. None for the first, which nothing precedes."""

    token_ids: tuple[int, ...]
    tokens: tuple[TokenText, ...]
    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[TopLogprobs | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The one final record of a request (per choice).

    ``text`` is the answer, behind the prompt where the request asked for ``echo``. ``prompt_scores`` are with the first
    choice alone, where they were asked for.

    ``token_ids``, ``logprobs``, ``token_times``, ``tokens`` and, when asked for, ``top_logprobs`` have one entry a
    generated token, an end-of-sequence token included. ``logprobs`` are natural logarithms of the model's own
    distribution. ``token_times`` are seconds since ``started_at`` by a monotonic clock. Instants are aware and UTC.
    ``version_spans`` say which version drew which tokens, in order, the first from token 0 on; empty where there is no
    token. ``model_version`` is that of the last one, or of the worker that gave the outcome.
    """

    index: int
    choice: int = 0
    status: RequestStatus
    finish_reason: FinishReason
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    tokens: tuple[TokenText, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_times: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    model: str | None = None
    model_version: str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    worker: str | None = None
    attempt: int = 0
    started_at: datetime | None = None
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    error: RequestError | None = None
    prompt_scores: PromptScores | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ShardId:
    """A slice of a batch, the unit of the queue. ``str()`` gives its RQ job id."""

    batch_id: str
    shard_no: int

    def __str__(self) -> str:
        return f"{self.batch_id}-{self.shard_no}"

    @classmethod
    def parse(cls, job_id: str) -> ShardId:
        """Raises ValueError for an id that is not ours."""
        batch_id, separator, number = job_id.rpartition("-")
        if not separator or not number.isascii() or not number.isdigit():
            raise ValueError(f"{job_id!r} is not the id of a shard")
        return cls(batch_id, int(number))


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write a shard's outcomes until somebody else claims it: then ``fence`` no longer matches.

    One that is ``alone`` took its workers down before, and is to run with nothing beside it. ``model_version`` is the
    only version that may answer its requests; None takes any.
    """

    shard: ShardId
    fence: int
    attempt: int
    alone: bool = False
    model_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What there is of one choice of an unfinished request: enough for another worker to go on behind it.

    Fields as in :class:`Completion`: one entry a token so far, logprobs as natural logarithms, ``token_times`` in
    seconds since ``started_at``.
    """

    choice: int = 0
    token_ids: tuple[int, ...]
    tokens: tuple[TokenText, ...]
    logprobs: tuple[float, ...]
    token_times: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    started_at: datetime
    version_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Somebody's wish that no token be made, of a batch or by a worker. ``by`` is user@host.

    With ``release``, what was running goes back to the queue instead of keeping its place and its cache.
    """

    by: str
    at: datetime
    reason: str | None = None
    release: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An order to a worker, and what became of it: ``result`` once it was carried out, ``error`` where it was not."""

    id: str
    kind: CommandKind
    worker: str
    arguments: Mapping[str, Any]
    given_by: str
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Requests of a batch by state. The six states add up to ``total``."""

    total: int = 0
    queued: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a batch: in the prompts and answers of finished requests, and in unfinished answers as far as they were
    stored."""

    prompt: int = 0
    completion: int = 0
    in_progress: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """A batch as ``status`` shows it."""

    id: str
    name: str | None
    key: str | None
    model: str | None
    queue: Priority
    status: BatchStatus
    paused: bool
    pause: Pause | None = None
    counts: Counts
    tokens: TokenCounts
    shard_size: int
    created_at: datetime
    submitted_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
