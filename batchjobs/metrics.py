"""Metrics of queue and store for Prometheus: what is left to do, who works on it, and whether the services answer.

Kept true here:
- A scrape never fails and never waits long. A service that does not answer is down, and its other figures are left
  out rather than guessed.
- Each service is asked once in a few seconds at most, however many scrapes come.
- Nothing is changed: no table is made or upgraded, and no private Redis server is started or kept alive.

docs/metrics.md says what each metric means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from redis.exceptions import ResponseError

from batchjobs.database import parse_url
from batchjobs.embedded import socket_path_for
from batchjobs.errors import ConnectionFailed
from batchjobs.queue import JobQueue
from batchjobs.store import Store
from batchjobs.store.counting import SHARD_STATES, Unfinished

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from batchjobs.settings import Settings
    from batchjobs.types import Priority

log = logging.getLogger("batchjobs.metrics")

CACHE_SECONDS = 5.0
PATIENCE_SECONDS = 4.0
"""How long a scrape waits for an answer, below the 10 s that Prometheus waits for a scrape."""

WORKER_STATES = ("idle", "busy", "paused", "suspended", "draining", "updating", "stopped", "failed", "dead")
"""Always shown; a state beside these is shown while a worker is in it."""

T = TypeVar("T", covariant=True)


class Service(Protocol[T]):
    """Something that is asked for figures over a connection."""

    def ask(self) -> T:
        """Raises when it does not answer; can be asked again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DatabaseFigures:
    unfinished: Unfinished
    workers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RedisFigures:
    """``memory_max_bytes`` is 0 without a limit. Both are None where a managed Redis does not tell."""

    depths: Mapping[Priority, int]
    memory_used_bytes: int | None
    memory_max_bytes: int | None


class DatabaseService:
    def __init__(self, settings: Settings) -> None:
        self._store = Store(settings.store_url)
        url = parse_url(settings.store_url)
        self._file = Path(url.database or "") if url.get_backend_name() == "sqlite" else None

    def ask(self) -> DatabaseFigures:
        if self._file is not None and not self._file.exists():  # SQLite would make an empty one
            raise ConnectionFailed(f"there is no database {self._file} yet")
        return DatabaseFigures(self._store.unfinished(), Counter(row.state for row in self._store.workers()))

    def close(self) -> None:
        self._store.close()


class RedisService:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue: JobQueue | None = None

    def ask(self) -> RedisFigures:
        if self._queue is None:
            self._queue = self._connect()
        depths = self._queue.depths()
        try:
            memory = self._queue.connection.info("memory")
        except ResponseError:  # a managed Redis may hide it
            memory = {}
        return RedisFigures(depths, memory.get("used_memory"), memory.get("maxmemory"))

    def _connect(self) -> JobQueue:
        if self._settings.redis_url is not None:
            return JobQueue(self._settings.redis_url)
        socket = socket_path_for(self._settings.home / "redis")
        if not socket.exists():
            raise ConnectionFailed("the private Redis server is off: no command that needs it is running")
        return JobQueue(f"unix://{socket}")

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


class Probe(Generic[T]):
    """What a service said last, if it answers. Asked in a thread of its own, which nobody has to wait for."""

    def __init__(self, name: str, title: str, service: Service[T], cache_seconds: float) -> None:
        self.name = name
        self.title = title
        self._service = service
        self._cache_seconds = cache_seconds
        self._lock = threading.Lock()
        self._said: T | None = None
        self._said_at = float("-inf")
        self._round: threading.Event | None = None
        self._is_failing = False

    def begin(self) -> None:
        """Asks, unless what was said last is fresh or somebody asks already."""
        with self._lock:
            if self._round is None and time.monotonic() - self._said_at >= self._cache_seconds:
                self._round = threading.Event()
                threading.Thread(target=self._ask, args=(self._round,), name=f"ask {self.name}", daemon=True).start()

    def look(self, deadline: float) -> T | None:
        """What it says; None where it does not answer until then, by the monotonic clock."""
        with self._lock:
            asked = self._round
        if asked is not None and not asked.wait(max(0.0, deadline - time.monotonic())):
            self._note_failure("it takes too long")
            return None
        with self._lock:
            return self._said

    def _ask(self, asked: threading.Event) -> None:
        said: T | None = None
        try:
            said = self._service.ask()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, a scrape does not fail
            self._note_failure(str(error) or type(error).__name__)
        with self._lock:
            if said is not None and self._is_failing:
                self._is_failing = False
                log.info("%s answers again", self.title)
            self._said, self._said_at, self._round = said, time.monotonic(), None
        asked.set()

    def _note_failure(self, reason: str) -> None:
        """Once for each outage."""
        with self._lock:
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            log.warning("%s does not answer: %s", self.title, reason)


