"""What the store hands out and takes in, beside the types of :mod:`batchjobs.types`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from batchjobs.types import Command, Completion, Pause, Request, RequestError, ShardId


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
    """What a worker says of itself when it starts, and again when its model changes. ``serves`` are the names of models
    that batches may ask it for."""

    name: str
    host: str
    pid: int
    device: str
    dtype: str
    model: str
    model_version: str
    state: str = "starting"
    serves: tuple[str, ...] = ()


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

    ``state`` is what the worker said last, or "dead" if it fell silent without saying that it stops. ``serves`` are the
    names of models that batches may ask it for. ``pause`` is its own, or that of all workers.
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
    serves: tuple[str, ...] = ()
    pause: Pause | None = None

    @property
    def is_alive(self) -> bool:
        return self.stopped_at is None and self.state != "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A model that has answered here, as the first worker that loaded it described it."""

    version: str
    name: str
    source: str
    dtype: str
    details: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a worker shall do, of all that it holds: see :meth:`Store.orders`.

    ``cancelled_requests`` are (batch id, index). ``paused_batches`` are those that it holds some of, by id; none of
    them is cancelled. ``pause`` is the worker's own, or that of all workers. ``commands`` are those that have not
    ended, the oldest first, also one that it carries out right now.
    """

    cancelled_batches: frozenset[str] = frozenset()
    cancelled_requests: frozenset[tuple[str, int]] = frozenset()
    paused_batches: Mapping[str, Pause] = field(default_factory=dict)
    pause: Pause | None = None
    commands: tuple[Command, ...] = ()
