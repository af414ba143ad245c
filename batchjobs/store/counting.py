"""How much there is to do, over all batches that have not ended: few rows, however much has been done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from batchjobs.clock import database_seconds
from batchjobs.store.part import Part
from batchjobs.tables import batch_progress, batches, shards
from batchjobs.types import BatchStatus

SHARD_STATES = ("ready", "leased", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Counts over the batches that have not ended.

    ``shards`` by state (ready, leased, done), those of paused batches too. ``batches`` by status, final ones left out.
    ``oldest_ready_seconds``: how long ago the oldest batch was submitted that has a ready shard and is not paused, by
    the clock of the database; 0 where there is none.
    """

    shards: Mapping[str, int]
    batches: Mapping[BatchStatus, int]
    paused_batches: int
    oldest_ready_seconds: float


class CountingPart(Part):
    def unfinished(self) -> Unfinished:
        """Reads the shards of unfinished batches, by the index on unfinished shards, and those batches themselves."""
        with self._database.reading() as connection:
            # Two steps: with the ids at hand, the view is worked out for these batches alone.
            ids = connection.execute(_UNFINISHED_BATCHES).scalars().all()
            rows = connection.execute(_COUNTS, {"ids": ids}).all() if ids else []
            now = connection.execute(sa.select(database_seconds())).scalar_one()
        oldest = [row.oldest_ready.timestamp() for row in rows if row.oldest_ready is not None]
        counted = {row.status: row.batches for row in rows}
        return Unfinished(
            shards={state: sum(getattr(row, state) for row in rows) for state in SHARD_STATES},
            batches={status: counted.get(status.value, 0) for status in BatchStatus if not status.is_final},
            paused_batches=sum(row.paused for row in rows),
            oldest_ready_seconds=max(0.0, now - min(oldest)) if oldest else 0.0,
        )


_UNFINISHED_BATCHES = sa.union(
    # Written out, because the partial index is only used for these very words.
    sa.select(shards.c.batch_id).where(sa.text("state <> 'done'")),
    sa.select(batches.c.id).where(batches.c.submitted_at.is_(None)),
)
_VIEW = batch_progress.c
_CLAIMABLE = sa.and_(_VIEW.shards_ready > 0, _VIEW.paused_at.is_(None))
_COUNTS = (
    sa.select(
        _VIEW.status,
        sa.func.count().label("batches"),
        sa.func.count(_VIEW.paused_at).label("paused"),
        sa.func.sum(_VIEW.shards_ready, type_=sa.BigInteger).label("ready"),
        sa.func.sum(_VIEW.shards_leased, type_=sa.BigInteger).label("leased"),
        sa.func.sum(_VIEW.shards_done, type_=sa.BigInteger).label("done"),
        sa.func.min(sa.case((_CLAIMABLE, _VIEW.submitted_at))).label("oldest_ready"),
    )
    .where(_VIEW.batch_id.in_(sa.bindparam("ids", expanding=True)))
    .group_by(_VIEW.status)
)
