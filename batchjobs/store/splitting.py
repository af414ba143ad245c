"""Splitting: a shard of several requests is replaced by one for each of its requests.

Every request is in exactly one shard at any time, refused lines too: the old row goes and the new ones come in one
transaction, whose caller holds the lock on the batch's row, as everybody does who gives numbers to new shards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.store.bulk import insert_rows
from batchjobs.store.conditions import ENDED, IS_NAMED, in_range
from batchjobs.tables import instant_text, requests, shards
from batchjobs.types import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection, Row


def split(connection: Connection, batch_id: str, rows: Sequence[Row[Any]]) -> None:
    """Replaces these shards of a batch, which are locked, with all their columns, by number. What they carry, the pin
    too, goes to each of the new ones."""
    if not rows:
        return
    number = connection.execute(LAST_NUMBER, {"batch": batch_id}).scalar_one() + 1
    now = connection.execute(sa.select(database_instant())).scalar_one()
    new: list[tuple[Any, ...]] = []
    for row in rows:
        singles = _singles(connection, row, number + len(new), now)
        new += [tuple(single[column.name] for column in shards.columns) for single in singles]
    connection.execute(_DELETE, {"batch": batch_id, "numbers": [row.shard_no for row in rows]})
    insert_rows(connection, shards, new)


def _singles(connection: Connection, row: Row[Any], number: int, now: datetime) -> list[dict[str, Any]]:
    """One shard for each request of a locked one, numbered from ``number``, as rows."""
    inside = {"batch": row.batch_id, "first": row.first_index, "last": row.last_index}
    ended: Sequence[Any] = connection.execute(ENDED, inside).all()
    outcomes: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    for outcome in ended:
        outcomes[outcome.index_].append(outcome)
    indexes = connection.execute(_INDEXES, inside).scalars().all()
    carried = {**row._mapping, "lease_until": 0.0, "started_at": row.started_at and instant_text(row.started_at)}
    return [
        {**carried, "shard_no": number + place, "first_index": index, "last_index": index, "requests": 1}
        | _counts(outcomes[index], now)
        for place, index in enumerate(indexes)
    ]


def _counts(choices: Sequence[Row[Any]], now: datetime) -> dict[str, Any]:
    """State and counts of a shard of one request with these outcomes, as :meth:`Store.record` counts them."""
    counts: dict[str, Any] = {status.value: 0 for status in RequestStatus}
    if not choices:
        return counts | {"state": "ready", "prompt_tokens": 0, "completion_tokens": 0, "finished_at": None}
    counts[RequestStatus.of_choices(RequestStatus(choice.status) for choice in choices).value] = 1
    tokens = {
        "prompt_tokens": choices[0].prompt_tokens,
        "completion_tokens": sum(choice.completion_tokens for choice in choices),
    }
    return counts | tokens | {"state": "done", "finished_at": instant_text(choices[0].finished_at or now)}


LAST_NUMBER = sa.select(sa.func.max(shards.c.shard_no)).where(shards.c.batch_id == sa.bindparam("batch"))
"""New shards of a batch are numbered behind it."""
_INDEXES = sa.select(requests.c.index).where(in_range(requests)).order_by(requests.c.index)
_DELETE = sa.delete(shards).where(IS_NAMED)
