"""Batches: how one comes in.

A batch is loading until it is opened: its requests arrive in any number of calls, each of which may be run again. The
opening makes the shards, and only then is there anything to claim.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from ulid import ULID

from batchjobs.clock import database_instant
from batchjobs.database import json_text
from batchjobs.errors import KeyConflict, NotFound, UsageError
from batchjobs.store.bulk import ConflictError, insert_if_new, insert_rows
from batchjobs.store.cancelling import close_free_shards
from batchjobs.store.errors import DuplicateCustomId
from batchjobs.store.locks import locked_batch
from batchjobs.store.part import Part, plain
from batchjobs.store.pins import pin_shards
from batchjobs.store.rows import completion_row, refused_completion, refused_request, request_row
from batchjobs.tables import batches, completions, instant_text, requests, shards

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection

    from batchjobs.errors import LineError
    from batchjobs.types import Priority, Request

_DISCARD_CHUNK = 20_000
_MANY_SHARDS = 100
"""From here on PostgreSQL is told of new shards at once: it would read all of them to find the few that are claimed."""
_SHARDS_AT_ONCE = 1000
_LOOKED_UP_AT_ONCE = 10_000
"""Fewer than SQLite's limit of parameters."""


class BatchPart(Part):
    def create_batch(
        self,
        *,
        name: str | None,
        key: str | None,
        fingerprint: str,
        model: str | None,
        queue: Priority,
        shard_size: int,
        source: str | None,
        defaults: Mapping[str, Any],
    ) -> tuple[str, bool]:
        """Makes a batch that is loading, or finds the one that was made with this key.

        Returns:
            The id of the batch, and whether it was made by this call. One that was not made may still be loading: then
            adding its requests and opening it again finishes what an interrupted submission began.

        Raises:
            KeyConflict: The key was used for other content (another ``fingerprint``).
        """
        batch_id = str(ULID())
        row = {
            "id": batch_id,
            "name": plain("the name", name),
            "key": plain("the key", key),
            "fingerprint": fingerprint,
            "model": plain("the model", model),
            "queue": queue.value,
            "shard_size": shard_size,
            "source": plain("the source", source),
            "defaults": _storable_json(defaults),
            "created_at": database_instant(),
            "loaded_at": database_instant(),
        }
        found = None
        while found is None:  # a second time only where the other batch of this key is discarded at this very moment
            with self._database.writing() as connection:
                if connection.execute(insert_if_new(connection, batches).values(row).returning(batches.c.id)).first():
                    return batch_id, True
                same_key = sa.update(batches).where(batches.c.key == key).values(loaded_at=database_instant())
                returned = same_key.returning(batches.c.id, batches.c.fingerprint)  # somebody is at it: not abandoned
                found = connection.execute(returned).one_or_none()
        if found.fingerprint != fingerprint:
            raise KeyConflict(
                f"the key {key!r} was used for batch {found.id}, whose content is different; choose another key,"
                " or submit the same file with the same parameters"
            )
        return found.id, False

    def add_requests(
        self, batch_id: str, requests: Sequence[Request], rejected: Mapping[int, LineError] | None = None
    ) -> None:
        """Stores requests of a batch that is loading; those already there, by index, are passed over.

        Args:
            rejected: Refused lines by index. Each becomes a request that has failed already, with the content of the
                request of that index where ``requests`` has one. Its custom_id may be in use.

        Raises:
            DuplicateCustomId: See there; the other requests were stored.
            UsageError: A request cannot be stored; none was.
        """
        refused = rejected or {}
        try:
            self._add(batch_id, requests, refused, leaving_out=frozenset())
        except ConflictError:
            pairs = self._duplicates(batch_id, [r for r in requests if r.index not in refused])
            self._add(batch_id, requests, refused, leaving_out=frozenset(index for _, index, _ in pairs))
            if pairs:  # none where the other half of a double submission stored the same rows meanwhile
                raise DuplicateCustomId(pairs) from None

    def _add(
        self, batch_id: str, given: Sequence[Request], refused: Mapping[int, LineError], leaving_out: frozenset[int]
    ) -> None:
        indexes = {request.index for request in given}
        lines = [refused_request(index, error) for index, error in refused.items() if index not in indexes]
        chosen = {request.index: request for request in (*given, *lines) if request.index not in leaving_out}
        with self._database.writing() as connection:
            batch = locked_batch(connection, batch_id)
            if batch.submitted_at is not None:
                return  # the same content is there, and complete
            connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(loaded_at=database_instant()))
            new = sorted(chosen.keys() - _stored(connection, batch_id, chosen.keys()))
            rows = [request_row(batch_id, chosen[i], batch.shard_size, rejected=i in refused) for i in new]
            insert_rows(connection, requests, rows)
            created_at = instant_text(batch.created_at)
            errors = [refused_completion(i, refused[i]) for i in new if i in refused]
            insert_rows(connection, completions, [completion_row(batch_id, each, created_at) for each in errors])

    def _duplicates(self, batch_id: str, given: Sequence[Request]) -> list[tuple[str, int, int]]:
        """(custom_id, later index, first index) among these requests and the accepted ones of the batch."""
        wanted = sorted({request.custom_id for request in given})
        first: dict[str, int] = {}
        with self._database.reading() as connection:
            for start in range(0, len(wanted), _LOOKED_UP_AT_ONCE):
                parameters = {"batch": batch_id, "custom_ids": wanted[start : start + _LOOKED_UP_AT_ONCE]}
                first |= {row.custom_id: row.index_ for row in connection.execute(_USED_IDS, parameters)}
        pairs = []
        for request in sorted(given, key=lambda each: each.index):
            index = first.setdefault(request.custom_id, request.index)
            if index != request.index:
                pairs.append((request.custom_id, request.index, index))
        return pairs

    def open_batch(self, batch_id: str) -> int:
        """Makes the shards of a batch, so that workers can claim them. Doing so again changes nothing.

        Returns:
            The number of shards.
        """
        with self._database.writing() as connection:
            batch = locked_batch(connection, batch_id)
            if batch.submitted_at is None:
                _create_shards(connection, batch_id, batch.shard_size)
                pin_shards(connection, batch_id, batch.shard_size)
                opened = sa.update(batches).where(batches.c.id == batch_id).values(submitted_at=database_instant())
                connection.execute(opened)
                if batch.cancel_requested_at is not None:
                    close_free_shards(connection, batch_id)
            query = sa.select(sa.func.count()).select_from(shards).where(shards.c.batch_id == batch_id)
            count = connection.execute(query).scalar_one()
        if count >= _MANY_SHARDS and not self._database.is_sqlite:
            with self._database.writing() as connection:
                connection.exec_driver_sql("ANALYZE shards")
        return count

    def discard_batch(self, batch_id: str) -> None:
        """Deletes a batch that was never opened, a chunk of requests in each transaction.

        Raises:
            UsageError: The batch was opened.
        """
        if not self._discard(batch_id, None):
            raise UsageError(f"batch {batch_id} was submitted; cancel it instead")

    def discard_abandoned(self, idle_seconds: float) -> int:
        """Discards batches that are still loading and whose last requests arrived longer ago: submissions that were cut
        and that nobody ran again.

        Returns:
            The number of batches.
        """
        with self._database.reading() as connection:
            now = connection.execute(sa.select(database_instant())).scalar_one()
            before = now - timedelta(seconds=idle_seconds)
            idle = sa.select(batches.c.id).where(batches.c.submitted_at.is_(None), batches.c.loaded_at < before)
            found = connection.execute(idle.where(batches.c.created_at < before)).scalars().all()
        return sum(self._discard_if_idle(batch_id, before) for batch_id in found)

    def _discard_if_idle(self, batch_id: str, before: datetime) -> bool:
        try:
            return self._discard(batch_id, before)
        except NotFound:  # somebody else was faster
            return False

    def _discard(self, batch_id: str, idle_since: datetime | None) -> bool:
        """Whether all of it is gone. It ends as soon as the batch is opened, or has got requests after ``idle_since``:
        whoever adds them again begins at the first one, so what was deleted before comes back."""
        while True:
            with self._database.writing() as connection:
                batch = locked_batch(connection, batch_id)
                if batch.submitted_at is not None or (idle_since is not None and batch.loaded_at >= idle_since):
                    return False
                if not _delete_some(connection, batch_id):
                    connection.execute(sa.delete(batches).where(batches.c.id == batch_id))
                    return True