class QueueCollector(Collector):
    """What is known of queue and store, as families of metrics: always all of them, with samples where one is known."""

    def __init__(self, database: Probe[DatabaseFigures], redis: Probe[RedisFigures], patience_seconds: float) -> None:
        self._database = database
        self._redis = redis
        self._patience_seconds = patience_seconds

    def collect(self) -> Iterator[Metric]:
        deadline = time.monotonic() + self._patience_seconds
        self._database.begin()
        self._redis.begin()
        database, redis = self._database.look(deadline), self._redis.look(deadline)
        up = {self._database.name: database is not None, self._redis.name: redis is not None}
        yield _labelled("batchjobs_up", "1 where the service answers", "service", up)
        yield from _of_database(database)
        yield from _of_redis(redis)


def _of_database(figures: DatabaseFigures | None) -> Iterator[Metric]:
    left = figures.unfinished if figures else None
    shards = {state: left.shards[state] for state in SHARD_STATES} if left else {}
    yield _labelled("batchjobs_shards", "Shards of batches that have not ended", "state", shards)
    about = "Batches that have not ended, those that are paused too"
    yield _labelled("batchjobs_batches", about, "status", left.batches if left else {})
    paused = [left.paused_batches] if left else []
    yield _single("batchjobs_batches_paused", "Batches that have not ended and are paused", paused)
    about = "Since the oldest batch was submitted that has a shard waiting and is not paused; 0 where none waits"
    yield _single("batchjobs_oldest_ready_seconds", about, [left.oldest_ready_seconds] if left else [])
    workers = {**dict.fromkeys(WORKER_STATES, 0), **figures.workers} if figures else {}
    yield _labelled("batchjobs_workers", "Workers of the last day, by state", "state", workers)


def _of_redis(figures: RedisFigures | None) -> Iterator[Metric]:
    depths = figures.depths if figures else {}
    yield _labelled("batchjobs_queue_depth", "Shards that wait in Redis", "queue", depths)
    used = figures.memory_used_bytes if figures else None
    yield _single("batchjobs_redis_memory_used_bytes", "Memory that Redis uses", [] if used is None else [used])
    most = figures.memory_max_bytes if figures else None
    about = "Memory that Redis may use; 0 without a limit"
    yield _single("batchjobs_redis_memory_max_bytes", about, [] if most is None else [most])


def _labelled(name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, figure in values.items():
        family.add_metric([str(value)], figure)
    return family


def _single(name: str, about: str, values: Iterable[float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[])
    for value in values:
        family.add_metric([], value)
    return family


class Exporter:
    """The metrics of queue and store, in a registry. Connects when it is first scraped."""

    def __init__(
        self,
        settings: Settings,
        *,
        cache_seconds: float = CACHE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._database = DatabaseService(settings)
        self._redis = RedisService(settings)
        database = Probe("database", "the database", self._database, cache_seconds)
        redis = Probe("redis", "Redis", self._redis, cache_seconds)
        self.registry = CollectorRegistry()
        self.registry.register(QueueCollector(database, redis, patience_seconds))

    def text(self) -> str:
        """The metrics of this moment, as Prometheus reads them."""
        return generate_latest(self.registry).decode()

    def close(self) -> None:
        self._database.close()
        self._redis.close()
