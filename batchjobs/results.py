"""One request with what became of it, flat, as it is given out: in Python, as JSON lines and in tables."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.text import escaped_json
from batchjobs.types import (
    Completion,
    FinishReason,
    RequestError,
    RequestStatus,
    TokenText,
    TopLogprobs,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchjobs.store import StoredResult

_NONE_YET = Completion(index=0, status=RequestStatus.FAILED, finish_reason=FinishReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a request. Names and meanings are those of :class:`Result`; ``choice`` counts from 0."""

    choice: int
    status: RequestStatus
    text: str
    finish_reason: FinishReason
    completion_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None
    token_times: tuple[float, ...]
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    error: RequestError | None
    tokens: tuple[TokenText, ...]
    version_spans: tuple[VersionSpan, ...]

    @classmethod
    def of(cls, made: Completion) -> Choice:
        return cls(**dict(zip(_CHOICE_FIELDS, _choice_values(made), strict=True)))


_CHOICE_FIELDS = tuple(Choice.__dataclass_fields__)
_choice_values = attrgetter(*_CHOICE_FIELDS)  # several times as fast as one after the other, and every line needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A request's outcome. Names, meanings and order are those of the output lines (``docs/output.md``).

    ``status`` is completed, failed, cancelled or expired, or, before the end, queued or running. The token lists have
    ``completion_tokens`` entries each. ``tokens`` holds each token's text, or its bytes where they are no text alone.
    ``version_spans`` say which version of the model drew which of them, in which worker, at which attempt. Instants are
    aware and UTC.

    Where ``n`` > 1, ``status`` and ``error`` are the request's, which are its worst choice's, and the other values the
    first choice's; ``choices`` has them all. ``prompt_token_ids``, ``prompt_logprobs`` (None for the first token) and
    ``prompt_top_logprobs`` are there where the request asked for them.
    """

    custom_id: str
    index: int
    status: str
    text: str
    finish_reason: FinishReason | None
    model: str | None
    model_version: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None
    token_times: tuple[float, ...]
    created_at: datetime
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    attempt: int
    error: RequestError | None
    tokens: tuple[TokenText, ...]
    version_spans: tuple[VersionSpan, ...]
    n: int
    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...] | None
    prompt_logprobs: tuple[float | None, ...] | None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None

    @classmethod
    def of(cls, stored: StoredResult) -> Result:
        """What the store gives, as users get it."""
        made = stored.completion or _NONE_YET
        scores = made.prompt_scores
        return cls(
            custom_id=stored.request.custom_id,
            index=stored.request.index,
            status=str(stored.state),
            text=made.text,
            finish_reason=made.finish_reason if stored.completion else None,
            model=made.model,
            model_version=made.model_version,
            prompt_tokens=made.prompt_tokens,
            completion_tokens=made.completion_tokens,
            cached_tokens=made.cached_tokens,
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            top_logprobs=made.top_logprobs,
            token_times=made.token_times,
            created_at=stored.created_at,
            started_at=made.started_at,
            first_token_at=made.first_token_at,
            finished_at=made.finished_at,
            worker=made.worker,
            attempt=made.attempt,
            error=stored.error,
            tokens=made.tokens,
            version_spans=made.version_spans,
            n=stored.request.n,
            choices=tuple(map(Choice.of, stored.choices)),
            prompt_token_ids=scores.token_ids if scores else None,
            prompt_logprobs=scores.logprobs if scores else None,
            prompt_top_logprobs=scores.top_logprobs if scores else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """The keys and values of its output line, those left out that this request did not ask for."""
        if self.n == 1 and self.prompt_logprobs is None:
            return dict(zip(_PLAIN_FIELDS, _plain_values(self), strict=True))
        absent: tuple[str, ...] = () if self.n > 1 else ("n", "choices")
        if self.prompt_logprobs is None:
            absent += ("prompt_token_ids", "prompt_logprobs", "prompt_top_logprobs")
        return {name: getattr(self, name) for name in FIELDS if name not in absent}

    def as_json(self) -> bytes:
        """One output line, without its end. Strict JSON: a logprob that is no finite number is null."""
        return json_line(self.as_dict())


FIELDS = tuple(Result.__dataclass_fields__)
"""The keys of an output line, in their order. The last five are only there where a request asked for them."""
_PLAIN_FIELDS = FIELDS[:-5]
_plain_values = attrgetter(*_PLAIN_FIELDS)


def json_line(value: Mapping[str, Any]) -> bytes:
    """Strict JSON in UTF-8: instants in UTC with ``Z``, NaN and infinities as null.

    What a terminal would obey is escaped, and so are the line ends that Unicode knows beside the usual ones: some
    programs, Python's ``splitlines`` among them, would break the line there.
    """
    return escaped_json(orjson.dumps(value, option=orjson.OPT_UTC_Z))


def json_text(value: object) -> str:
    """The same JSON as a text, for a cell of a table."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z).decode()


def instant(moment: datetime | None) -> str | None:
    """An instant as every output writes it."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
