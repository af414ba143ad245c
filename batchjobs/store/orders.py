"""Orders: all that a worker has to hear, asked for every second by every worker, so in few statements that find little.

The message in Redis only wakes a worker; what it shall do stands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from batchjobs.store.cancelling import CANCEL_REQUEST, read_cancelled_requests
from batchjobs.store.commands import read_open
from batchjobs.store.part import Part
from batchjobs.store.pauses import batch_pause, read_pause
from batchjobs.store.records import Orders
from batchjobs.tables import batches, commands

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchjobs.types import Lease


class OrderPart(Part):
    def orders(self, worker: str, leases: Collection[Lease]) -> Orders:
        """What this worker shall do, with what it holds and by itself. See :class:`Orders`."""
        held = [lease.shard for lease in leases]
        batch_ids = sorted({shard.batch_id for shard in held})
        with self._database.reading() as connection:
            found = connection.execute(_CONCERNED, {"batches": batch_ids}).all() if batch_ids else []
            with_cancels = {row.id for row in found if row.has_cancels}
            return Orders(
                cancelled_batches=frozenset(row.id for row in found if row.cancel_requested_at is not None),
                cancelled_requests=frozenset(
                    read_cancelled_requests(connection, [shard for shard in held if shard.batch_id in with_cancels])
                ),
                paused_batches={
                    row.id: pause
                    for row in found
                    if row.cancel_requested_at is None and (pause := batch_pause(row)) is not None
                },
                pause=read_pause(connection, worker),
                commands=tuple(read_open(connection, worker)),
            )


# Not EXISTS: with statistics at hand, both databases would make a walk through all commands of it. The least one of a
# batch is the first entry of an index.
_HAS_CANCELS = (
    sa.select(sa.func.min(commands.c.index))
    .where(commands.c.kind == CANCEL_REQUEST, commands.c.batch_id == batches.c.id)
    .scalar_subquery()
    .is_not(None)
)
_CONCERNED = sa.select(
    *(batches.c[name] for name in ("id", "cancel_requested_at")),
    *(batches.c[name] for name in ("paused_at", "paused_by", "pause_reason", "pause_release")),
    _HAS_CANCELS.label("has_cancels"),
).where(
    batches.c.id.in_(sa.bindparam("batches", expanding=True)),
    sa.or_(batches.c.cancel_requested_at.is_not(None), batches.c.paused_at.is_not(None), _HAS_CANCELS),
)
