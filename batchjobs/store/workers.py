"""Workers, their clocks, and the versions of the models they serve."""

from __future__ import annotations

import time
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant, database_seconds
from batchjobs.store.bulk import insert_if_new, upsert
from batchjobs.store.conditions import IS_UNFINISHED
from batchjobs.store.part import Part, known
from batchjobs.store.pauses import pause_of, read_pauses
from batchjobs.store.records import ModelVersion, WorkerFigures, WorkerInfo, WorkerRow
from batchjobs.tables import batches, model_versions, shards, workers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Pause

DEAD_SECONDS = 30.0
"""A worker that was silent for longer, twice the default lease, is taken to be dead."""

FORGOTTEN_SECONDS = 24 * 3600.0
"""Workers that ended or fell silent longer ago are not listed."""

_FRESH = asdict(WorkerFigures(state=""))


class WorkerPart(Part):
    def register_worker(self, worker: WorkerInfo) -> None:
        """Enters a worker that starts. One of that name that was there before is replaced, figures included."""
        fresh = _FRESH | asdict(worker)
        times = {"started_at": database_instant(), "heartbeat_at": database_seconds(), "stopped_at": None}
        with self._database.writing() as connection:
            connection.execute(upsert(connection, workers, fresh | times))

    def beat(self, worker_name: str, figures: WorkerFigures) -> bool:
        """Notes that the worker lives, and its figures. False if it is not registered."""
        values: dict[str, Any] = asdict(figures) | {"heartbeat_at": database_seconds()}
        return self._update(worker_name, values)

    def change_model(
        self, worker_name: str, *, model: str, model_version: str, dtype: str, serves: Collection[str]
    ) -> bool:
        """Notes that the worker serves another model from now on. False if it is not registered."""
        values = {"model": model, "model_version": model_version, "dtype": dtype, "serves": list(serves)}
        return self._update(worker_name, values)

    def retire_worker(self, worker_name: str, state: str) -> bool:
        """Notes that the worker has ended, and how: stopped, failed. False if it is not registered."""
        ended = {"state": state, "stopped_at": database_instant(), "running": 0, "waiting": 0, "kv_usage_ratio": 0.0}
        ended |= {"tokens_per_second": 0.0, "heartbeat_at": database_seconds()}
        return self._update(worker_name, ended)

    def _update(self, worker_name: str, values: Mapping[str, Any]) -> bool:
        with self._database.writing() as connection:
            update = sa.update(workers).where(workers.c.name == worker_name).values(**values)
            return connection.execute(update).rowcount > 0

    def workers(self) -> list[WorkerRow]:
        """The living workers by name, then the stopped and the dead, the newest end first.

        Dead is one that did not say that it stops and has been silent for ``DEAD_SECONDS`` by the clock of the
        database: its state is "dead" and its load 0, whatever it said last. Workers that ended or fell silent more
        than a day ago are left out.
        """
        age = database_seconds() - workers.c.heartbeat_at
        query = sa.select(workers, age.label("heartbeat_age_seconds")).where(age <= FORGOTTEN_SECONDS)
        with self._database.reading() as connection:
            found = connection.execute(query).all()
            pauses = read_pauses(connection)
        return sorted((_judged(_worker(row, pauses)) for row in found), key=_rank)

    def unserved(self, batch_id: str) -> list[tuple[str | None, str | None]]:
        """What workers have to serve to finish a batch: the model that it asks for and the version that requests are
        pinned to, once for each pair that stands in unfinished shards. None takes any."""
        with self._database.reading() as connection:
            rows = connection.execute(_WANTED, {"batch": known("batch", batch_id)})
            return sorted(((row.model, row.model_version) for row in rows), key=lambda pair: pair[1] or "")

    def clock_skew_seconds(self) -> float:
        """How far the clock of this host is ahead of the database's, in seconds; negative where it is behind.

        Right to half a round trip.
        """
        with self._database.reading() as connection:
            return min((_skew(connection) for _ in range(3)), key=lambda measured: measured[0])[1]

    def register_model_version(
        self, version: str, name: str, source: str, dtype: str, details: Mapping[str, Any]
    ) -> None:
        """Enters a model that a worker has loaded. The first entry of a version stays."""
        row = {"version": version, "name": name, "source": source, "dtype": dtype, "details": dict(details)}
        with self._database.writing() as connection:
            new = insert_if_new(connection, model_versions).values(**row, created_at=database_instant())
            connection.execute(new)

    def model_versions(self) -> list[ModelVersion]:
        """The models that have answered here, the newest first."""
        query = sa.select(model_versions).order_by(model_versions.c.created_at.desc(), model_versions.c.version)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [
            ModelVersion(**{field.name: getattr(row, field.name) for field in fields(ModelVersion)}) for row in rows
        ]


def _skew(connection: Connection) -> tuple[float, float]:
    """Seconds that the question took, and the difference of the clocks in the middle of it."""
    begun, before = time.perf_counter(), time.time()
    there = connection.execute(sa.select(database_seconds())).scalar_one()
    took = time.perf_counter() - begun
    return took, before + took / 2 - there


def _worker(row: Row[Any], pauses: Mapping[str, Pause]) -> WorkerRow:
    named = {field.name: getattr(row, field.name) for field in fields(WorkerRow) if field.name != "pause"}
    return WorkerRow(**named | {"serves": tuple(row.serves), "pause": pause_of(row.name, pauses)})


def _judged(row: WorkerRow) -> WorkerRow:
    if row.stopped_at is not None or row.heartbeat_age_seconds <= DEAD_SECONDS:
        return row
    return replace(row, state="dead", running=0, waiting=0, kv_usage_ratio=0.0, tokens_per_second=0.0)


def _rank(row: WorkerRow) -> tuple[bool, float, str]:
    return not row.is_alive, 0.0 if row.is_alive else row.heartbeat_age_seconds, row.name


_WANTED = (
    sa.select(batches.c.model, shards.c.model_version)
    .distinct()
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(shards.c.batch_id == sa.bindparam("batch"), IS_UNFINISHED)
)
