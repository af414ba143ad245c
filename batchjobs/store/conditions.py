"""Conditions that several statements share, and a question that several ask.

Rows of one batch are found by a range of indexes between constants, never by a join or a list of indexes: PostgreSQL,
which has no statistics yet on a batch of the last minute, would take it for tiny and read all of it each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.tables import completions, shards

if TYPE_CHECKING:
    from collections.abc import Iterable

# Written out, because the index on unfinished shards is only used for these very words.
IS_UNFINISHED = sa.text("shards.state <> 'done'")
# Shards are named batch by batch: SQLite reads the whole table where (batch_id, shard_no) is looked up in a list.
IS_NAMED = sa.and_(
    shards.c.batch_id == sa.bindparam("batch"), shards.c.shard_no.in_(sa.bindparam("numbers", expanding=True))
)
OUTCOMES = shards.c.completed + shards.c.failed + shards.c.cancelled + shards.c.expired
"""How many of the shard's requests have one."""


def in_range(table: sa.Table) -> sa.ColumnElement[bool]:
    """The row is of ``batch`` and its index from ``first`` to ``last``, both included."""
    is_between = table.c.index.between(sa.bindparam("first"), sa.bindparam("last"))
    return sa.and_(table.c.batch_id == sa.bindparam("batch"), is_between)


_COUNTED = ("status", "prompt_tokens", "completion_tokens", "attempt", "finished_at")
ENDED = (
    sa.select(completions.c.index.label("index_"), *(completions.c[name] for name in _COUNTED))
    .where(in_range(completions))
    .order_by(completions.c.index, completions.c.choice)
)
"""What there is of requests that have ended: a row a choice, those of a request behind each other, without texts."""


def runs(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of indexes in order, those that touch joined into one: one lookup instead of many."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def free_at(seconds: Any) -> sa.ColumnElement[bool]:
    """Nobody holds the shard at that time: it is ready, or its lease ran out."""
    ran_out = sa.and_(shards.c.state == "leased", shards.c.lease_until <= seconds)
    return sa.or_(shards.c.state == "ready", ran_out)
