"""Outcomes: the one place where completions of running requests are written.

Whoever writes an outcome holds the lock on its shard's row. So what is there can be looked up before, the insert meets
no conflict, and the counts of the shard are exact. All of it is one transaction: running it again changes nothing.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.failpoints import reach
from batchjobs.store.bulk import insert_rows
from batchjobs.store.conditions import IS_NAMED, OUTCOMES, in_range
from batchjobs.store.locks import locked_shards, named
from batchjobs.store.part import Part
from batchjobs.store.partial import delete_ended
from batchjobs.store.records import Recorded
from batchjobs.store.rows import completion_row
from batchjobs.tables import completions, instant_text, shards
from batchjobs.types import Completion, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Lease, ShardId

Outcome: TypeAlias = tuple[Completion, tuple[Any, ...]]
"""A completion, and its row but for the instant when its batch was created."""


class OutcomePart(Part):
    def record(self, records: Sequence[tuple[Lease, Completion]]) -> Recorded:
        """Stores outcomes under leases, in one transaction.

        A lease that was lost since writes nothing. Outcomes that are there already are passed over, so after a commit
        of which nobody knows whether it came through, the same call may be made again, and returns the same. All the
        choices of a request belong into one call: a request of which there is anything has ended.

        Raises:
            ValueError: A completion is not of its lease's shard, or its request's first choice is missing.
        """
        given = {lease: _prepared(lease, outcomes) for lease, outcomes in _by_lease(records).items()}
        if not given:
            return Recorded(done=[], stale=[])
        with self._database.writing() as connection:
            held = locked_shards(connection, [lease.shard for lease in given])
            stale = [lease.shard for lease in given if not may_write(lease, held.get(lease.shard))]
            new = {
                lease.shard: _without_stored(connection, held[lease.shard], outcomes)
                for lease, outcomes in given.items()
                if may_write(lease, held.get(lease.shard))
            }
            insert_rows(connection, completions, _rows(new, held))
            delete_ended(connection, [held[shard] for shard, outcomes in new.items() if outcomes])
            _count(connection, new)
            done = _close_finished(connection, new, held)
            reach("inside_record")
        return Recorded(done=done, stale=stale)


def _by_lease(records: Sequence[tuple[Lease, Completion]]) -> dict[Lease, list[Completion]]:
    given: dict[Lease, list[Completion]] = {}
    for lease, run in groupby(records, key=itemgetter(0)):  # hashes a lease once a run, not once a record
        given.setdefault(lease, []).extend(completion for _, completion in run)
    return given


def may_write(lease: Lease, row: Row[Any] | None) -> bool:
    """A shard that is done under this very fence was finished by an earlier run of the same call."""
    return row is not None and row.fence == lease.fence and row.state in ("leased", "done")


def _prepared(lease: Lease, given: Sequence[Completion]) -> list[Outcome]:
    """In order, each once. All that takes time is done here, before anything is locked."""
    distinct = {(completion.index, completion.choice): completion for completion in reversed(given)}
    for index, choice in distinct:
        if choice and (index, 0) not in distinct:
            raise ValueError(f"choice {choice} of request {index} came without the first one")
    return [(distinct[key], completion_row(lease.shard.batch_id, distinct[key], "")) for key in sorted(distinct)]


def _without_stored(connection: Connection, row: Row[Any], given: Sequence[Outcome]) -> list[Outcome]:
    """Exact, because every writer of these rows needs the lock on the shard that we hold."""
    for completion, _ in (given[0], given[-1]):
        if not row.first_index <= completion.index <= row.last_index:
            raise ValueError(f"request {completion.index} does not belong to shard {row.batch_id}-{row.shard_no}")
    stored = stored_indexes(connection, row)
    return [each for each in given if each[0].index not in stored] if stored else list(given)


def stored_indexes(connection: Connection, row: Row[Any]) -> set[int]:
    """The requests of a locked shard that have their outcome."""
    if not row.completed + row.failed + row.cancelled + row.expired:
        return set()
    inside = {"batch": row.batch_id, "first": row.first_index, "last": row.last_index}
    return set(connection.execute(_STORED, inside).scalars())


def _rows(new: Mapping[ShardId, Sequence[Outcome]], held: Mapping[ShardId, Row[Any]]) -> list[tuple[Any, ...]]:
    """With what only the locked row of the shard knows."""
    rows = []
    for shard, outcomes in new.items():
        created_at = (instant_text(held[shard].created_at),)
        rows += [row[:_CREATED_AT] + created_at + row[_CREATED_AT + 1 :] for _, row in outcomes]
    return rows


def _count(connection: Connection, new: Mapping[ShardId, Sequence[Outcome]]) -> None:
    changes = [
        {"the_batch": shard.batch_id, "the_shard": shard.shard_no, **_counts([outcome for outcome, _ in outcomes])}
        for shard, outcomes in new.items()
        if outcomes
    ]
    if changes:
        connection.execute(_ADD, changes)


def _counts(outcomes: Sequence[Completion]) -> dict[str, int]:
    """A request counts once, in the state of its worst choice; the tokens of all choices were generated."""
    first = [outcome for outcome in outcomes if outcome.choice == 0]
    if len(first) == len(outcomes):
        statuses = Counter([outcome.status for outcome in first])
    else:
        choices = groupby(outcomes, key=attrgetter("index"))  # they are in order
        statuses = Counter([RequestStatus.of_choices(each.status for each in of_one) for _, of_one in choices])
    counts = {f"more_{status}": statuses[status] for status in RequestStatus}
    counts["more_prompt_tokens"] = sum([outcome.prompt_tokens for outcome in first])
    counts["more_completion_tokens"] = sum([len(outcome.token_ids) for outcome in outcomes])
    return counts


def _close_finished(connection: Connection, new: Iterable[ShardId], held: Mapping[ShardId, Row[Any]]) -> list[ShardId]:
    """Those of the shards that have all their outcomes now, or had them before."""
    closed = {
        (parameters["batch"], row.shard_no)
        for parameters in named(shard for shard in new if held[shard].state == "leased")
        for row in connection.execute(_CLOSE, parameters)
    }
    return [s for s in new if held[s].state == "done" or (s.batch_id, s.shard_no) in closed]


_CREATED_AT = [column.name for column in completions.columns].index("created_at")
_COUNTED = ("completed", "failed", "cancelled", "expired", "prompt_tokens", "completion_tokens")
_STORED = sa.select(completions.c.index).where(in_range(completions), completions.c.choice == 0)
_ADD = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("the_batch"), shards.c.shard_no == sa.bindparam("the_shard"))
    .values({name: shards.c[name] + sa.bindparam(f"more_{name}") for name in _COUNTED})
)
_CLOSE = (
    sa.update(shards)
    .where(IS_NAMED, shards.c.state == "leased", shards.c.requests == OUTCOMES)
    .values(state="done", finished_at=database_instant())
    .returning(shards.c.shard_no)
)
