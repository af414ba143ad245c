"""Requests, completions and checkpoints as rows, and back.

Rows are made of text and numbers alone, JSON and instants included, and are the same for both databases: that is what
makes bulk inserts fast. Neither NUL, which PostgreSQL refuses, nor half of a surrogate pair gets into the row of a
completion.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import sqlalchemy as sa

from batchjobs.errors import UsageError
from batchjobs.tables import checkpoints, completions, instant_text, requests
from batchjobs.types import (
    Completion,
    Endpoint,
    FinishReason,
    Progress,
    PromptScores,
    Request,
    RequestError,
    RequestStatus,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from batchjobs.errors import LineError
    from batchjobs.types import TokenText, TopLogprobs


def _as_text(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """JSON comes as text, to be read row by row: it grows tenfold when it becomes objects."""
    return sa.cast(column, sa.Text).label(column.name) if isinstance(column.type, sa.JSON) else column


def readable(table: sa.Table) -> tuple[sa.ColumnElement[Any], ...]:
    """All columns of the table, JSON as text and ``index`` as index_, for rows have a method of that name."""
    return tuple(column.label("index_") if column.name == "index" else _as_text(column) for column in table.columns)


REQUEST_COLUMNS = readable(requests)
"""What request_of reads."""
PENDING_COLUMNS = (requests.c.index, requests.c.custom_id, requests.c.endpoint, _as_text(requests.c.body))
"""What pending_request_of reads."""
COMPLETION_COLUMNS = readable(completions)
"""What completion_of reads."""
CHECKPOINT_COLUMNS = readable(checkpoints)
"""What progress_of reads."""

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_NO_TOKENS = "[]"
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


def is_storable(text: str) -> bool:
    """Whether both databases take the text as it is."""
    return (text.isascii() and "\0" not in text) or _UNSTORABLE.search(text) is None


def storable(text: str) -> str:
    return text if is_storable(text) else _UNSTORABLE.sub("\ufffd", text)


def request_row(batch_id: str, request: Request, shard_size: int, *, rejected: bool) -> tuple[Any, ...]:
    """In the order of the table's columns. Raises UsageError for what cannot be stored."""
    custom_id = storable(request.custom_id) if rejected else request.custom_id
    if not is_storable(custom_id):
        raise UsageError(f"request {request.index}: custom_id holds a NUL or an unpaired surrogate; use plain text")
    try:
        body = orjson.dumps(request.body).decode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"request {request.index} cannot be stored as JSON: {error}") from error
    shard_no = request.index // shard_size
    pin = None if rejected else request.model_version
    if pin is not None and not is_storable(pin):
        raise UsageError(f"request {request.index}: model_version holds a NUL or an unpaired surrogate; use plain text")
    return (batch_id, request.index, custom_id, request.endpoint.value, body, shard_no, rejected, pin)


def refused_request(index: int, error: LineError) -> Request:
    """Stands for a line that could not be read as a request."""
    custom_id = error.custom_id if error.custom_id is not None else f"line-{error.line}"
    return Request(index=index, custom_id=custom_id, endpoint=Endpoint.COMPLETIONS, body={})


def refused_completion(index: int, error: LineError) -> Completion:
    return Completion(
        index=index,
        status=RequestStatus.FAILED,
        finish_reason=FinishReason.ERROR,
        error=RequestError(code=error.code, message=str(error)),
    )


def completion_row(batch_id: str, completion: Completion, created_at: str) -> tuple[Any, ...]:
    """In the order of the table's columns. ``created_at`` is the text of the batch's."""
    c = completion
    return (
        batch_id,
        c.index,
        c.choice,
        c.status.value,
        storable(c.text),
        c.finish_reason.value,
        c.model,
        c.model_version,
        c.prompt_tokens,
        len(c.token_ids),
        c.cached_tokens,
        orjson.dumps(c.token_ids).decode() if c.token_ids else _NO_TOKENS,
        _tokens_json(c.tokens) if c.tokens else _NO_TOKENS,
        orjson.dumps(c.logprobs).decode() if c.logprobs else _NO_TOKENS,
        None if c.top_logprobs is None else _top_logprobs_json(c.top_logprobs),
        orjson.dumps(c.token_times).decode() if c.token_times else _NO_TOKENS,
        created_at,
        _instant(c.started_at),
        _instant(c.first_token_at),
        _instant(c.finished_at),
        c.worker,
        c.attempt,
        None if c.error is None else _error_json(c.error),
        None if c.prompt_scores is None else _prompt_scores_json(c.prompt_scores),
        _spans_json(c.version_spans) if c.version_spans else None,
    )


def checkpoint_row(
    batch_id: str, index: int, progress: Progress, fence: int, model_version: str, updated_at: str
) -> tuple[Any, ...]:
    """In the order of the table's columns."""
    p = progress
    return (
        batch_id,
        index,
        p.choice,
        fence,
        orjson.dumps(p.token_ids).decode(),
        _tokens_json(p.tokens),
        orjson.dumps(p.logprobs).decode(),
        None if p.top_logprobs is None else _top_logprobs_json(p.top_logprobs),
        orjson.dumps(p.token_times).decode(),
        instant_text(p.started_at),
        updated_at,
        model_version,
        _spans_json(p.version_spans) if p.version_spans else None,
        len(p.token_ids),
    )


def _instant(instant: datetime | None) -> str | None:
    return None if instant is None else instant_text(instant)


def _tokens_json(tokens: Sequence[TokenText]) -> str:
    text = _strict_json(tokens)
    return text if text is not None else orjson.dumps([_storable_token(token) for token in tokens]).decode()


