"""What the store hands out and takes in, beside the types of :mod:`batchjobs.types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from batchjobs.types import Completion, Request, RequestError, ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A request and what became of it.

    ``state`` is queued, running, completed, failed, cancelled or expired: in the last four that of its worst choice.
    ``choices`` are in order, and none before the end; a request that never began has one at most. ``created_at`` is
    when the submission of the batch began.
    """

    batch_id: str
    request: Request
    state: str
    choices: tuple[Completion, ...]
    created_at: datetime

    @property
    def completion(self) -> Completion | None:
        """The first choice, once the request has ended."""
        return self.choices[0] if self.choices else None

    @property
    def error(self) -> RequestError | None:
        """That of the choice to which the request owes its state."""
        return next((choice.error for choice in self.choices if choice.status == self.state), None)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What :meth:`Store.record` found: ``done`` shards have all their outcomes; for ``stale`` ones none was written."""

    done: list[ShardId]
    stale: list[ShardId]


@dataclass(frozen=True, slots=True)
class Isolated:
    """What :meth:`Store.isolate` did: shards replaced by one a request, and single requests that were given up. Of
    those ``refused`` the database did not take the change; each says which and why."""

    split: int = 0
    failed: int = 0
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """What :meth:`Store.retry_failed` did: ``requests`` run again. ``refused`` lines are left, because they can never
    run, and ``held`` ones, because a worker holds their shard right now."""

    requests: int = 0
    refused: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself when it starts, and again when its model changes."""

    name: str
    host: str
    pid: int
    device: str
    dtype: str
    model: str
    model_version: str
    state: str = "starting"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """What a worker says with each heartbeat. Token counts and preemptions are totals since its start."""

    state: str
    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker as ``batchjobs workers`` shows it. The age of its heartbeat is by the clock of the database.

    ``state`` is what the worker said last, or "dead" if it fell silent without saying that it stops.
    """

    name: str
    host: str
    pid: int
    device: str
    dtype: str
    model: str
    model_version: str
    state: str
    running: int
    waiting: int
    kv_usage_ratio: float
    tokens_per_second: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    started_at: datetime
    stopped_at: datetime | None
    heartbeat_age_seconds: float

    @property
    def is_alive(self) -> bool:
        return self.stopped_at is None and self.state != "dead"
