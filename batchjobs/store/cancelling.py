"""Cancelling: what nobody holds gets its outcome at once; what a worker holds is left to that worker.

A lease that ran out counts as held by nobody. Closing its shard raises the fence, so that its worker, should it live,
writes nothing more. What there was of an answer is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from ulid import ULID

from batchjobs.clock import database_instant, database_seconds
from batchjobs.errors import NotFound
from batchjobs.store.bulk import insert_if_new
from batchjobs.store.conditions import IS_NAMED, IS_UNFINISHED, OUTCOMES, free_at, in_range, runs
from batchjobs.store.locks import locked_batch, named
from batchjobs.store.part import Part, known
from batchjobs.store.partial import Ending, end_begun
from batchjobs.store.pauses import NOT_PAUSED
from batchjobs.store.progress import read_progress
from batchjobs.tables import batches, commands, completions, requests, shards
from batchjobs.types import FinishReason, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Counts, ShardId

CANCEL_REQUEST = "cancel_request"


class CancelPart(Part):
    def cancel_batch(self, batch_id: str) -> Counts:
        """Asks for the cancellation of a batch, and cancels what nobody holds. Again, or after its end: no change.

        A pause is lifted, because workers shall end what they hold.

        Returns:
            The counts right after; requests that workers still hold are among them as running.
        """
        with self._database.writing() as connection:
            locked_batch(connection, batch_id)
            unfinished = sa.exists().where(shards.c.batch_id == batch_id, IS_UNFINISHED)
            connection.execute(
                sa.update(batches)
                .where(batches.c.id == batch_id, batches.c.cancel_requested_at.is_(None))
                .where(sa.or_(batches.c.submitted_at.is_(None), unfinished))
                .values(cancel_requested_at=database_instant(), **NOT_PAUSED)
            )
            close_free_shards(connection, batch_id)
        with self._database.reading() as connection:
            return read_progress(connection, [batch_id])[0].counts

    def sweep_cancelled(self) -> int:
        """Cancels what nobody holds any more in cancelled batches: given back, or its lease ran out.

        Returns:
            The number of requests that got their outcome.
        """
        now = database_seconds()
        left = (
            sa.select(batches.c.id)
            .where(batches.c.cancel_requested_at.is_not(None))
            .where(sa.exists().where(shards.c.batch_id == batches.c.id, IS_UNFINISHED, free_at(now)))
        )
        with self._database.reading() as connection:
            batch_ids = connection.execute(left).scalars().all()
        swept = 0
        for batch_id in batch_ids:
            with self._database.writing() as connection:
                swept += close_free_shards(connection, batch_id)
        return swept

    def cancel_request(self, batch_id: str, index: int) -> Counts:
        """Cancels one request: at once where nobody holds it, else by its worker. A finished one stays as it is.

        Returns:
            The counts of the batch right after.
        """
        with self._database.writing() as connection:
            _cancel_request(connection, batch_id, index)
        with self._database.reading() as connection:
            return read_progress(connection, [batch_id])[0].counts


def read_cancelled_requests(connection: Connection, wanted: Iterable[ShardId]) -> set[tuple[str, int]]:
    """(batch id, index) of the requests of these shards that somebody asked to cancel one by one."""
    return {
        (row.batch_id, row.index_) for parameters in named(wanted) for row in connection.execute(_ASKED_FOR, parameters)
    }


def close_free_shards(connection: Connection, batch_id: str) -> int:
    """Writes the outcome 'cancelled' for all that nobody holds. Returns the number of requests."""
    now = connection.execute(sa.select(database_seconds())).scalar_one()
    closed = connection.execute(_CLOSE_FREE, {"batch": batch_id, "now": now}).all()
    begun = sum(_end_begun(connection, batch_id, row, row.first_index, row.last_index) for row in closed)
    free = runs((row.first_index, row.last_index) for row in closed)
    return begun + sum(_insert_cancelled(connection, batch_id, first, last) for first, last in free)


def _end_begun(connection: Connection, batch_id: str, shard: Row[Any], first: int, last: int) -> int:
    if shard.owner is None:  # nobody has ever held it
        return 0
    ending = Ending(status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED, worker=shard.owner)
    return end_begun(connection, batch_id, shard.shard_no, first, last, ending)


def _cancel_request(connection: Connection, batch_id: str, index: int) -> None:
    request = sa.select(requests.c.index).where(
        requests.c.batch_id == known("batch", batch_id), requests.c.index == index
    )
    if not 0 <= index < 2**63 or connection.execute(request).one_or_none() is None:
        raise NotFound(f"batch {batch_id!r} has no request {index}")
    # A second look where the shard was replaced by single ones while the first one waited for its lock.
    shard = _locked_shard_of(connection, batch_id, index) or _locked_shard_of(connection, batch_id, index)
    if shard is not None and shard.is_free:
        begun = _end_begun(connection, batch_id, shard, index, index)
        if begun or _insert_cancelled(connection, batch_id, index, index):
            _count_cancelled(connection, batch_id, shard.shard_no)
        return
    outcome = sa.select(completions.c.index).where(completions.c.batch_id == batch_id, completions.c.index == index)
    if connection.execute(outcome).first() is not None:
        return
    order = {"id": str(ULID()), "kind": CANCEL_REQUEST, "batch_id": batch_id, "index": index}
    connection.execute(insert_if_new(connection, commands).values(**order, created_at=database_instant()))


def _locked_shard_of(connection: Connection, batch_id: str, index: int) -> Row[Any] | None:
    now = connection.execute(sa.select(database_seconds())).scalar_one()
    query = sa.select(shards.c.shard_no, shards.c.owner, free_at(now).label("is_free")).where(
        shards.c.batch_id == batch_id, shards.c.first_index <= index, shards.c.last_index >= index
    )
    return connection.execute(query.with_for_update()).one_or_none()


def _insert_cancelled(connection: Connection, batch_id: str, first: int, last: int) -> int:
    """Outcomes for those requests, of shards that are locked, that have none."""
    parameters = {"batch": batch_id, "first": first, "last": last}
    inserted = connection.execute(_INSERT_CANCELLED, parameters, execution_options={"preserve_rowcount": True})
    return inserted.rowcount


def _count_cancelled(connection: Connection, batch_id: str, shard_no: int) -> None:
    """One more outcome in a shard that nobody holds; with its last one it is done, and the fence grows."""
    is_last = shards.c.requests == OUTCOMES + 1
    connection.execute(
        sa.update(shards)
        .where(shards.c.batch_id == batch_id, shards.c.shard_no == shard_no)
        .values(
            cancelled=shards.c.cancelled + 1,
            state=sa.case((is_last, "done"), else_=shards.c.state),
            fence=sa.case((is_last, shards.c.fence + 1), else_=shards.c.fence),
            finished_at=sa.case((is_last, database_instant())),
        )
    )


_ASKED_FOR = (
    sa.select(commands.c.batch_id, commands.c.index.label("index_"))
    .join(shards, commands.c.batch_id == shards.c.batch_id)
    .where(commands.c.kind == CANCEL_REQUEST, IS_NAMED)
    .where(commands.c.index.between(shards.c.first_index, shards.c.last_index))
)
_FREE = (
    sa.select(shards.c.shard_no)
    .where(shards.c.batch_id == sa.bindparam("batch"), IS_UNFINISHED)
    .where(free_at(sa.bindparam("now", type_=sa.Double)))
    .order_by(shards.c.shard_no)
    .with_for_update()
    .cte("free")
)
_CLOSE_FREE = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("batch"), shards.c.shard_no.in_(sa.select(_FREE.c.shard_no)))
    .values(state="done", fence=shards.c.fence + 1, finished_at=database_instant())
    .values(cancelled=shards.c.cancelled + shards.c.requests - OUTCOMES)
    .returning(shards.c.shard_no, shards.c.first_index, shards.c.last_index, shards.c.owner)
)
_MISSING = sa.except_(
    sa.select(requests.c.index).where(in_range(requests)),
    sa.select(completions.c.index).where(in_range(completions)),
).subquery("missing")
_CANCELLED: dict[str, sa.ColumnElement[Any]] = {
    "batch_id": batches.c.id,
    "index": _MISSING.c.index,
    "choice": sa.literal(0),
    "status": sa.literal(RequestStatus.CANCELLED.value),
    "text": sa.literal(""),
    "finish_reason": sa.literal(FinishReason.CANCELLED.value),
    "prompt_tokens": sa.literal(0),
    "completion_tokens": sa.literal(0),
    "cached_tokens": sa.literal(0),
    **{name: sa.literal_column("'[]'") for name in ("token_ids", "tokens", "logprobs", "token_times")},
    "created_at": batches.c.created_at,
    "finished_at": database_instant(),
    "attempt": sa.literal(0),
}
_INSERT_CANCELLED = sa.insert(completions).from_select(
    list(_CANCELLED),
    sa.select(*_CANCELLED.values()).select_from(sa.join(_MISSING, batches, batches.c.id == sa.bindparam("batch"))),
)
