"""Checkpoints: how far unfinished requests are, so that another worker goes on behind the last stored token.

They are written under the lock on the shard and the fence of the lease, as outcomes are, and go with the outcome.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.store.bulk import fetch_all, insert_rows
from batchjobs.store.conditions import in_range
from batchjobs.store.leases import limits_of
from batchjobs.store.locks import locked_shards
from batchjobs.store.outcomes import may_write, stored_indexes
from batchjobs.store.part import Part, known
from batchjobs.store.rows import CHECKPOINT_COLUMNS, checkpoint_row, progress_of
from batchjobs.tables import checkpoints, instant_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Lease, Progress, ShardId


class CheckpointPart(Part):
    def save_checkpoints(
        self, records: Sequence[tuple[Lease, int, tuple[Progress, ...]]], model_version: str
    ) -> list[ShardId]:
        """Stores how far requests are, in place of what was stored of them before, in one transaction.

        Args:
            records: The lease, the index of the request, and all its choices that have a token.
            model_version: Of the model that got so far; no other one can go on from there.

        Returns:
            The shards whose leases were lost; nothing was written for them. A request that has its outcome is passed
            over.

        Raises:
            ValueError: A request is not of its lease's shard.
        """
        given: defaultdict[Lease, dict[int, tuple[Progress, ...]]] = defaultdict(dict)
        for lease, index, choices in records:
            given[lease][index] = choices
        if not given:
            return []
        with self._database.writing() as connection:
            held = locked_shards(connection, [lease.shard for lease in given])
            stale = [lease.shard for lease in given if not may_write(lease, held.get(lease.shard))]
            new = {
                lease: _unfinished(connection, held[lease.shard], choices)
                for lease, choices in given.items()
                if may_write(lease, held.get(lease.shard))
            }
            _replace(connection, new, model_version)
        return stale

    def checkpoints(self, lease: Lease, model_version: str) -> dict[int, tuple[Progress, ...]]:
        """What the requests of the shard can go on from with this model, by index, choices in order."""
        with self._database.reading() as connection:
            inside, _ = limits_of(connection, lease.shard)
            if not inside or fetch_all(connection, _COUNT, inside) == [(0,)]:  # as with most shards
                return {}
            rows = connection.execute(_STORED, {**inside, "version": model_version})
            found: defaultdict[int, list[Progress]] = defaultdict(list)
            for row in rows:
                found[row.index_].append(progress_of(row))
        return {index: tuple(choices) for index, choices in found.items()}

    def progress(self, batch_id: str, index: int) -> tuple[Progress, ...]:
        """How far an unfinished request was when it was stored last, choices in order, made by whatever model."""
        if not 0 <= index < 2**63:
            return ()
        inside = {"batch": known("batch", batch_id), "first": index, "last": index}
        with self._database.reading() as connection:
            return tuple(map(progress_of, connection.execute(_OF_ANY_MODEL, inside)))


def _unfinished(
    connection: Connection, row: Row[Any], given: dict[int, tuple[Progress, ...]]
) -> dict[int, tuple[Progress, ...]]:
    for index in given:
        if not row.first_index <= index <= row.last_index:
            raise ValueError(f"request {index} does not belong to shard {row.batch_id}-{row.shard_no}")
    ended = stored_indexes(connection, row)
    return {index: choices for index, choices in given.items() if index not in ended}


def _replace(connection: Connection, new: dict[Lease, dict[int, tuple[Progress, ...]]], model_version: str) -> None:
    replaced = [
        {"the_batch": lease.shard.batch_id, "the_index": index} for lease, each in new.items() for index in each
    ]
    if not replaced:
        return
    connection.execute(_DELETE, replaced)
    now = instant_text(connection.execute(sa.select(database_instant())).scalar_one())
    rows = [
        checkpoint_row(lease.shard.batch_id, index, choice, lease.fence, model_version, now)
        for lease, each in new.items()
        for index, choices in each.items()
        for choice in choices
    ]
    insert_rows(connection, checkpoints, rows)


_DELETE = sa.delete(checkpoints).where(
    checkpoints.c.batch_id == sa.bindparam("the_batch"), checkpoints.c.index == sa.bindparam("the_index")
)
_OF_ANY_MODEL = (
    sa.select(*CHECKPOINT_COLUMNS).where(in_range(checkpoints)).order_by(checkpoints.c.index, checkpoints.c.choice)
)
_COUNT = sa.select(sa.func.count()).select_from(checkpoints).where(in_range(checkpoints))
_STORED = _OF_ANY_MODEL.where(checkpoints.c.model_version == sa.bindparam("version"))
