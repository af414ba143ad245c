"""How far batches are. Counts are sums over shards, which carry them; completions are not looked at."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.errors import NotFound
from batchjobs.store.part import Part, known, plain
from batchjobs.store.pauses import batch_pause
from batchjobs.store.rows import is_storable
from batchjobs.tables import batch_progress, batches, completions
from batchjobs.types import BatchInfo, BatchStatus, Counts, Priority, RequestStatus, TokenCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Row


class ProgressPart(Part):
    def batch(self, batch_id: str) -> BatchInfo:
        with self._database.reading() as connection:
            found = read_progress(connection, [known("batch", batch_id)])
        if not found:
            raise NotFound(f"no batch {batch_id!r}")
        return found[0]

    def batch_by_key(self, key: str) -> BatchInfo | None:
        with self._database.reading() as connection:
            query = sa.select(batches.c.id).where(batches.c.key == plain("the key", key))
            found = read_progress(connection, connection.execute(query).scalars().all())
        return found[0] if found else None

    def batches(
        self,
        limit: int = 50,
        *,
        name: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[BatchInfo]:
        """The newest batches, the newest first.

        Args:
            name: Only those with exactly this name.
            since: Only those that were created at this instant or later; ``until`` is where they end, itself excluded.
                An instant without a zone is in UTC.
        """
        if name is not None and not is_storable(name):
            return []
        newest = sa.select(batches.c.id).order_by(batches.c.id.desc()).limit(limit)
        if name is not None:
            newest = newest.where(batches.c.name == name)
        if since is not None:
            newest = newest.where(batches.c.created_at >= _aware(since))
        if until is not None:
            newest = newest.where(batches.c.created_at < _aware(until))
        with self._database.reading() as connection:
            return read_progress(connection, connection.execute(newest).scalars().all())

    def failures(self, batch_id: str) -> dict[str, int]:
        """How many requests failed for each reason, by the error code of their first failed choice, the most frequent
        reason first."""
        with self._database.reading() as connection:
            rows = connection.execute(_FAILURES, {"batch": known("batch", batch_id)})
            return {row.code: row.requests for row in rows}


def read_progress(connection: Connection, batch_ids: Sequence[str]) -> list[BatchInfo]:
    """The newest first."""
    view = batch_progress.c
    query = sa.select(batch_progress).where(view.batch_id.in_(batch_ids)).order_by(view.batch_id.desc())
    return [_info(row) for row in connection.execute(query)] if batch_ids else []


def _aware(instant: datetime) -> datetime:
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


def _info(row: Row[Any]) -> BatchInfo:
    status = BatchStatus(row.status)
    pause = None if status.is_final else batch_pause(row)  # which only matters if it is retried
    return BatchInfo(
        id=row.batch_id,
        name=row.name,
        key=row.key,
        model=row.model,
        queue=Priority(row.queue),
        status=status,
        paused=pause is not None,
        pause=pause,
        counts=Counts(**{field.name: getattr(row, field.name) for field in fields(Counts)}),
        tokens=TokenCounts(
            prompt=row.prompt_tokens, completion=row.completion_tokens, in_progress=row.tokens_in_progress
        ),
        shard_size=row.shard_size,
        created_at=row.created_at,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


_OTHER = completions.alias("other")
# A request counts with its first failed choice, and only where that decides its state. Counted row by row, by the
# primary key: as an anti-join it might become a walk through all of the table.
_DECIDING_OTHERS = (
    sa.select(sa.func.count())
    .where(_OTHER.c.batch_id == completions.c.batch_id, _OTHER.c.index == completions.c.index)
    .where(
        sa.or_(
            _OTHER.c.status.in_([RequestStatus.CANCELLED.value, RequestStatus.EXPIRED.value]),
            sa.and_(_OTHER.c.status == RequestStatus.FAILED.value, _OTHER.c.choice < completions.c.choice),
        )
    )
    .correlate(completions)
    .scalar_subquery()
)
_CODE = sa.func.coalesce(completions.c.error["code"].as_string(), "unknown").label("code")
_REQUESTS = sa.func.count().label("requests")
_FAILURES = (
    sa.select(_CODE, _REQUESTS)
    # Written out, because the index on failed rows is only used for these very words.
    .where(completions.c.batch_id == sa.bindparam("batch"), sa.text("completions.status = 'failed'"))
    .where(_DECIDING_OTHERS == 0)
    .group_by(_CODE)
    .order_by(_REQUESTS.desc(), _CODE)
)
