"""What there is of a request that ends without a worker: its checkpoints become its outcome.

Whoever writes outcomes holds the lock on the shard, as whoever writes checkpoints does. So what is read here is what
there is, and no checkpoint of a request outlives the transaction that ends it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import orjson
import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.echo import following, prompt_text
from batchjobs.store.bulk import insert_rows, run_each
from batchjobs.store.conditions import in_range, runs
from batchjobs.store.rows import CHECKPOINT_COLUMNS, completion_row, progress_of, version_spans_of
from batchjobs.tables import batches, checkpoints, completions, instant_text, model_versions, requests, shards
from batchjobs.types import Completion, FinishReason, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Progress, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How requests of one shard end. ``worker`` is the last one that held it."""

    status: RequestStatus
    finish_reason: FinishReason
    worker: str | None
    attempt: int = 0
    error: RequestError | None = None


def delete_ended(connection: Connection, locked: Iterable[Row[Any]]) -> None:
    """Deletes the checkpoints of those requests of these shards that have an outcome."""
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in locked:
        ranges[row.batch_id].append((row.first_index, row.last_index))
    inside = [
        {"batch": batch_id, "first": first, "last": last}
        for batch_id, each in ranges.items()
        for first, last in runs(each)
    ]
    if inside:
        run_each(connection, _DELETE_ENDED, inside)


def end_begun(connection: Connection, batch_id: str, shard_no: int, first: int, last: int, ending: Ending) -> int:
    """Ends those requests of a locked shard, from ``first`` to ``last``, that were begun and have no outcome.

    Their text, tokens, logprobs and times are kept, and the tokens are counted; the states are the caller's to count.

    Returns:
        The number of requests.
    """
    inside = {"batch": batch_id, "first": first, "last": last}
    found: Sequence[Any] = connection.execute(_BEGUN, inside).all()
    if not found:
        return 0
    [times] = connection.execute(_TIMES, inside)
    names = {row.version: row.name for row in connection.execute(_NAMES, {"versions": sorted({*map(_version, found)})})}
    outcomes = [
        outcome
        for _, choices in groupby(found, key=attrgetter("index_"))
        for outcome in _outcomes(list(choices), ending, times.now, names)
    ]
    created_at = instant_text(times.created_at)
    insert_rows(connection, completions, [completion_row(batch_id, outcome, created_at) for outcome in outcomes])
    generated = sum(outcome.completion_tokens for outcome in outcomes)
    connection.execute(_ADD_TOKENS, {"the_batch": batch_id, "the_shard": shard_no, "generated": generated})
    connection.execute(_DELETE_ENDED, inside)
    return len({outcome.index for outcome in outcomes})


def empty(index: int, ending: Ending, finished_at: datetime, choice: int = 0) -> Completion:
    """The outcome of a request, or of a choice, that was never begun."""
    return Completion(
        index=index,
        choice=choice,
        status=ending.status,
        finish_reason=ending.finish_reason,
        worker=ending.worker,
        attempt=ending.attempt,
        finished_at=finished_at,
        error=ending.error,
    )


def _outcomes(rows: list[Row[Any]], ending: Ending, now: datetime, names: dict[str, str]) -> list[Completion]:
    """Of one request. Choices that were not begun stand between the others without a token."""
    begun = {row.choice: row for row in rows}
    index = rows[0].index_
    return [
        _outcome(begun[choice], ending, now, names) if choice in begun else empty(index, ending, now, choice)
        for choice in range(max(begun) + 1)
    ]


def _outcome(row: Row[Any], ending: Ending, now: datetime, names: dict[str, str]) -> Completion:
    progress = progress_of(row)
    version = _version(row)
    times = progress.token_times
    return Completion(
        index=row.index_,
        choice=row.choice,
        status=ending.status,
        finish_reason=ending.finish_reason,
        text=_text(progress, orjson.loads(row.body), ending),
        token_ids=progress.token_ids,
        tokens=progress.tokens,
        logprobs=progress.logprobs,
        token_times=times,
        top_logprobs=progress.top_logprobs,
        model=names.get(version),
        model_version=version,
        version_spans=progress.version_spans,
        worker=ending.worker,
        attempt=ending.attempt,
        started_at=progress.started_at,
        first_token_at=progress.started_at + timedelta(seconds=times[0]) if times else None,
        finished_at=now,
        error=ending.error,
    )


def _version(row: Row[Any]) -> str:
    """That which drew the last token; the one that can go on may be another."""
    spans = version_spans_of(row)
    return spans[-1].version if spans else str(row.model_version)


def _text(progress: Progress, body: dict[str, Any], ending: Ending) -> str:
    """As workers do it: behind the prompt where it is echoed, but not where the request failed."""
    text = prompt_text((), progress.tokens)
    prompt = body.get("prompt")
    if ending.error is None and body.get("echo") and isinstance(prompt, str):  # the text of token ids is not known here
        return following(prompt, text, progress.tokens)
    return text


# Looked up row by row, by the primary key: a join might become a walk through all of a table, see conditions.
_OUTCOME = (
    sa.select(completions.c.choice)
    .where(completions.c.batch_id == checkpoints.c.batch_id, completions.c.index == checkpoints.c.index)
    .where(completions.c.choice == sa.literal_column("0"))
    .correlate(checkpoints)
    .scalar_subquery()
)
_DELETE_ENDED = sa.delete(checkpoints).where(in_range(checkpoints), _OUTCOME.is_not(None))
_BODY = (
    sa.select(sa.cast(requests.c.body, sa.Text))
    .where(requests.c.batch_id == checkpoints.c.batch_id, requests.c.index == checkpoints.c.index)
    .correlate(checkpoints)
    .scalar_subquery()
)
_NAMES = sa.select(model_versions.c.version, model_versions.c.name).where(
    model_versions.c.version.in_(sa.bindparam("versions", expanding=True))
)
_BEGUN = (
    sa.select(*CHECKPOINT_COLUMNS, _BODY.label("body"))
    .where(in_range(checkpoints), _OUTCOME.is_(None))
    .order_by(checkpoints.c.index, checkpoints.c.choice)
)
_TIMES = sa.select(batches.c.created_at, database_instant().label("now")).where(batches.c.id == sa.bindparam("batch"))
_ADD_TOKENS = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("the_batch"), shards.c.shard_no == sa.bindparam("the_shard"))
    .values(completion_tokens=shards.c.completion_tokens + sa.bindparam("generated", type_=sa.BigInteger))
)
