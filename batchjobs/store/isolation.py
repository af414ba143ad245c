"""Isolation: a request that kills its worker is parted from the others, and in the end given up.

A shard that crashed SPLIT_AT times is replaced by one shard a request, so that each request crashes for itself. At
ALONE_AT a request runs with nothing beside it, and at FAIL_AT it fails. See
:mod:`batchjobs.store.splitting`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant, database_seconds
from batchjobs.errors import BatchjobsError
from batchjobs.store.bulk import insert_rows
from batchjobs.store.cancelling import CANCEL_REQUEST
from batchjobs.store.conditions import IS_NAMED, IS_UNFINISHED, free_at, in_range
from batchjobs.store.leases import ALONE_AT, CRASHED_TOO_OFTEN
from batchjobs.store.locks import locked_batch, named
from batchjobs.store.part import Part
from batchjobs.store.partial import Ending, empty, end_begun
from batchjobs.store.records import Isolated
from batchjobs.store.rows import completion_row
from batchjobs.store.splitting import split
from batchjobs.tables import batches, commands, completions, instant_text, shards
from batchjobs.text import shortened
from batchjobs.types import FinishReason, RequestError, RequestStatus, ShardId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection, Row

WORKER_CRASHED = "worker_crashed"
_AT_ONCE = 100
"""Shards in one transaction."""


class IsolationPart(Part):
    def isolate(self) -> Isolated:
        """Parts or ends what has crashed too often, of batches that are not cancelled. May be called at any time.

        One that the database refuses keeps nobody from the others; it is tried again with the next call.
        """
        with self._database.reading() as connection:
            found = [ShardId(*row) for row in connection.execute(_CRASHED)]
        done = [
            each
            for parameters in named(found)
            for start in range(0, len(parameters["numbers"]), _AT_ONCE)
            for each in self._try(parameters["batch"], parameters["numbers"][start : start + _AT_ONCE])
        ]
        return Isolated(
            split=sum(each.split for each in done),
            failed=sum(each.failed for each in done),
            refused=tuple(reason for each in done for reason in each.refused),
        )

    def _try(self, batch_id: str, numbers: Sequence[int]) -> Iterator[Isolated]:
        """All of them together, or where that is refused one by one."""
        try:
            yield self._isolate(batch_id, numbers)
        except BatchjobsError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the database has against a row
            if len(numbers) == 1:
                reason = str(error.__cause__ or error).strip()
                yield Isolated(refused=(f"shard {ShardId(batch_id, numbers[0])}: {shortened(reason, 200)}",))
                return
            for number in numbers:
                yield from self._try(batch_id, [number])

    def _isolate(self, batch_id: str, numbers: Sequence[int]) -> Isolated:
        with self._database.writing() as connection:
            batch = locked_batch(connection, batch_id)  # of those who give numbers to new shards, one at a time
            if batch.cancel_requested_at is not None:
                return Isolated()
            rows = connection.execute(_LOCK, {"batch": batch_id, "numbers": list(numbers)}).all()
            several, singles = [row for row in rows if row.requests > 1], [row for row in rows if row.requests == 1]
            split(connection, batch_id, several)
            for row in singles:
                _give_up(connection, row, batch.created_at)
            return Isolated(split=len(several), failed=len(singles))


def _give_up(connection: Connection, row: Row[Any], created_at: datetime) -> None:
    now = connection.execute(sa.select(database_instant())).scalar_one()
    index = {"batch": row.batch_id, "first": row.first_index, "last": row.last_index}
    is_cancelled = connection.execute(_CANCELLED, index).first() is not None
    ending = _cancelled(row) if is_cancelled else _crashed(row)
    if not end_begun(connection, row.batch_id, row.shard_no, row.first_index, row.last_index, ending):
        outcome = completion_row(row.batch_id, empty(row.first_index, ending, now), instant_text(created_at))
        insert_rows(connection, completions, [outcome])
    connection.execute(_END, {"batch": row.batch_id, "numbers": [row.shard_no], "more_cancelled": int(is_cancelled)})


def _cancelled(row: Row[Any]) -> Ending:
    """Somebody asked for that before it crashed, and no worker lived to do it."""
    return Ending(status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED, worker=row.owner)


def _crashed(row: Row[Any]) -> Ending:
    return Ending(
        status=RequestStatus.FAILED,
        finish_reason=FinishReason.ERROR,
        worker=row.owner,
        attempt=row.attempts,
        error=RequestError(code=WORKER_CRASHED, message=_message(row)),
    )


def _message(row: Row[Any]) -> str:
    crashes = row.attempts - row.forgiven
    return (
        f"{crashes} attempts came to no end, the last {crashes - ALONE_AT} with nothing beside it: its workers died, or"
        f" were cut off, or could not store how it ended; look into the log of worker {row.owner} for the cause, often"
        " too little memory for a request of this length, and then run the failed requests of the batch again"
    )


_CRASHED = (
    sa.select(shards.c.batch_id, shards.c.shard_no)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(IS_UNFINISHED, CRASHED_TOO_OFTEN, free_at(database_seconds()), batches.c.cancel_requested_at.is_(None))
)
_LOCK = (
    sa.select(shards)
    .where(IS_NAMED, IS_UNFINISHED, CRASHED_TOO_OFTEN, free_at(database_seconds()))
    .order_by(shards.c.shard_no)
    .with_for_update()
)
_CANCELLED = sa.select(commands.c.id).where(in_range(commands), commands.c.kind == CANCEL_REQUEST)
_END = (
    sa.update(shards)
    .where(IS_NAMED)
    .values(state="done", fence=shards.c.fence + 1, finished_at=database_instant())
    .values(failed=shards.c.failed + 1 - sa.bindparam("more_cancelled", type_=sa.Integer))
    .values(cancelled=shards.c.cancelled + sa.bindparam("more_cancelled", type_=sa.Integer))
)