def _top_logprobs_json(positions: Sequence[TopLogprobs | None]) -> str:
    text = _strict_json(positions)
    if text is not None:
        return text
    cleaned = [p and [(number, logprob, _storable_token(token)) for number, logprob, token in p] for p in positions]
    return orjson.dumps(cleaned).decode()


def _prompt_scores_json(scores: PromptScores) -> str:
    tops = "null" if scores.top_logprobs is None else _top_logprobs_json(scores.top_logprobs)
    values = {
        "token_ids": orjson.dumps(scores.token_ids).decode(),
        "tokens": _tokens_json(scores.tokens),
        "logprobs": orjson.dumps(scores.logprobs).decode(),
        "top_logprobs": tops,
    }
    return "{" + ",".join(f'"{name}":{value}' for name, value in values.items()) + "}"


def _spans_json(spans: Sequence[VersionSpan]) -> str:
    text = _strict_json(spans)
    return text if text is not None else orjson.dumps([_storable_span(span) for span in spans]).decode()


def _error_json(error: RequestError) -> str:
    return orjson.dumps({"code": storable(error.code), "message": storable(error.message)}).decode()


def _strict_json(value: Any) -> str | None:
    """None where some text in it cannot be stored as it is."""
    try:
        encoded = orjson.dumps(value)
    except TypeError:  # half of a surrogate pair
        return None
    return None if b"\\u0000" in encoded else encoded.decode()


def _storable_token(token: TokenText) -> TokenText:
    return storable(token) if isinstance(token, str) else token


def _storable_span(span: VersionSpan) -> VersionSpan:
    return replace(span, version=storable(span.version), worker=span.worker and storable(span.worker))


def request_of(row: Any) -> Request:
    """Of a row with REQUEST_COLUMNS."""
    body = orjson.loads(row.body)
    return Request(index=row.index_, custom_id=row.custom_id, endpoint=Endpoint(row.endpoint), body=body)


def pending_request_of(row: tuple[int, str, str, str]) -> Request:
    """Of a bare tuple of PENDING_COLUMNS."""
    index, custom_id, endpoint, body = row
    return Request(index=index, custom_id=custom_id, endpoint=_ENDPOINTS[endpoint], body=orjson.loads(body))


def completion_of(row: Any) -> Completion:
    """Of a row with COMPLETION_COLUMNS."""
    tops = None if row.top_logprobs is None else orjson.loads(row.top_logprobs)
    return Completion(
        index=row.index_,
        choice=row.choice,
        status=RequestStatus(row.status),
        finish_reason=FinishReason(row.finish_reason),
        text=row.text,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        token_ids=tuple(orjson.loads(row.token_ids)),
        tokens=_texts(orjson.loads(row.tokens)),
        logprobs=_numbers(orjson.loads(row.logprobs)),
        token_times=tuple(orjson.loads(row.token_times)),
        top_logprobs=None if tops is None else tuple(map(_top_logprobs, tops)),
        model=row.model,
        model_version=row.model_version,
        version_spans=version_spans_of(row),
        worker=row.worker,
        attempt=row.attempt,
        started_at=row.started_at,
        first_token_at=row.first_token_at,
        finished_at=row.finished_at,
        error=None if row.error is None else RequestError(**orjson.loads(row.error)),
        prompt_scores=None if row.prompt_logprobs is None else _prompt_scores(orjson.loads(row.prompt_logprobs)),
    )


def progress_of(row: Any) -> Progress:
    """Of a row with CHECKPOINT_COLUMNS."""
    tops = None if row.top_logprobs is None else orjson.loads(row.top_logprobs)
    return Progress(
        choice=row.choice,
        token_ids=tuple(orjson.loads(row.token_ids)),
        tokens=_texts(orjson.loads(row.tokens)),
        logprobs=_numbers(orjson.loads(row.logprobs)),
        token_times=tuple(orjson.loads(row.token_times)),
        top_logprobs=None if tops is None else tuple(map(_top_logprobs, tops)),
        started_at=row.started_at,
        version_spans=version_spans_of(row),
    )


def version_spans_of(row: Any) -> tuple[VersionSpan, ...]:
    """Of a row with COMPLETION_COLUMNS or CHECKPOINT_COLUMNS."""
    stored = row.version_spans
    return () if stored is None else tuple(VersionSpan(**span) for span in orjson.loads(stored))


def _prompt_scores(stored: Mapping[str, Any]) -> PromptScores:
    tops = stored["top_logprobs"]
    return PromptScores(
        token_ids=tuple(stored["token_ids"]),
        tokens=_texts(stored["tokens"]),
        logprobs=tuple(stored["logprobs"]),
        top_logprobs=None if tops is None else tuple(None if top is None else _top_logprobs(top) for top in tops),
    )


def _texts(stored: Sequence[str | list[int]]) -> tuple[TokenText, ...]:
    if list not in map(type, stored):
        return tuple(stored)  # type: ignore[arg-type]
    return tuple(map(_token, stored))


def _token(stored: str | list[int]) -> TokenText:
    return stored if isinstance(stored, str) else tuple(stored)


def _numbers(stored: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(map(_number, stored)) if None in stored else tuple(stored)  # type: ignore[arg-type]


def _number(stored: float | None) -> float:
    return float("nan") if stored is None else stored


def _top_logprobs(stored: Sequence[tuple[int, float | None, str | list[int]]]) -> TopLogprobs:
    return tuple((token_id, _number(logprob), _token(token)) for token_id, logprob, token in stored)
