"""Retries: failed requests run again, and what they had been is kept beside.

A request that is set back has no outcome any more, so everything else takes it for one that never ended.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from batchjobs.clock import database_instant, database_seconds
from batchjobs.errors import NotFound, UsageError
from batchjobs.store.cancelling import CANCEL_REQUEST
from batchjobs.store.conditions import ENDED, IS_NAMED, free_at, in_range, runs
from batchjobs.store.locks import locked_batch
from batchjobs.store.part import Part, known
from batchjobs.store.records import Retried
from batchjobs.store.rows import completion_of, readable
from batchjobs.tables import batches, commands, completions, past_completions, requests, shards
from batchjobs.types import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Completion

_AT_ONCE = 200
"""Shards in one transaction."""


class RetryPart(Part):
    def retry_failed(self, batch_id: str) -> Retried:
        """Sets the failed requests of a batch back, so that they run again; their completions become past ones.

        Some hundred shards in each transaction: what was set back stays so, and another call takes the rest.

        Raises:
            NotFound: There is no such batch.
            UsageError: It was cancelled.
        """
        with self._database.reading() as connection:
            _check(connection.execute(_BATCH, {"batch": known("batch", batch_id)}).one_or_none(), batch_id)
            numbers = connection.execute(_WITH_FAILURES, {"batch": batch_id}).scalars().all()
        done = [self._retry(batch_id, numbers[at : at + _AT_ONCE]) for at in range(0, len(numbers), _AT_ONCE)]
        return Retried(
            requests=sum(each.requests for each in done),
            refused=sum(each.refused for each in done),
            held=sum(each.held for each in done),
        )

    def _retry(self, batch_id: str, numbers: Sequence[int]) -> Retried:
        with self._database.writing() as connection:
            _check(locked_batch(connection, batch_id), batch_id)
            rows = connection.execute(_LOCK, {"batch": batch_id, "numbers": list(numbers)}).all()
            failures = [_failures(connection, row) for row in rows]
            _set_back(connection, [each for each in failures if each.indexes and not each.shard.is_held])
        return Retried(
            requests=sum(len(each.indexes) for each in failures if not each.shard.is_held),
            refused=sum(each.refused for each in failures),
            held=sum(len(each.indexes) for each in failures if each.shard.is_held),
        )

    def past_completions(self, batch_id: str, index: int) -> list[Completion]:
        """What became of a request before it was run again, the oldest first, all choices of each time in order."""
        if not 0 <= index < 2**63:
            return []
        with self._database.reading() as connection:
            rows = connection.execute(_PAST, {"batch": known("batch", batch_id), "index_": index})
            return [completion_of(row) for row in rows]


class _Failures(NamedTuple):
    """Those of one shard: the requests that can run again, and what they counted for."""

    shard: Row[Any]
    indexes: list[int]
    refused: int
    prompt_tokens: int
    completion_tokens: int
    last_attempt: int


def _check(batch: Row[Any] | None, batch_id: str) -> None:
    if batch is None:
        raise NotFound(f"no batch {batch_id!r}")
    if batch.cancel_requested_at is not None:
        raise UsageError(f"batch {batch_id} was cancelled, so its failed requests stay; submit them as a new batch")


def _failures(connection: Connection, shard: Row[Any]) -> _Failures:
    inside = {"batch": shard.batch_id, "first": shard.first_index, "last": shard.last_index}
    refused = set(connection.execute(_REFUSED, inside).scalars())
    ended: Sequence[Any] = connection.execute(ENDED, inside).all()
    found = {index: list(choices) for index, choices in groupby(ended, attrgetter("index_"))}
    failed = {index: choices for index, choices in found.items() if index not in refused and _has_failed(choices)}
    rows = [choice for choices in failed.values() for choice in choices]
    return _Failures(
        shard=shard,
        indexes=list(failed),
        refused=len(refused),
        prompt_tokens=sum(choices[0].prompt_tokens for choices in failed.values()),
        completion_tokens=sum(row.completion_tokens for row in rows),
        last_attempt=max((row.attempt for row in rows), default=0),
    )


def _has_failed(choices: Sequence[Row[Any]]) -> bool:
    return RequestStatus.of_choices(RequestStatus(each.status) for each in choices) == RequestStatus.FAILED


def _set_back(connection: Connection, failures: Sequence[_Failures]) -> None:
    if not failures:
        return
    moved = [
        {"batch": each.shard.batch_id, "first": first, "last": last}
        for each in failures
        for first, last in runs((index, index) for index in each.indexes)
    ]
    connection.execute(_KEEP, moved)
    connection.execute(_DELETE, moved)
    connection.execute(_FORGET_CANCELS, moved)  # asked for before they failed: whoever wants them to run again knows
    connection.execute(
        _RESET,
        [
            {
                "the_batch": each.shard.batch_id,
                "the_shard": each.shard.shard_no,
                "requests_": len(each.indexes),
                "prompt": each.prompt_tokens,
                "completion": each.completion_tokens,
                # A claim that was given back is counted no more, and its number would come once more.
                "last_attempt": max(each.last_attempt, each.shard.attempts),
            }
            for each in failures
        ],
    )


_BATCH = sa.select(batches.c.cancel_requested_at).where(batches.c.id == sa.bindparam("batch"))
_WITH_FAILURES = (
    sa.select(shards.c.shard_no)
    .where(shards.c.batch_id == sa.bindparam("batch"), shards.c.failed > 0)
    .order_by(shards.c.shard_no)
)
_IS_HELD = sa.and_(shards.c.state == "leased", sa.not_(free_at(database_seconds())))
_LOCK = (
    sa.select(shards, _IS_HELD.label("is_held"))
    .where(IS_NAMED, shards.c.failed > 0)
    .order_by(shards.c.shard_no)
    .with_for_update()
)
_REFUSED = sa.select(requests.c.index).where(in_range(requests), requests.c.rejected)
_FORGET_CANCELS = sa.delete(commands).where(in_range(commands), commands.c.kind == CANCEL_REQUEST)
_KEEP = sa.insert(past_completions).from_select(
    [column.name for column in completions.columns] + ["retried_at"],
    sa.select(completions, database_instant()).where(in_range(completions)),
)
_DELETE = sa.delete(completions).where(in_range(completions))
_RESET = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("the_batch"), shards.c.shard_no == sa.bindparam("the_shard"))
    .values(
        state="ready",
        fence=shards.c.fence + 1,
        lease_until=0,
        attempts=sa.bindparam("last_attempt", type_=sa.Integer),
        forgiven=sa.bindparam("last_attempt", type_=sa.Integer),
        failed=shards.c.failed - sa.bindparam("requests_", type_=sa.Integer),
        prompt_tokens=shards.c.prompt_tokens - sa.bindparam("prompt", type_=sa.BigInteger),
        completion_tokens=shards.c.completion_tokens - sa.bindparam("completion", type_=sa.BigInteger),
        finished_at=None,
    )
)
_PAST = (
    sa.select(*readable(past_completions))
    .where(past_completions.c.batch_id == sa.bindparam("batch"), past_completions.c.index == sa.bindparam("index_"))
    .order_by(past_completions.c.retried_at, past_completions.c.attempt, past_completions.c.choice)
)