def _storable_json(defaults: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json_text(dict(defaults))
    except TypeError as error:
        raise UsageError(f"the defaults of the batch cannot be stored as JSON: {error}") from error
    return dict(defaults)


def _stored(connection: Connection, batch_id: str, indexes: Collection[int]) -> set[int]:
    if not indexes:
        return set()
    query = sa.select(requests.c.index).where(
        requests.c.batch_id == batch_id, requests.c.index.between(min(indexes), max(indexes))
    )
    return set(connection.execute(query).scalars())


def _create_shards(connection: Connection, batch_id: str, shard_size: int) -> None:
    # By the index alone, not by the column shard_no: both databases then read an index instead of all the prompts.
    index = requests.c.index
    in_batch = requests.c.batch_id == batch_id
    number = (index // shard_size).label("number")
    slices = (
        sa.select(
            requests.c.batch_id, number, sa.func.min(index), sa.func.max(index), sa.func.count(), sa.literal("ready")
        )
        .where(in_batch, index.between(sa.bindparam("from"), sa.bindparam("to")))
        .group_by(requests.c.batch_id, sa.text("number"))
    )
    columns = ["batch_id", "shard_no", "first_index", "last_index", "requests", "state"]
    insert = sa.insert(shards).from_select(columns, slices)
    last = connection.execute(sa.select(sa.func.max(index)).where(in_batch)).scalar()
    step = shard_size * _SHARDS_AT_ONCE
    for start in range(0, (last or 0) + 1, step):  # SQLite sorts what it groups in memory
        connection.execute(insert, {"from": start, "to": start + step - 1})
    _count_refused(connection, batch_id, shard_size)


def _count_refused(connection: Connection, batch_id: str, shard_size: int) -> None:
    number = (completions.c.index // shard_size).label("number")
    query = sa.select(number, sa.func.count().label("refused")).where(completions.c.batch_id == batch_id)
    counts = connection.execute(query.group_by(sa.text("number"))).all()
    if not counts:
        return
    is_done = shards.c.requests == sa.bindparam("refused")
    update = (
        sa.update(shards)
        .where(shards.c.batch_id == batch_id, shards.c.shard_no == sa.bindparam("number"))
        .values(
            failed=sa.bindparam("refused"),
            state=sa.case((is_done, "done"), else_="ready"),
            finished_at=sa.case((is_done, database_instant())),
        )
    )
    connection.execute(update, [{"number": row.number, "refused": row.refused} for row in counts])


def _delete_some(connection: Connection, batch_id: str) -> bool:
    """Whether there was anything to delete."""
    index = requests.c.index
    chunk = sa.select(index).where(requests.c.batch_id == batch_id).order_by(index).limit(_DISCARD_CHUNK).subquery()
    last = connection.execute(sa.select(sa.func.max(chunk.c.index))).scalar()
    if last is None:
        return False
    for table in (completions, requests):
        connection.execute(sa.delete(table).where(table.c.batch_id == batch_id, table.c.index <= last))
    return True


_USED_IDS = sa.select(requests.c.custom_id, requests.c.index.label("index_")).where(
    requests.c.batch_id == sa.bindparam("batch"),
    sa.text("NOT rejected"),
    requests.c.custom_id.in_(sa.bindparam("custom_ids", expanding=True)),
)
