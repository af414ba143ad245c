"""One request with what became of it, flat, as it is given out: in Python, as JSON lines and in tables."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.types import Completion, FinishReason, RequestError, RequestStatus, TokenText, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchjobs.store import StoredResult

_NONE_YET = Completion(index=0, status=RequestStatus.FAILED, finish_reason=FinishReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A request's outcome. Names, meanings and order are those of the output lines (``docs/output.md``).

    ``status`` is completed, failed, cancelled or expired, or, before the end, queued or running. The token lists have
    ``completion_tokens`` entries each. ``tokens`` holds each token's text, or its bytes where they are no text alone.
    Instants are aware and UTC.
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

    @classmethod
    def of(cls, stored: StoredResult) -> Result:
        """What the store gives, as users get it."""
        made = stored.completion or _NONE_YET
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
            error=made.error,
            tokens=made.tokens,
        )

    def as_json(self) -> bytes:
        """One output line, without its end. Strict JSON: a logprob that is no finite number is null."""
        return json_line({name: getattr(self, name) for name in FIELDS})


FIELDS = tuple(Result.__dataclass_fields__)
"""The keys of an output line, in their order."""


def json_line(value: Mapping[str, Any]) -> bytes:
    """Strict JSON in UTF-8: instants in UTC with ``Z``, NaN and infinities as null."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z)


def instant(moment: datetime | None) -> str | None:
    """An instant as every output writes it."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
