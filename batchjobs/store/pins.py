"""Pins: requests that only one version of a model may answer.

A worker holds a shard as a whole, so all requests of a shard are for the same version, or for any. That is seen to when
the batch is opened, and costs nothing where no request is pinned: pinned ones have an index of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.store.conditions import in_range, runs
from batchjobs.store.splitting import LAST_NUMBER
from batchjobs.tables import requests, shards

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection


def pin_shards(connection: Connection, batch_id: str, shard_size: int) -> None:
    """For new shards of a locked batch. One whose requests all have the same pin gets it; refused lines do not count.
    Any other one that has a pinned request is replaced by one shard a request."""
    pins = connection.execute(_pins(shard_size), {"batch": batch_id}).all()
    if not pins:
        return
    accepted = {row.shard_no: row.accepted for row in connection.execute(_ACCEPTED, {"batch": batch_id})}
    of_one = {p.number: p.least for p in pins if p.least == p.greatest and p.requests == accepted[p.number]}
    if of_one:
        connection.execute(_PIN, [{"the_batch": batch_id, "the_shard": n, "pin": pin} for n, pin in of_one.items()])
    mixed = [(pin.number, pin.number) for pin in pins if pin.number not in of_one]
    number = connection.execute(LAST_NUMBER, {"batch": batch_id}).scalar_one() + 1
    for first, last in runs(mixed):
        inside = {"batch": batch_id, "first": first * shard_size, "last": (last + 1) * shard_size - 1}
        made = connection.execute(_SINGLES, {**inside, "number": number}, execution_options=_COUNTED).rowcount
        connection.execute(_DELETE, {"batch": batch_id, "first": first, "last": last})
        number += made


def _pins(shard_size: int) -> sa.Select[Any]:
    """How many requests of each shard are pinned, and to what. Shards are told by ``index``, which is in the index."""
    pin = requests.c.model_version
    return (
        sa.select(
            (requests.c.index // shard_size).label("number"),
            sa.func.count().label("requests"),
            sa.func.min(pin).label("least"),
            sa.func.max(pin).label("greatest"),
        )
        # Written out, because the index on pinned requests is only used for these very words.
        .where(requests.c.batch_id == sa.bindparam("batch"), sa.text("model_version IS NOT NULL"))
        .group_by(sa.text("number"))
        .order_by(sa.text("number"))
    )


_ACCEPTED = sa.select(shards.c.shard_no, (shards.c.requests - shards.c.failed).label("accepted")).where(
    shards.c.batch_id == sa.bindparam("batch")
)
_PIN = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("the_batch"), shards.c.shard_no == sa.bindparam("the_shard"))
    .values(model_version=sa.bindparam("pin"))
)
# Set by set and not shard by shard: nothing has ended yet but refused lines.
_IS_REFUSED = requests.c.rejected
_SINGLE: dict[str, Any] = {
    "batch_id": requests.c.batch_id,
    "shard_no": sa.bindparam("number", type_=sa.Integer) - 1 + sa.func.row_number().over(order_by=requests.c.index),
    "first_index": requests.c.index,
    "last_index": requests.c.index,
    "requests": sa.literal(1),
    "state": sa.case((_IS_REFUSED, "done"), else_="ready"),
    "failed": sa.case((_IS_REFUSED, 1), else_=0),
    "finished_at": sa.case((_IS_REFUSED, database_instant())),
    "model_version": requests.c.model_version,
}
_SINGLES = sa.insert(shards).from_select(list(_SINGLE), sa.select(*_SINGLE.values()).where(in_range(requests)))
_DELETE = sa.delete(shards).where(
    shards.c.batch_id == sa.bindparam("batch"),
    shards.c.shard_no.between(sa.bindparam("first"), sa.bindparam("last")),
)
_COUNTED = {"preserve_rowcount": True}
