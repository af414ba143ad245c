"""What survives a worker: unfinished answers, prompts that kill, a database that is away, a shutdown."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.queue import JobQueue
from batchjobs.settings import Settings, load_settings
from batchjobs.types import RequestStatus
from tests.support.batches import create, request, select
from tests.support.cases import case
from tests.support.running import queue, sqlite, start
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker, ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchjobs.store import Store

__all__ = ["queue", "start"]

LONG = 400
"""Tokens of a long answer."""


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    return load_settings(
        home=tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        lease_seconds=1,
        heartbeat_seconds=0.3,
        checkpoint_seconds=0.1,
        max_requests_per_batch=8,
    )


def submit_long(store: Store, queue: JobQueue, count: int = 1, **body: Any) -> str:
    """A batch of long answers."""
    batch_id = create(store)
    asked = {"prompt": "a long one", "max_tokens": LONG, **body}
    store.add_requests(batch_id, [request(index, **asked) for index in range(count)])
    store.open_batch(batch_id)
    queue.enqueue(store.claimable(1000))
    return batch_id


def kept(store: Store, batch_id: str, index: int = 0, choice: int = 0) -> dict[str, Any] | None:
    """The request's checkpoint."""
    rows = select(
        store,
        f"""SELECT token_ids, logprobs, token_times, started_at FROM checkpoints
        WHERE batch_id = '{batch_id}' AND "index" = {index} AND choice = {choice}""",
    )
    if not rows:
        return None
    ids, logprobs, times, started_at = rows[0]
    parsed = [json.loads(each) if isinstance(each, str) else each for each in (ids, logprobs, times)]
    return {"token_ids": parsed[0], "logprobs": parsed[1], "token_times": parsed[2], "started_at": started_at}


def has_kept(store: Store, batch_id: str, tokens: int) -> Callable[[], dict[str, Any] | None]:
    def look() -> dict[str, Any] | None:
        found = kept(store, batch_id)
        return found if found is not None and len(found["token_ids"]) >= tokens else None

    return look


@case("A-q-04")
def test_an_answer_goes_on_where_its_worker_was_killed(
    settings: Settings, store: Store, queue: JobQueue, start: Callable[..., ThreadWorker]
) -> None:
    batch_id = submit_long(store, queue)
    first = ProcessWorker(settings, "first", step_seconds=0.01)
    eventually(has_kept(store, batch_id, 200), "half of the answer is stored", 30)
    first.kill()
    checkpoint = kept(store, batch_id)
    assert checkpoint is not None
    begun = len(checkpoint["token_ids"])
    assert 200 <= begun < LONG
    start("second", logprob=-0.25)
    eventually(lambda: store.batch(batch_id).status.is_final, "another worker finishes it", 30)
    (result,) = store.results(batch_id)
    (done,) = result.choices
    assert done.text == expected_text("a long one", LONG)
    assert done.token_ids == tuple(range(LONG))
    assert (done.worker, done.attempt, done.completion_tokens) == ("second", 2, LONG)
    assert list(done.token_times[:begun]) == checkpoint["token_times"]
    assert list(done.token_times) == sorted(done.token_times)
    assert done.logprobs == (-0.5,) * begun + (-0.25,) * (LONG - begun), "none of the first part was made again"
    assert kept(store, batch_id) is None


@sqlite
def test_every_choice_goes_on(
    settings: Settings, store: Store, queue: JobQueue, start: Callable[..., ThreadWorker]
) -> None:
    batch_id = submit_long(store, queue, n=3, prompt="uneven", temperature=1.0)
    first = ProcessWorker(settings, "first", step_seconds=0.01)
    eventually(lambda: kept(store, batch_id, choice=2) and kept(store, batch_id, choice=0), "all are stored", 30)
    first.kill()
    start("second", logprob=-0.25)
    eventually(lambda: store.batch(batch_id).status.is_final, "another worker finishes it", 30)
    (result,) = store.results(batch_id)
    assert [len(choice.token_ids) for choice in result.choices] == [1, LONG, LONG]
    assert result.choices[0].logprobs == (-0.5,)
    assert {-0.5, -0.25} == set(result.choices[2].logprobs)


