"""Known faults of other queues, on whole workers and real servers: none of them may be ours."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import RedisError
from rq.command import send_shutdown_command
from rq.suspension import resume, suspend

from batchjobs.client import Client
from batchjobs.reconcile import reconcile
from batchjobs.store.leases import FAIL_AT
from batchjobs.types import BatchStatus, Priority, RequestStatus, ShardId
from tests.support.batches import GONE, request, submit
from tests.support.cases import case
from tests.support.models import save_chat_model
from tests.support.running import (
    attempts,
    completions,
    enqueue,
    is_complete,
    open_batch,
    postgresql,
    queue,
    settings,
    sqlite,
    start,
)
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings
    from batchjobs.store import Store
    from tests.support.redis import RedisServer
    from tests.support.workers import ThreadWorker

__all__ = ["queue", "settings", "start"]

ROOT = Path(__file__).parents[2]
LONG = 1_000_000
"""Tokens of an answer that does not end by itself within a test."""


@pytest.fixture
def client(settings: Settings) -> Iterator[Client]:
    with Client(settings) as client:
        yield client


# ------------------------------------------------------------------------------------------------------- A-q-01, A-q-02


@case("A-q-01")
def test_odd_ids_come_back_unchanged_through_the_whole(
    client: Client, start: Callable[..., ThreadWorker], store: Store
) -> None:
    """Ids of users are no ids of the queue."""
    ids = ["prod:T1055.011 Extra Window/1", "問い-1 ✓", "x" * 300, "a\nb", "-", "👩‍👩‍👧"]
    batch = client.submit([{"custom_id": each, "prompt": "a", "max_tokens": 2} for each in ids], shard_size=1)
    assert start(burst=True).join() == 0
    assert [result.custom_id for result in batch.results()] == ids
    assert [result.status for result in batch.results()] == ["completed"] * len(ids)


@case("A-q-02")
def test_the_same_lines_again_never_touch_the_first_batch(
    client: Client, start: Callable[..., ThreadWorker], store: Store
) -> None:
    """Twice within a second, and once more while the first runs."""
    lines = [{"custom_id": f"q{number}", "prompt": f"p{number}", "max_tokens": 40} for number in range(4)]
    others = [{**line, "prompt": f"other {line['prompt']}"} for line in lines]
    worker = start()
    worker.loop.hold()
    first = client.submit(lines)
    second = client.submit(lines)
    eventually(lambda: worker.loop.stats().waiting == 8, "both are there")
    third = client.submit(others)
    keyed = {client.submit(lines, key="k").id for _ in range(3)}
    assert len({first.id, second.id, third.id, *keyed}) == 4
    worker.loop.release()
    for batch_id, prefix in ((first.id, ""), (second.id, ""), (third.id, "other "), (*keyed, "")):
        eventually(lambda: is_complete(store, batch_id), "it is done")  # noqa: B023
        texts = [completion.text for completion in completions(store, batch_id)]
        assert texts == [expected_text(f"{prefix}p{number}", 40) for number in range(4)]


# --------------------------------------------------------------------------------------------------------------- A-q-05


@sqlite
@case("A-q-05")
def test_all_commands_are_heard_after_a_restart_of_redis(
    client: Client, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, redis_server: RedisServer
) -> None:
    """Cancel, pause and stop."""
    worker = start()
    batch = client.submit([{"prompt": f"p{number}", "max_tokens": LONG} for number in range(4)])
    eventually(lambda: worker.loop.stats().running == 4, "it runs")
    redis_server.restart()
    eventually(lambda: _subscribers(queue) == 1, "the worker listens again")
    client.pause_workers()
    eventually(lambda: store.workers()[0].state == "paused", "it stands still")
    client.resume_workers()
    eventually(lambda: store.workers()[0].state == "busy", "it goes on")
    batch.cancel()
    eventually(lambda: batch.status == BatchStatus.CANCELLED, "it is cancelled")
    suspend(queue.connection)
    waiting = client.submit([{"prompt": "a", "max_tokens": 2}])
    eventually(lambda: worker.daemon._intake.is_suspended, "it pauses")
    assert waiting.counts.queued == 1
    resume(queue.connection)
    eventually(lambda: waiting.status == BatchStatus.COMPLETED, "it goes on")
    send_shutdown_command(queue.connection, "w1")
    assert worker.join() == 0


def _subscribers(queue: JobQueue) -> int:
    try:
        [(_, count)] = queue.connection.pubsub_numsub("rq:pubsub:w1")
    except RedisError:
        return 0
    return int(count)


# --------------------------------------------------------------------------------------------------------------- A-q-06


@case("A-q-06")
def test_a_request_cancelled_before_the_start_never_runs(
    client: Client, start: Callable[..., ThreadWorker], store: Store
) -> None:
    """Five are submitted, the fifth is cancelled at once."""
    batch = client.submit([{"prompt": f"p{number}", "max_tokens": 4} for number in range(5)])
    client.cancel_request(batch.id, 4)
    assert start(burst=True).join() == 0
    *others, last = completions(store, batch.id)
    assert [other.status for other in others] == [RequestStatus.COMPLETED] * 4
    assert (last.status, last.text, last.token_ids) == (RequestStatus.CANCELLED, "", ())
    assert batch.status == BatchStatus.COMPLETED


@case("A-q-06")
def test_cancelling_races_with_the_start_and_nothing_hangs_or_doubles(
    client: Client, start: Callable[..., ThreadWorker], store: Store
) -> None:
    """Each of many requests is cancelled some 0 to 20 ms after its submission."""
    chance = random.Random(20260301)
    worker = start(step_seconds=0.0005)
    reported: dict[str, int] = {}
    threads = []

    def cancel(batch_id: str, delay: float) -> None:
        time.sleep(delay)
        reported[batch_id] = client.cancel_batch(batch_id).cancelled

    for number in range(80):
        batch = client.submit([{"prompt": f"p{number}", "max_tokens": 12}], shard_size=1)
        thread = threading.Thread(target=cancel, args=(batch.id, chance.uniform(0, 0.02)))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    eventually(lambda: all(is_complete(store, batch_id) for batch_id in reported), "all have ended", 30)
    ends = {batch_id: completions(store, batch_id) for batch_id in reported}
    assert len(ends) == 80
    assert all(len(end) == 1 for end in ends.values())
    assert {end.status for [end] in ends.values()} <= {RequestStatus.COMPLETED, RequestStatus.CANCELLED}
    for batch_id, [end] in ends.items():
        if reported[batch_id]:
            assert end.status == RequestStatus.CANCELLED, "what was said to be cancelled stays so"
    assert sum(reported.values()), "some were cancelled before they began"
    for [end] in ends.values():
        if end.status == RequestStatus.COMPLETED:
            assert len(end.token_ids) == 12
    eventually(lambda: worker.loop.stats().running + worker.loop.stats().waiting == 0, "the engine is empty")


# --------------------------------------------------------------------------------------------------------------- A-q-07


@pytest.mark.parametrize("queued", [300, 0])
@sqlite
@case("A-q-07")
def test_a_full_redis_delays_and_loses_nothing(
    client: Client, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, queued: int
) -> None:
    """The submission says so, is not doubled when it is repeated, and the worker goes on, before and after.

    Also where the queue is empty, because Redis could take nothing of what is to be done.
    """
    worker = start()
    worker.loop.hold()
    lines = [{"custom_id": f"q{number}", "prompt": f"p{number}", "max_tokens": 2} for number in range(300)]
    first = client.submit(lines[: queued or 1], shard_size=1)
    if not queued:
        eventually(lambda: queue.depths()[Priority.DEFAULT] == 0, "the queue is empty")
    queue.connection.config_set("maxmemory", 1)
    with pytest.warns(UserWarning, match=r"the batch is stored, but not queued yet: .*full"):
        second = client.submit(lines, key="k", shard_size=1)
    assert second.counts.total == 300
    worker.loop.release()
    eventually(lambda: first.counts.completed + second.counts.completed >= 100, "it goes on while Redis is full", 15)
    queue.connection.config_set("maxmemory", 0)
    assert client.submit(lines, key="k", shard_size=1).id == second.id
    eventually(lambda: first.status == second.status == BatchStatus.COMPLETED, "all of it is done", 30)
    assert [completion.index for completion in completions(store, second.id)] == list(range(300))
    assert worker.stop() == 0


# --------------------------------------------------------------------------------------------------------------- A-q-08


@case("A-q-08")
def test_waiting_behind_long_answers_is_not_hanging(
    start: Callable[..., ThreadWorker],
    settings: Settings,
    store: Store,
    queue: JobQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that takes many leases, and a queue in the engine whose end begins after several of them."""
    monkeypatch.setattr("workers.upkeep.THOROUGH_SECONDS", 0.0)  # RQ's clean-up runs all the time
    brief = settings.model_copy(update={"lease_seconds": 0.6, "heartbeat_seconds": 0.15})
    slow = request(0, prompt="slow", max_tokens=120)
    batch_id = open_batch(
        store, slow, *(request(i, prompt=f"p{i}", max_tokens=20) for i in range(1, 40)), shard_size=40
    )
    enqueue(store, queue)
    [job] = queue.queues[Priority.DEFAULT].jobs
    assert job.timeout == -1, "no time limit, which would count the waiting too"
    first = start("first", settings=brief, step_seconds=0.02)
    eventually(lambda: first.loop.stats().running == 8, "it works")
    start("second", settings=brief)
    eventually(lambda: is_complete(store, batch_id), "all are done", 20)
    done = completions(store, batch_id)
    assert len(done) == 40
    assert {(c.worker, c.attempt) for c in done} == {("first", 1)}, "each ran once, where it was begun"
    assert attempts(store, batch_id) == [1]
    assert done[0].token_times[-1] > 3 * brief.lease_seconds
    begun = [c.started_at for c in done if c.started_at]
    assert (max(begun) - min(begun)).total_seconds() > 2 * brief.lease_seconds
    registry = queue.queues[Priority.DEFAULT].finished_job_registry
    eventually(lambda: registry.get_job_ids() == [f"{batch_id}-0"], "RQ counts it as a success")
    job.refresh()
    assert job.retries_left == 10, "RQ never took it for abandoned"
    assert queue.queues[Priority.DEFAULT].failed_job_registry.count == 0


