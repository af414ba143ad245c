"""Workers and the versions of the models they serve."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant, database_seconds
from batchjobs.store.bulk import insert_if_new, upsert
from batchjobs.store.part import Part
from batchjobs.store.records import WorkerFigures, WorkerInfo, WorkerRow
from batchjobs.tables import model_versions, workers

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def change_model(self, worker_name: str, *, model: str, model_version: str, dtype: str) -> bool:
        """Notes that the worker serves another model from now on. False if it is not registered."""
        return self._update(worker_name, {"model": model, "model_version": model_version, "dtype": dtype})

    def retire_worker(self, worker_name: str, state: str) -> bool:
        """Notes that the worker has ended, and how: stopped, failed. False if it is not registered."""
        ended = {"state": state, "stopped_at": database_instant(), "running": 0, "waiting": 0, "kv_usage_ratio": 0.0}
        return self._update(worker_name, ended | {"tokens_per_second": 0.0})

    def _update(self, worker_name: str, values: Mapping[str, Any]) -> bool:
        with self._database.writing() as connection:
            update = sa.update(workers).where(workers.c.name == worker_name).values(**values)
            return connection.execute(update).rowcount > 0

    def workers(self) -> list[WorkerRow]:
        """All workers, living ones first, by name."""
        age = (database_seconds() - workers.c.heartbeat_at).label("heartbeat_age_seconds")
        query = sa.select(workers, age).order_by(workers.c.stopped_at.is_not(None), workers.c.name)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [WorkerRow(**{field.name: getattr(row, field.name) for field in fields(WorkerRow)}) for row in rows]

    def register_model_version(
        self, version: str, name: str, source: str, dtype: str, details: Mapping[str, Any]
    ) -> None:
        """Enters a model that a worker has loaded. The first entry of a version stays."""
        row = {"version": version, "name": name, "source": source, "dtype": dtype, "details": dict(details)}
        with self._database.writing() as connection:
            known = insert_if_new(connection, model_versions).values(**row, created_at=database_instant())
            connection.execute(known)