@sqlite
def test_another_model_begins_anew(
    settings: Settings, store: Store, queue: JobQueue, start: Callable[..., ThreadWorker]
) -> None:
    batch_id = submit_long(store, queue)
    first = ProcessWorker(settings, "first", step_seconds=0.01)
    eventually(has_kept(store, batch_id, 20), "some of it is stored", 30)
    first.kill()
    start("second", logprob=-0.25, model_version="stub-2")
    eventually(lambda: store.batch(batch_id).status.is_final, "another worker answers it", 30)
    (result,) = store.results(batch_id)
    assert result.choices[0].logprobs == (-0.25,) * LONG, "one answer is of one model"
    assert result.choices[0].model_version == "stub-2"


def test_a_shutdown_loses_no_token(
    settings: Settings, store: Store, queue: JobQueue, start: Callable[..., ThreadWorker]
) -> None:
    batch_id = submit_long(store, queue, count=3)
    first = ProcessWorker(settings, "first", step_seconds=0.01)
    eventually(has_kept(store, batch_id, 50), "it works", 30)
    first.signal(signal.SIGTERM)
    code, log = first.join()
    assert code == 0, log
    assert "stored 3 unfinished answers for whoever goes on" in log
    begun = [len((kept(store, batch_id, index) or {"token_ids": ()})["token_ids"]) for index in range(3)]
    assert min(begun) >= 50
    start("second", logprob=-0.25)
    eventually(lambda: store.batch(batch_id).status.is_final, "another worker finishes them", 30)
    for result, tokens in zip(store.results(batch_id), begun, strict=True):
        (done,) = result.choices
        assert done.logprobs == (-0.5,) * tokens + (-0.25,) * (LONG - tokens)
        assert done.attempt == 1, "an end in good order is no attempt"


@sqlite
def test_without_checkpoints_an_answer_begins_anew(settings: Settings, store: Store, queue: JobQueue) -> None:
    never = settings.model_copy(update={"checkpoint_seconds": 0.0})
    batch_id = submit_long(store, queue)
    first = ProcessWorker(never, "first", step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.running, "it works", 30)
    eventually(lambda: [w for w in store.workers() if w.generated_tokens > 30], "tokens are made", 30)
    first.signal(signal.SIGTERM)
    assert first.join()[0] == 0
    assert kept(store, batch_id) is None
    second = ThreadWorker(never, store, queue, "second", logprob=-0.25)
    eventually(lambda: store.batch(batch_id).status.is_final, "another worker answers it", 30)
    assert second.stop() == 0
    (result,) = store.results(batch_id)
    assert result.choices[0].logprobs == (-0.25,) * LONG


# A prompt that kills its worker


@sqlite
def test_a_prompt_that_kills_its_worker_is_isolated(settings: Settings, store: Store, queue: JobQueue) -> None:
    total, deadly = 1000, 137
    quick = settings.model_copy(update={"lease_seconds": 0.6, "heartbeat_seconds": 0.2, "max_requests_per_batch": 64})
    batch_id = _with_deadly(store, total, deadly)
    queue.enqueue(store.claimable(1000))
    deaths, deadline = 0, time.monotonic() + 90
    while not store.batch(batch_id).status.is_final:
        worker = ProcessWorker(quick, f"w{deaths}", step_seconds=0.001)
        while worker.process.poll() is None and not store.batch(batch_id).status.is_final:
            assert time.monotonic() < deadline, store.batch(batch_id)
            time.sleep(0.02)
        if worker.process.poll() is not None:
            assert worker.process.returncode == 9, worker.join()
            deaths += 1
        else:
            worker.signal(signal.SIGTERM)
        worker.join()
    counts = store.batch(batch_id).counts
    assert (counts.total, counts.completed, counts.failed) == (total, total - 1, 1)
    assert deaths == 5, "twice in its shard, once in company, twice alone"
    (result,) = [each for each in store.results(batch_id) if each.state == RequestStatus.FAILED]
    assert result.request.index == deadly
    assert result.error is not None
    assert result.error.code == "worker_crashed"


def _with_deadly(store: Store, total: int, deadly: int) -> str:
    batch_id = create(store, shard_size=64)
    prompts = ["exit" if index == deadly else f"prompt {index}" for index in range(total)]
    store.add_requests(batch_id, [request(i, prompt=each, max_tokens=4) for i, each in enumerate(prompts)])
    store.open_batch(batch_id)
    return batch_id
