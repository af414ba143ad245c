"""Commands: orders to single workers that take their time and have an end.

Each is begun once, by the process that carries it out, and ended once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from ulid import ULID

from batchjobs.clock import database_instant
from batchjobs.store.part import Part, plain
from batchjobs.store.rows import storable
from batchjobs.tables import commands, workers
from batchjobs.types import Command, CommandKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy.engine import Connection, Row


class CommandPart(Part):
    def order(
        self, kind: CommandKind, workers: Sequence[str], *, arguments: Mapping[str, Any] | None = None, by: str
    ) -> list[Command]:
        """Gives one command to each of these workers, registered or not. ``by`` is user@host.

        Returns:
            The commands, in the order of the workers.
        """
        plain("the name", by)
        if not workers:
            return []
        with self._database.writing() as connection:
            now = connection.execute(sa.select(database_instant())).scalar_one()
            given = [_new(kind, name, dict(arguments or {}), by, now) for name in workers]
            connection.execute(sa.insert(commands), [_row(each) for each in given])
        return given

    def open_commands(self, worker: str) -> list[Command]:
        """Those of a worker that have not ended, the oldest first, also the one that it carries out right now."""
        with self._database.reading() as connection:
            return read_open(connection, worker)

    def commands(self, ids: Collection[str]) -> list[Command]:
        """These commands, the oldest first; unknown ids are passed over."""
        query = sa.select(commands).where(commands.c.id.in_(sorted(ids)), _HAS_WORKER).order_by(*_BY_AGE)
        with self._database.reading() as connection:
            return [_command(row) for row in connection.execute(query)] if ids else []

    def begin_command(self, command_id: str) -> bool:
        """Notes that its worker begins with it. False where that was noted before, or it has ended: hands off then."""
        begin = sa.update(commands).where(commands.c.id == command_id, _HAS_WORKER)
        begin = begin.where(commands.c.started_at.is_(None), commands.c.finished_at.is_(None))
        with self._database.writing() as connection:
            return connection.execute(begin.values(started_at=database_instant())).rowcount > 0

    def end_command(
        self, command_id: str, *, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> bool:
        """Notes what came of it: ``result``, or the ``error`` for which it was not carried out. False where it had
        ended before; then nothing changes."""
        end = sa.update(commands).where(commands.c.id == command_id, _HAS_WORKER, commands.c.finished_at.is_(None))
        came = {"result": sa.null() if result is None else dict(result), "error": error and storable(error)}
        with self._database.writing() as connection:
            return connection.execute(end.values(finished_at=database_instant(), **came)).rowcount > 0

    def settle_commands(self, worker: str, version: str) -> int:
        """For a worker that has just been registered: ends what an earlier process of that name cannot end any more.

        A command that was begun failed. A drain that is older than this start is fulfilled: that process has ended.

        Args:
            version: Of the model that the worker runs now.

        Returns:
            How many commands were ended.
        """
        lost = f"the worker ended while it carried this out; it runs version {version} now"
        with self._database.writing() as connection:
            drained = connection.execute(_END_DRAINS, {"name": worker}).rowcount
            return drained + connection.execute(_FAIL_BEGUN, {"name": worker, "lost": lost}).rowcount


def _new(kind: CommandKind, worker: str, arguments: Mapping[str, Any], by: str, now: datetime) -> Command:
    plain("the worker's name", worker)
    return Command(
        id=str(ULID()), kind=CommandKind(kind), worker=worker, arguments=arguments, given_by=by, created_at=now
    )


def _row(command: Command) -> dict[str, Any]:
    names = ("id", "worker", "arguments", "given_by", "created_at")
    return {"kind": command.kind.value} | {name: getattr(command, name) for name in names}


def read_open(connection: Connection, worker: str) -> list[Command]:
    return [_command(row) for row in connection.execute(_OPEN, {"name": worker})]


def _command(row: Row[Any]) -> Command:
    return Command(
        id=row.id,
        kind=CommandKind(row.kind),
        worker=row.worker,
        arguments=row.arguments or {},
        given_by=row.given_by or "",
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        result=row.result,
        error=row.error,
    )


# Written out, because the index on open commands is only used for these very words.
_HAS_WORKER = sa.text("worker IS NOT NULL")
_IS_OPEN = sa.and_(commands.c.worker == sa.bindparam("name"), _HAS_WORKER, sa.text("finished_at IS NULL"))
_BY_AGE = (commands.c.created_at, commands.c.id)  # by the clock of the database, and where it has too few digits
_OPEN = sa.select(commands).where(_IS_OPEN).order_by(*_BY_AGE)
_STARTED = sa.select(workers.c.started_at).where(workers.c.name == sa.bindparam("name")).scalar_subquery()
_END_DRAINS = (
    sa.update(commands)
    .where(_IS_OPEN, commands.c.kind == CommandKind.DRAIN.value, commands.c.created_at <= _STARTED)
    .values(finished_at=database_instant())
)
_FAIL_BEGUN = (
    sa.update(commands)
    .where(_IS_OPEN, commands.c.started_at.is_not(None))
    .values(finished_at=database_instant(), error=sa.bindparam("lost"))
)
