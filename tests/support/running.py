"""Whole workers around a stub engine on real servers: fixtures, and looks at what they did.

A test module imports the fixtures ``settings``, ``queue`` and ``start`` by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.queue import JobQueue
from batchjobs.settings import Settings, load_settings
from tests.support.batches import create, request, select
from tests.support.workers import ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batchjobs.store import Store
    from batchjobs.types import Completion, Request

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    return load_settings(
        home=tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        lease_seconds=2,
        heartbeat_seconds=0.3,
        max_requests_per_batch=8,
    )


@pytest.fixture
def queue(redis_url: str) -> Iterator[JobQueue]:
    queue = JobQueue(redis_url)
    yield queue
    queue.close()


@pytest.fixture
def start(settings: Settings, store: Store, queue: JobQueue) -> Iterator[Callable[..., ThreadWorker]]:
    """Starts a worker in a thread; those that still run at the end of the test are stopped."""
    started: list[ThreadWorker] = []

    def start(name: str = "w1", **options: Any) -> ThreadWorker:
        started.append(ThreadWorker(options.pop("settings", settings), store, queue, name, **options))
        return started[-1]

    yield start
    for worker in started:
        if worker.exit_code is None:
            worker.stop()


def open_batch(store: Store, *requests: Request, shard_size: int = 4) -> str:
    """The id of an open batch of these requests."""
    batch_id = create(store, shard_size=shard_size)
    store.add_requests(batch_id, requests)
    store.open_batch(batch_id)
    return batch_id


def enqueue(store: Store, queue: JobQueue) -> int:
    """Queues whatever can be claimed."""
    return queue.enqueue(store.claimable(100_000))


def completions(store: Store, batch_id: str) -> list[Completion]:
    """Every completion of the batch, straight from the table: none twice, in input order."""
    _, rows = store.select(
        f'SELECT "index", count(*) FROM completions WHERE batch_id = \'{batch_id}\' GROUP BY "index"', 100_000
    )
    assert all(count == 1 for _, count in rows)
    return [result.completion for result in store.results(batch_id) if result.completion is not None]


def is_complete(store: Store, batch_id: str) -> bool:
    return store.batch(batch_id).status.is_final


def attempts(store: Store, batch_id: str) -> list[int]:
    """Of the shards, in their order."""
    _, rows = store.select(f"SELECT attempts FROM shards WHERE batch_id = '{batch_id}' ORDER BY shard_no", 1000)
    return [row[0] for row in rows]


def open_long(store: Store, queue: JobQueue, count: int, *, max_tokens: int = 100_000, **values: Any) -> str:
    """The id of a queued batch of long answers."""
    shard_size = values.pop("shard_size", 4)
    body = values.pop("body", {})
    batch_id = create(store, shard_size=shard_size, **values)
    store.add_requests(
        batch_id, [request(index, prompt=f"prompt {index}", max_tokens=max_tokens, **body) for index in range(count)]
    )
    store.open_batch(batch_id)
    enqueue(store, queue)
    return batch_id


def state(store: Store, name: str = "w1") -> str:
    """What the worker said last that it does."""
    return next((row.state for row in store.workers() if row.name == name), "")


def is_still(worker: ThreadWorker) -> bool:
    """Whether the worker's engine stands still, as an operator wished."""
    return worker.loop.is_standing


def checkpointed(store: Store, batch_id: str) -> dict[int, int]:
    """Tokens of each unfinished request that are stored, by index."""
    rows = select(store, f"SELECT \"index\", completion_tokens FROM checkpoints WHERE batch_id = '{batch_id}'")
    return {row[0]: row[1] for row in rows}
