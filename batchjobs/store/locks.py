"""Rows that are locked for a change.

Whoever changes shards locks their rows first, ordered by batch and number, so that no two transactions wait for each
other in a circle. A batch's row is locked before its shards. On SQLite BEGIN IMMEDIATE has locked everything already.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.errors import NotFound
from batchjobs.store.conditions import IS_NAMED
from batchjobs.store.part import known
from batchjobs.tables import batches, shards
from batchjobs.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.engine import Connection, Row

_BATCH = sa.select(batches).where(batches.c.id == sa.bindparam("batch")).with_for_update(key_share=True)
_SHARDS = (
    sa.select(shards, batches.c.created_at)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(IS_NAMED)
    .order_by(shards.c.shard_no)
    .with_for_update(of=shards)
)


def named(wanted: Iterable[ShardId]) -> list[dict[str, Any]]:
    """Parameters for IS_NAMED, for one batch each, in the order in which rows are locked."""
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for shard in wanted:
        numbers[shard.batch_id].add(shard.shard_no)
    return [{"batch": batch_id, "numbers": sorted(numbers[batch_id])} for batch_id in sorted(numbers)]


def locked_batch(connection: Connection, batch_id: str) -> Row[Any]:
    """Nobody else adds to the batch, opens or cancels it until the end of the transaction."""
    row = connection.execute(_BATCH, {"batch": known("batch", batch_id)}).one_or_none()
    if row is None:
        raise NotFound(f"no batch {batch_id!r}")
    return row


def locked_shards(connection: Connection, wanted: Iterable[ShardId]) -> dict[ShardId, Row[Any]]:
    """The rows of these shards, each with the ``created_at`` of its batch."""
    return {
        ShardId(row.batch_id, row.shard_no): row
        for parameters in named(wanted)
        for row in connection.execute(_SHARDS, parameters)
    }
