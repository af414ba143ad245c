"""What goes wrong and when: a list of faults, drawn from a seed.

Every kind comes about as often as its weight says; the order, the moments and the victims are random. The same seed
gives the same schedule, though not the same interleaving: processes are as fast as they are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done. Those of ``_DATABASE`` depend on the database."""

    KILL_WORKER = "SIGKILL of a worker"
    STOP_WORKER = "SIGSTOP of a worker past its lease"
    TERMINATE_WORKER = "SIGTERM of a worker"
    RESTART_REDIS = "SIGKILL and restart of Redis"
    FLUSH_REDIS = "FLUSHALL"
    CUT_REDIS = "connections to Redis cut"
    STALL_REDIS = "connections to Redis stalled"
    REDIS_AWAY = "Redis away for seconds"
    CUT_SQL = "connections to the database cut"
    STALL_SQL = "a worker's connections to the database stalled"
    CUT_COMMIT = "connection cut after COMMIT"
    SQL_AWAY = "database away for seconds"
    RESTART_SQL = "immediate restart of PostgreSQL"
    LOCK_SQLITE = "write lock of SQLite held for seconds"
    SUBMIT_TWICE = "a file submitted twice at once"
    KILL_SUBMIT = "SIGKILL of a submission, then again"
    CANCEL_BATCH = "cancellation of a batch"
    CANCEL_REQUESTS = "cancellation of single requests"


_EVERYWHERE = {
    Kind.KILL_WORKER: 12,
    Kind.STOP_WORKER: 6,
    Kind.TERMINATE_WORKER: 8,
    Kind.RESTART_REDIS: 6,
    Kind.FLUSH_REDIS: 6,
    Kind.CUT_REDIS: 6,
    Kind.STALL_REDIS: 3,
    Kind.REDIS_AWAY: 3,
    Kind.SUBMIT_TWICE: 4,
    Kind.KILL_SUBMIT: 4,
    Kind.CANCEL_BATCH: 3,
    Kind.CANCEL_REQUESTS: 6,
}
_DATABASE = {
    "postgresql": {
        Kind.CUT_SQL: 8,
        Kind.STALL_SQL: 4,
        Kind.CUT_COMMIT: 12,
        Kind.SQL_AWAY: 3,
        Kind.RESTART_SQL: 4,
    },
    "sqlite": {Kind.LOCK_SQLITE: 8},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``at_seconds`` is counted from the beginning of the run; ``lot`` chooses the victim, from 0 to 1; ``seconds`` is
    how long it lasts where it lasts."""

    at_seconds: float
    kind: Kind
    lot: float
    seconds: float


def draw(seed: int, faults: int, seconds: float, database: str, longest_seconds: float) -> list[Fault]:
    """That many faults spread over the time, in its middle nine tenths; every kind is among them when there are enough.

    Args:
        longest_seconds: Outages and stops last from half of this to all of it.
    """
    lots = random.Random(seed)
    weights = _EVERYWHERE | _DATABASE[database]
    kinds = list(weights)[:faults]
    kinds += lots.choices(list(weights), weights=list(weights.values()), k=faults - len(kinds))
    lots.shuffle(kinds)
    width = 0.9 * seconds / max(faults, 1)
    return [
        Fault(
            at_seconds=0.05 * seconds + (place + lots.random()) * width,
            kind=kind,
            lot=lots.random(),
            seconds=longest_seconds * lots.uniform(0.5, 1.0),
        )
        for place, kind in enumerate(kinds)
    ]
