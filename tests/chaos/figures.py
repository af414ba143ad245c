"""What a run showed, in numbers: from the notes of the database."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.chaos.audit import rows_of

if TYPE_CHECKING:
    from types import SimpleNamespace

    from batchjobs.database import Database


def longest_gap(database: Database) -> float:
    """The longest time, in seconds, in which no outcome was stored, between the first one and the last."""
    times = [row.at_seconds for row in rows_of(database, "SELECT at_seconds FROM chaos_rows ORDER BY at_seconds")]
    return max((float(after - before) for before, after in pairwise(times)), default=0.0)


def recoveries(database: Database, kills: Sequence[tuple[str, float]]) -> list[float]:
    """For each SIGKILL of a worker that held shards: seconds until all of them were leased anew, or closed.
    Those that were split meanwhile are left out."""
    query = "SELECT * FROM chaos_shards WHERE action = 'update' ORDER BY id"
    changes: dict[tuple[str, int], list[SimpleNamespace]] = {}
    for row in rows_of(database, query):
        changes.setdefault((row.batch_id, row.shard_no), []).append(row)
    taken = []
    for worker, killed_at in kills:
        times = [at for each in changes.values() if (at := _taken_over(each, worker, killed_at)) is not None]
        if times:
            taken.append(max(times) - killed_at)
    return taken


def _taken_over(changes: Sequence[SimpleNamespace], worker: str, killed_at: float) -> float | None:
    """When somebody else got the shard; None if that worker did not hold it."""
    place = bisect.bisect_right([change.at_seconds for change in changes], killed_at)
    if not place or (changes[place - 1].new_owner, changes[place - 1].new_state) != (worker, "leased"):
        return None
    fence = changes[place - 1].new_fence
    return next((float(change.at_seconds) for change in changes[place:] if change.new_fence > fence), None)


def splits(database: Database) -> int:
    """Shards that were replaced by one a request."""
    return int(rows_of(database, "SELECT count(*) AS shards FROM chaos_shards WHERE action = 'delete'")[0].shards)


def continued(database: Database) -> int:
    """Answers that were begun before the worker that finished them got their shard."""
    query = """SELECT c.started_at, s.at_seconds FROM chaos_rows n
      JOIN chaos_shards s ON s.batch_id = n.batch_id AND s.shard_no = n.shard_no AND s.new_fence = n.fence
        AND s.new_state = 'leased'
      JOIN completions c ON c.batch_id = n.batch_id AND c."index" = n."index" AND c.choice = n.choice
      WHERE n.action = 'insert' AND c.status = 'completed'"""
    return sum(_instant(row.started_at).timestamp() < row.at_seconds for row in rows_of(database, query))


def _instant(stored: datetime | str) -> datetime:
    """SQLite gives the text."""
    return datetime.fromisoformat(stored) if isinstance(stored, str) else stored


def tokens(database: Database) -> tuple[int, int]:
    """(stored, generated). Of a killed worker the generated ones are known up to its last heartbeat."""
    stored = rows_of(database, "SELECT coalesce(sum(completion_tokens), 0) AS tokens FROM completions")[0].tokens
    generated = rows_of(database, "SELECT coalesce(sum(generated_tokens), 0) AS tokens FROM workers")[0].tokens
    return int(stored), int(generated)


def spread(seconds: Sequence[float]) -> str:
    """Median and largest."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s, of {len(ordered)}"