# --------------------------------------------------------------------------------------------------------------- A-q-09


def refuse_outcomes(store: Store, condition: str) -> None:
    """The database refuses the insert of completions for which the condition holds."""
    raised = {
        True: [
            f"CREATE TRIGGER poison BEFORE INSERT ON completions WHEN {condition} "
            "BEGIN SELECT RAISE(ABORT, 'poisoned'); END"
        ],
        False: [
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {condition} THEN RAISE EXCEPTION 'poisoned'; END IF; RETURN NEW; END $$",
            "CREATE TRIGGER poison BEFORE INSERT ON completions FOR EACH ROW EXECUTE FUNCTION refuse()",
        ],
    }
    with store._database.writing() as connection:
        for statement in raised[store._database.is_sqlite]:
            connection.exec_driver_sql(statement)


@case("A-q-09")
def test_an_outcome_that_can_never_be_stored_holds_nobody_up(
    start: Callable[..., ThreadWorker],
    store: Store,
    queue: JobQueue,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SQL refuses the answer of one request, by its custom_id. Its end survives a worker's restart."""
    batch_id = submit(store, 30, shard_size=10)
    refuse_outcomes(
        store,
        "NEW.status = 'completed' AND 'request-13' = "
        '(SELECT custom_id FROM requests AS r WHERE r.batch_id = NEW.batch_id AND r."index" = NEW."index")',
    )
    enqueue(store, queue)
    assert start(burst=True).join() == 0
    assert start("w2", burst=True).join() == 0, "another worker does not begin it anew"
    done = completions(store, batch_id)
    assert len(done) == 30
    assert [c.index for c in done if c.status == RequestStatus.FAILED] == [13]
    assert done[13].error is not None
    assert done[13].error.code == "result_not_stored"
    assert "poisoned" in done[13].error.message
    assert caplog.text.count("poisoned") <= 2


@case("A-q-09")
def test_an_end_that_cannot_be_stored_either_keeps_nobody_from_reconciling(store: Store, queue: JobQueue) -> None:
    """The outcome of a request that is given up is refused as well; its neighbour gets its own."""
    batch_id = submit(store, 2, shard_size=1)
    refuse_outcomes(store, 'NEW."index" = 0')
    for _ in range(FAIL_AT):
        assert len(store.claim([ShardId(batch_id, 0), ShardId(batch_id, 1)], "w1", GONE)) == 2
    for _ in range(3):
        done = reconcile(store, queue, thorough=True)
        assert [refusal.partition(": ")[0] for refusal in done.refused] == [f"shard {batch_id}-0"]
        assert "poisoned" in done.refused[0]
    [end] = completions(store, batch_id)
    assert end.index == 1
    assert end.error is not None
    assert end.error.code == "worker_crashed"


# --------------------------------------------------------------------------------------------------------------- A-q-10


@postgresql
@case("A-q-10")
def test_a_job_whose_hash_is_gone_holds_nobody_up(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """Deleted by hand, with its id left in the queue and in a registry."""
    batch_id = submit(store, 12)
    enqueue(store, queue)
    jobs = queue.queues[Priority.DEFAULT]
    queue.connection.delete(f"rq:job:{batch_id}-1")
    queue.connection.zadd(jobs.started_job_registry.key, {f"{batch_id}-1:gone": 1, "no-such-0:gone": 1})
    start()
    eventually(lambda: is_complete(store, batch_id), "all are done, that one too")
    queue.tidy()
    eventually(lambda: jobs.started_job_registry.count == 0, "the orphans are gone")
    assert [c.attempt for c in completions(store, batch_id)] == [1] * 12
    assert caplog.text.count("no-such-0") <= 1


# ------------------------------------------------------------------------------------------------------------ A-eng-11

_WATCH = """
import sys

def watch(event, arguments):
    if event in ("os.fork", "os.forkpty"):
        note("fork")
    elif event == "open" and str(arguments[0]).endswith("model.safetensors"):
        note("load")

def note(what):
    with open(NOTES, "a") as notes:
        notes.write(what + "\\n")

sys.addaudithook(watch)
"""


@case("A-eng-11")
@sqlite
def test_a_worker_loads_its_model_once_and_never_forks(settings: Settings, client: Client, tmp_path: Path) -> None:
    """With a real model, and a tokenizer that has threads of its own, over several jobs. All its forks are seen."""
    model, notes = save_chat_model(tmp_path / "model"), tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(f"NOTES = {str(notes)!r}\n{_WATCH}")
    lines = [{"messages": [{"role": "user", "content": f"hi {n}"}], "max_tokens": 3} for n in range(4)]
    batches = [client.submit(lines, shard_size=1) for _ in range(3)]
    done = subprocess.run(
        [sys.executable, "-m", "batchjobs", "worker", "--model", model, "--num-blocks", "100", "--burst"],
        env=settings.as_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TOKENIZERS_PARALLELISM": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [batch.counts.completed for batch in batches] == [4, 4, 4]
    assert notes.read_text().split() == ["load", "load"]  # once for the weights, and once for what they are called
    assert "fork" not in done.stderr  # as tokenizers warns
    [worker] = client.workers()
    assert {result.worker for batch in batches for result in batch.results()} == {worker.name}
