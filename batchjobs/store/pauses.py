"""Pauses: whose work shall stand still, who wished so, when and why.

They are rows, so they outlive whatever is restarted. A first pause stays as it is when somebody pauses once more; only
that what was running be given back may be asked for later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.store.bulk import insert_if_new
from batchjobs.store.conditions import IS_UNFINISHED
from batchjobs.store.locks import locked_batch
from batchjobs.store.part import Part, known, plain
from batchjobs.tables import batches, shards, worker_pauses
from batchjobs.types import Pause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.engine import Connection, Row

ALL_WORKERS = "*"
"""Stands where a worker's name does, for all of them, also those that start later."""


class PausePart(Part):
    def pause_batch(self, batch_id: str, *, by: str = "", reason: str | None = None, release: bool = False) -> bool:
        """No shard of the batch can be claimed until it is resumed. Leases that are held stay.

        Args:
            by: user@host.
            release: Workers give back what they hold of it. May be asked for later, too; the rest stays as it was.

        Returns:
            Whether it is paused now and was not before. A batch that has ended, or is cancelled, is left alone.

        Raises:
            NotFound: There is no such batch.
        """
        pause = {"paused_by": plain("the name", by), "pause_reason": plain("the reason", reason)}
        with self._database.writing() as connection:
            batch = locked_batch(connection, batch_id)
            if batch.cancel_requested_at is not None or _has_ended(connection, batch):
                return False
            change = sa.update(batches).where(batches.c.id == batch_id)
            if batch.paused_at is None:
                connection.execute(change.values(paused_at=database_instant(), pause_release=release, **pause))
            elif release:
                connection.execute(change.values(pause_release=True))
            return batch.paused_at is None

    def resume_batch(self, batch_id: str) -> bool:
        """Lifts the pause of a batch. Returns whether there was one.

        Raises:
            NotFound: There is no such batch.
        """
        with self._database.writing() as connection:
            batch = locked_batch(connection, batch_id)
            connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(NOT_PAUSED))
            return batch.paused_at is not None

    def pause_worker(self, worker: str | None, *, by: str, reason: str | None = None, release: bool = False) -> bool:
        """The worker of that name, running or not, makes no token until it is resumed. None: all workers, also those
        that start later.

        Args:
            by: user@host.
            release: It gives back what it holds. May be asked for later, too; the rest stays as it was.

        Returns:
            Whether this pause is new.
        """
        name = ALL_WORKERS if worker is None else plain("the worker's name", worker)
        row = {"worker": name, "paused_by": plain("the name", by), "reason": plain("the reason", reason)}
        with self._database.writing() as connection:
            new = insert_if_new(connection, worker_pauses).values(**row, paused_at=database_instant(), release=release)
            is_new = connection.execute(new.returning(worker_pauses.c.worker)).first() is not None
            if release and not is_new:
                connection.execute(sa.update(worker_pauses).where(worker_pauses.c.worker == name).values(release=True))
            return is_new

    def resume_worker(self, worker: str | None) -> list[str]:
        """Lifts the pause of one worker, ``*`` that of all; None lifts every pause of workers.

        Returns:
            What was lifted, by name. A worker stays paused as long as either its own or that of all is there.
        """
        lift = sa.delete(worker_pauses).returning(worker_pauses.c.worker)
        if worker is not None:
            lift = lift.where(worker_pauses.c.worker == known("worker", worker))
        with self._database.writing() as connection:
            return sorted(connection.execute(lift).scalars())

    def worker_pause(self, worker: str) -> Pause | None:
        """What holds for a worker: its own pause, or that of all."""
        with self._database.reading() as connection:
            return read_pause(connection, worker)

    def worker_pauses(self) -> dict[str, Pause]:
        """All pauses of workers by name, ``*`` for all workers."""
        with self._database.reading() as connection:
            return read_pauses(connection)


NOT_PAUSED: dict[str, Any] = {"paused_at": None, "paused_by": None, "pause_reason": None, "pause_release": False}
"""Of a batch."""


def batch_pause(row: Any) -> Pause | None:
    """Of a row with these columns of a batch."""
    if row.paused_at is None:
        return None
    return Pause(by=row.paused_by or "", at=row.paused_at, reason=row.pause_reason, release=row.pause_release)


def read_pauses(connection: Connection) -> dict[str, Pause]:
    return {row.worker: _pause(row) for row in connection.execute(_PAUSES)}


def read_pause(connection: Connection, worker: str) -> Pause | None:
    found = connection.execute(_PAUSES.where(worker_pauses.c.worker.in_([worker, ALL_WORKERS])))
    return pause_of(worker, {row.worker: _pause(row) for row in found})


def pause_of(worker: str, pauses: Mapping[str, Pause]) -> Pause | None:
    """What holds for this worker. One that gives back goes before one that does not, its own before that of all."""
    found = [pauses[name] for name in (worker, ALL_WORKERS) if name in pauses]
    return next((pause for pause in found if pause.release), found[0] if found else None)


def _pause(row: Row[Any]) -> Pause:
    return Pause(by=row.paused_by, at=row.paused_at, reason=row.reason, release=row.release)


def _has_ended(connection: Connection, batch: Row[Any]) -> bool:
    if batch.submitted_at is None:
        return False
    left = sa.select(shards.c.shard_no).where(shards.c.batch_id == batch.id, IS_UNFINISHED).limit(1)
    return connection.execute(left).first() is None


_PAUSES = sa.select(worker_pauses).order_by(worker_pauses.c.worker)
