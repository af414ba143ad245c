"""Whole workers on a stub engine, a real Redis and a real database."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.command import send_shutdown_command, send_stop_job_command
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from batchjobs.connections import connect_queue, connect_store
from batchjobs.errors import UsageError
from batchjobs.queue import JobQueue
from batchjobs.settings import Settings, load_settings
from batchjobs.types import BatchStatus, Priority, RequestStatus, ShardId
from tests.support.batches import request, submit
from tests.support.cases import case
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
from tests.support.workers import ProcessWorker, ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from tests.support.redis import RedisServer
    from tests.support.sql import PostgresServer

__all__ = ["queue", "settings", "start"]


def states(store: Store, batch_id: str) -> Counter[str]:
    _, rows = store.select(f"SELECT state FROM shards WHERE batch_id = '{batch_id}'", 1000)
    return Counter(row[0] for row in rows)


def test_every_request_gets_its_one_outcome(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    low, high = submit(store, 30, queue=Priority.LOW), submit(store, 30, shard_size=7, queue=Priority.HIGH)
    enqueue(store, queue)
    assert start(burst=True).join() == 0
    for batch_id in (low, high):
        info = store.batch(batch_id)
        assert info.status == BatchStatus.COMPLETED
        assert info.counts.completed == 30
        for index, completion in enumerate(completions(store, batch_id)):
            assert completion.index == index
            assert completion.text == expected_text(f"prompt {index}", 8)
            assert completion.status == RequestStatus.COMPLETED
            assert (completion.worker, completion.attempt) == ("w1", 1)
            assert (completion.model, completion.model_version) == ("stub", "stub-1")
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.token_times) == 8
            assert completion.started_at is not None
            assert completion.finished_at is not None
            assert info.created_at <= completion.started_at <= completion.finished_at
    first_low = min(c.started_at for c in completions(store, low) if c.started_at)
    first_high = min(c.started_at for c in completions(store, high) if c.started_at)
    assert first_high < first_low
    rq = Queue("batchjobs-low", connection=queue.connection, serializer=JSONSerializer)
    assert (rq.count, rq.started_job_registry.count, rq.finished_job_registry.count) == (0, 0, 8)
    assert queue.depths() == dict.fromkeys(Priority, 0)
    (row,) = store.workers()
    assert (row.name, row.state, row.model, row.device) == ("w1", "stopped", "stub", "cpu")
    assert (row.running, row.waiting, row.tokens_per_second) == (0, 0, 0.0)
    assert Worker.all(connection=queue.connection) == []


@sqlite
def test_the_totals_of_a_worker_that_ended_are_complete(settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 12)
    enqueue(store, queue)
    rare = settings.model_copy(update={"heartbeat_seconds": 3600.0, "lease_seconds": 3600.0})
    assert ThreadWorker(rare, store, queue, "w1", burst=True).join() == 0
    tokens = store.batch(batch_id).tokens
    (row,) = store.workers()
    assert (row.generated_tokens, row.prompt_tokens) == (12 * 8, tokens.prompt)
    assert (row.state, row.running, row.waiting, row.preemptions) == ("stopped", 0, 0, 0)


@postgresql
def test_two_worker_processes_share_the_work(settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 160)
    workers = [ProcessWorker(settings, name, step_seconds=0.01) for name in ("a", "b")]
    eventually(lambda: len(store.workers()) == 2, "both are there")
    enqueue(store, queue)
    eventually(lambda: is_complete(store, batch_id), "the batch is done", 30)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    assert [worker.join()[0] for worker in workers] == [0, 0]
    done = completions(store, batch_id)
    assert len(done) == 160
    shares = Counter(completion.worker for completion in done)
    assert set(shares) == {"a", "b"}
    assert min(shares.values()) >= 32
    assert attempts(store, batch_id) == [1] * 40


@sqlite
def test_sigterm_gives_everything_back(settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 40)
    enqueue(store, queue)
    order = queue.queues[Priority.DEFAULT].job_ids
    worker = ProcessWorker(settings, "w1", step_seconds=0.05)
    eventually(lambda: store.batch(batch_id).counts.completed >= 8, "some are done")
    worker.signal(signal.SIGTERM)
    code, log = worker.join()
    assert code == 0
    assert "got SIGTERM" in log
    assert "gave back" in log
    info = store.batch(batch_id)
    assert 8 <= info.counts.completed < 40
    assert info.counts.running == 0
    done = states(store, batch_id)["done"]
    assert states(store, batch_id) == {"done": done, "ready": 10 - done}
    assert attempts(store, batch_id) == [1] * done + [0] * (10 - done)
    assert queue.queues[Priority.DEFAULT].job_ids == order[done:], "they stand in front, in their order"
    assert queue.queues[Priority.DEFAULT].started_job_registry.count == 0
    assert [row.state for row in store.workers()] == ["stopped"]
    assert Worker.all(connection=queue.connection) == []
    # Another one finishes, and makes nothing twice.
    first = {c.index: c for c in completions(store, batch_id)}
    code, _ = ProcessWorker(settings, "w2", step_seconds=0.001, burst=True).join()
    assert code == 0
    after = completions(store, batch_id)
    assert len(after) == 40
    assert {c.index: c for c in after if c.worker == "w1"} == first


@sqlite
def test_a_second_signal_ends_it_at_once(settings: Settings, store: Store, queue: JobQueue) -> None:
    submit(store, 8)
    enqueue(store, queue)
    worker = ProcessWorker(settings, "w1", step_seconds=30)  # a step that the first signal waits for
    eventually(lambda: store.workers() and store.claimable_count() == 0, "it holds everything")
    worker.signal(signal.SIGINT)
    assert worker.process.stderr is not None
    eventually(lambda: "got SIGINT" in worker.process.stderr.readline(), "it heard the first")
    worker.signal(signal.SIGTERM)
    assert worker.join(5)[0] == 128 + signal.SIGTERM


@postgresql
@case("A-q-04")
def test_kill_minus_nine_loses_nothing(settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 40)
    enqueue(store, queue)
    victim = ProcessWorker(settings, "victim", step_seconds=0.05)
    eventually(lambda: completions(store, batch_id), "it has stored some")
    victim.signal(signal.SIGSTOP)
    assert states(store, batch_id)["leased"] > 0, "it holds shards"
    victim.kill()
    heir = ProcessWorker(settings, "heir", step_seconds=0.01)
    eventually(lambda: is_complete(store, batch_id), "the heir finishes after the lease ran out", 30)
    heir.signal(signal.SIGTERM)
    assert heir.join()[0] == 0
    done = completions(store, batch_id)
    assert len(done) == 40
    assert all(c.text == expected_text(f"prompt {c.index}", 8) for c in done)
    assert set(attempts(store, batch_id)) == {1, 2}
    assert {c.attempt for c in done if c.worker == "victim"} == {1}
    assert states(store, batch_id) == {"done": 10}
    rq = queue.queues[Priority.DEFAULT]
    finished = set(rq.finished_job_registry.get_job_ids())
    unheard = {f"{batch_id}-{number}" for number in range(10)} - finished  # stored, and killed before RQ heard of it
    assert set(rq.started_job_registry.get_job_ids()) <= unheard
    assert rq.count == 0


@sqlite
@case("A-q-03")
def test_killed_between_sql_and_rq(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    monkeypatch.setattr(worker.daemon._rq, "flush", lambda: None)
    batch_id = submit(store, 4)
    enqueue(store, queue)
    eventually(lambda: is_complete(store, batch_id), "SQL has it")
    rq = queue.queues[Priority.DEFAULT]
    before = completions(store, batch_id)
    assert rq.started_job_registry.get_job_ids() == [f"{batch_id}-0"]
    assert worker.stop() == 0
    # Later, RQ's clean-up takes the execution to be abandoned, and queues the shard again.
    (entry,) = queue.connection.zrange(rq.started_job_registry.key, 0, -1)
    queue.connection.zadd(rq.started_job_registry.key, {entry: 1})
    queue.tidy()
    assert rq.job_ids == [f"{batch_id}-0"]
    assert start("w2", burst=True).join() == 0
    assert start("w3", until=lambda: rq.count == 0).join() == 0
    assert rq.started_job_registry.count == rq.failed_job_registry.count == 0
    assert completions(store, batch_id) == before


@sqlite
def test_a_flushed_redis_is_filled_again(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, redis_server: RedisServer
) -> None:
    batch_id = submit(store, 60)
    enqueue(store, queue)
    worker = start(step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    redis_server.flush()
    eventually(lambda: is_complete(store, batch_id), "what Redis forgot is done all the same")
    assert len(completions(store, batch_id)) == 60
    assert attempts(store, batch_id) == [1] * 15
    eventually(
        lambda: [seen.name for seen in Worker.all(connection=queue.connection)] == ["w1"], "Redis knows it again"
    )
    assert worker.stop() == 0


@sqlite
def test_without_redis_it_goes_on_and_comes_back(
    start: Callable[..., ThreadWorker],
    store: Store,
    queue: JobQueue,
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch_id = submit(store, 40)
    enqueue(store, queue)
    worker = start(step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    redis_server.kill()
    eventually(lambda: is_complete(store, batch_id), "the batch is done without Redis")
    redis_server.start()
    rq = queue.queues[Priority.DEFAULT]
    eventually(lambda: rq.finished_job_registry.count, "Redis hears of what was done meanwhile")
    later = submit(store, 4)
    enqueue(store, queue)
    eventually(lambda: is_complete(store, later), "it takes shards from Redis again")
    eventually(lambda: rq.count == 0, "what SQL refuses leaves the queue")
    assert worker.stop() == 0
    assert len(completions(store, batch_id)) == 40
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(messages) <= 4, "an outage is said once by each that needs Redis"


@sqlite
def test_a_redis_that_hangs_holds_nothing_up(
    start: Callable[..., ThreadWorker],
    store: Store,
    queue: JobQueue,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("batchjobs.redis_client", "workers.rq_worker"):
        monkeypatch.setattr(f"{module}.REPLY_SECONDS", 0.3)
    batch_id = submit(store, 40)
    enqueue(store, queue)
    worker = start(step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    redis_server.freeze()
    eventually(lambda: is_complete(store, batch_id), "the batch is done")
    redis_server.thaw()
    rq = queue.queues[Priority.DEFAULT]
    eventually(lambda: rq.count == 0 and rq.started_job_registry.count == 0, "RQ's books are in order again")
    assert attempts(store, batch_id) == [1] * 10
    assert worker.stop() == 0


def test_the_embedded_redis_may_die_under_a_worker() -> None:
    settings = load_settings(
        home=Path(tempfile.mkdtemp(prefix="bj-home-")), lease_seconds=2, heartbeat_seconds=0.3, max_requests_per_batch=8
    )
    store, queue = connect_store(settings), connect_queue(settings)
    batch_id = submit(store, 40)
    enqueue(store, queue)
    worker = ThreadWorker(settings, store, queue, "w1", step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    os.kill(int((settings.home / "redis" / "redis.pid").read_text()), signal.SIGKILL)
    eventually(lambda: is_complete(store, batch_id), "it goes on")
    eventually(lambda: _answers(queue), "the worker has started it again")
    eventually(lambda: [w.name for w in Worker.all(connection=queue.connection)] == ["w1"], "and is listed there")
    assert worker.stop() == 0
    queue.connection.flushall()
    queue.close()
    store.close()
    assert not (settings.home / "redis" / "redis.sock").exists(), "the last user has stopped the server"
    shutil.rmtree(settings.home)


def _answers(queue: JobQueue) -> bool:
    try:
        return bool(queue.connection.ping())
    except RedisError:
        return False


@sqlite
def test_what_redis_never_got_is_found_in_sql(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit(store, 12)
    assert start(burst=True).join() == 0
    assert is_complete(store, batch_id)


@postgresql
def test_connections_to_the_database_may_be_cut(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, postgres_server: PostgresServer
) -> None:
    batch_id = submit(store, 80)
    enqueue(store, queue)
    worker = start(step_seconds=0.005)
    for stored in (1, 25, 50):
        eventually(lambda: store.batch(batch_id).counts.completed >= stored, "it stores")  # noqa: B023
        postgres_server.disconnect_all()
    eventually(lambda: is_complete(store, batch_id), "the batch is done")
    assert worker.stop() == 0
    assert len(completions(store, batch_id)) == 80


@sqlite
def test_cancelling_a_batch_that_runs(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    other = submit(store, 4)
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=100_000) for i in range(40)))
    enqueue(store, queue)
    worker = start()
    eventually(lambda: worker.loop.stats().running == 8 and is_complete(store, other), "it runs")
    store.cancel_batch(batch_id)
    queue.wake()
    eventually(lambda: is_complete(store, batch_id), "everything has its outcome")
    done = completions(store, batch_id)
    assert {c.status for c in done} == {RequestStatus.CANCELLED}
    assert len(done) == 40
    assert any(c.text for c in done), "the partial texts are kept"
    assert store.batch(batch_id).status == BatchStatus.CANCELLED
    assert store.batch(other).counts.completed == 4
    assert worker.loop.stats().running + worker.loop.stats().waiting == 0
    eventually(lambda: sum(queue.depths().values()) == 0, "cancelled shards leave the queue")


@sqlite
def test_cancelling_one_request_that_runs(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=100_000 if i == 2 else 8) for i in range(4)))
    enqueue(store, queue)
    start()
    eventually(lambda: store.batch(batch_id).counts.completed == 3, "its neighbours are done")
    store.cancel_request(batch_id, 2)
    eventually(lambda: is_complete(store, batch_id), "it is cancelled")
    counts = store.batch(batch_id).counts
    assert (counts.completed, counts.cancelled) == (3, 1)


@sqlite
def test_a_prompt_that_cannot_be_tokenised_concerns_itself_only(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    prompts = ["one", "untokenizable", "a bug", "four"]
    batch_id = open_batch(store, *(request(i, prompt=p, max_tokens=2) for i, p in enumerate(prompts)))
    enqueue(store, queue)
    assert start(burst=True).join() == 0
    one, two, three, four = completions(store, batch_id)
    assert (one.text, four.text) == (expected_text("one", 2), expected_text("four", 2))
    assert two.error is not None
    assert (two.status, two.error.code) == (RequestStatus.FAILED, "invalid_prompt")
    assert two.error.message == "the stub does not take this prompt"
    assert (two.worker, two.attempt, two.model) == ("w1", 1, "stub")
    assert three.error is not None
    assert (three.error.code, three.error.message) == ("tokenization_failed", "ZeroDivisionError: a bug in a tokenizer")


@sqlite
def test_a_lost_lease_writes_nothing(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    batch_id = submit(store, 4)
    enqueue(store, queue)
    worker = start()
    worker.loop.hold()
    shard = ShardId(batch_id, 0)
    eventually(lambda: worker.loop.stats().waiting == 4, "it holds the shard")
    # Its lease runs out at once, and another worker claims before it renews.
    (lease,) = _expire_and_claim(store, shard)
    eventually(lambda: worker.loop.stats().waiting == 0, "its sequences end")
    worker.loop.release()
    eventually(lambda: "lost the lease of shard" in caplog.text, "and it says so")
    assert store.renew([lease], 60) == {shard}, "the new owner still holds it"
    assert worker.stop() == 0
    assert completions(store, batch_id) == []
    assert attempts(store, batch_id) == [2]


def _expire_and_claim(store: Store, shard: ShardId) -> list[Any]:
    with store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE shards SET lease_until = 0")
    return store.claim([shard], "other", 60)


@sqlite
def test_outcomes_made_under_a_lost_lease_are_refused(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(store, 4)
    enqueue(store, queue)
    worker = start()
    worker.loop.hold()
    eventually(lambda: worker.loop.stats().waiting == 4, "it holds the shard")
    monkeypatch.setattr(store, "renew", lambda leases, ttl: {lease.shard for lease in leases})  # it does not notice
    _expire_and_claim(store, ShardId(batch_id, 0))
    worker.loop.release()
    eventually(lambda: len(worker.daemon._holdings) == 0, "the fence tells it")
    assert completions(store, batch_id) == []


@case("A-eng-10")
def test_an_engine_that_dies_is_reported_and_everything_given_back(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    batch_id = open_batch(store, *(request(i, prompt="explode" if i == 6 else f"p{i}", max_tokens=4) for i in range(8)))
    enqueue(store, queue)
    assert start(burst=True).join() == 1
    assert "the engine died: RuntimeError: the stub engine exploded" in caplog.text
    assert states(store, batch_id)["leased"] == 0 or store.claimable_count() == states(store, batch_id)["leased"]
    assert store.claimable_count() >= 1, "it is free at once"
    assert 1 in attempts(store, batch_id), "but the attempt counts"
    assert queue.depths()[Priority.DEFAULT] == store.claimable_count()
    assert [row.state for row in store.workers()] == ["failed"]
    assert Worker.all(connection=queue.connection) == []


@sqlite
@case("A-q-09")
def test_one_answer_that_cannot_be_stored_does_not_hold_up_the_others(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    batch_id = submit(store, 20, shard_size=20)
    with store._database.writing() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER poison BEFORE INSERT ON completions WHEN NEW.\"index\" = 13 AND NEW.status = 'completed' "
            "BEGIN SELECT RAISE(ABORT, 'poisoned'); END"
        )
    enqueue(store, queue)
    assert start(burst=True).join() == 0
    done = completions(store, batch_id)
    assert len(done) == 20
    failed = done[13]
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == (
        "result_not_stored",
        "the database refused the answer: poisoned",
    )
    assert store.batch(batch_id).counts.completed == 19
    assert caplog.text.count("poisoned") == 1


@sqlite
def test_suspended_workers_take_nothing(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    suspend(queue.connection)
    batch_id = submit(store, 4)
    enqueue(store, queue)
    start()
    eventually(
        lambda: [w.get_state() for w in Worker.all(connection=queue.connection)] == ["suspended"], "it is suspended"
    )
    assert store.batch(batch_id).counts.queued == 4
    resume(queue.connection)
    eventually(lambda: is_complete(store, batch_id), "it goes on")


@sqlite
def test_rq_can_stop_a_shard_and_shut_the_worker_down(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=100_000) for i in range(4)))
    enqueue(store, queue)
    worker = start()
    eventually(lambda: worker.loop.stats().running == 4, "it runs")
    send_stop_job_command(queue.connection, f"{batch_id}-0", serializer=JSONSerializer)
    eventually(lambda: is_complete(store, batch_id), "its requests are cancelled")
    assert {c.status for c in completions(store, batch_id)} == {RequestStatus.CANCELLED}
    failed = queue.queues[Priority.DEFAULT].failed_job_registry
    eventually(lambda: failed.get_job_ids() == [f"{batch_id}-0"], "RQ shows it as stopped")
    send_shutdown_command(queue.connection, "w1")
    assert worker.join() == 0


@sqlite
def test_it_ends_when_asked(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 8)
    enqueue(store, queue)
    assert start(until=lambda: is_complete(store, batch_id)).join() == 0
    assert len(completions(store, batch_id)) == 8


@sqlite
def test_a_name_that_rq_cannot_take_is_refused(settings: Settings, store: Store, queue: JobQueue) -> None:
    with pytest.raises(UsageError, match="use letters, digits"):
        ThreadWorker(settings, store, queue, "my worker\x1b[2J")


@sqlite
def test_an_idle_worker_gets_its_share(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    """One is busy with more than it can run at once; the second, which comes later, takes what is left."""
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=100_000) for i in range(64)))
    enqueue(store, queue)
    first = start("first")
    eventually(lambda: first.loop.stats().running == 8, "the first is full")
    eventually(lambda: first.loop.stats().waiting >= 16, "and has half of that and 16 at least in waiting")
    held = len(first.daemon._holdings)
    assert held <= 8, f"it hoards {held} of 16 shards"
    second = start("second")
    eventually(lambda: second.loop.stats().running == 8, "the second is full too")
    store.cancel_batch(batch_id)
    eventually(lambda: is_complete(store, batch_id), "all is cancelled")


@sqlite
def test_a_late_comer_gets_what_the_first_has_not_begun(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=40) for i in range(16)), shard_size=8)
    enqueue(store, queue)
    first = start("first", step_seconds=0.01)
    eventually(lambda: first.loop.stats().running == 8 and first.loop.stats().waiting == 8, "it holds both shards")
    first.loop.hold()
    start("second", step_seconds=0.01)
    eventually(lambda: store.batch(batch_id).counts.completed == 8, "the second has run the shard that waited")
    first.loop.release()
    eventually(lambda: is_complete(store, batch_id), "all is done")
    assert Counter(c.worker for c in completions(store, batch_id)) == {"first": 8, "second": 8}
    assert attempts(store, batch_id) == [1, 1]
    assert store.batch(batch_id).counts.completed == 16


@sqlite
def test_a_burst_waits_for_a_worker_that_may_be_dead(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "batchjobs.worker")
    batch_id = submit(store, 4)
    (dead,) = store.claim([ShardId(batch_id, 0)], "dead", 1.5)
    worker = start(burst=True)
    assert worker.join() == 0
    assert is_complete(store, batch_id)
    assert attempts(store, batch_id) == [2]
    assert "waiting for the leases of dead" in caplog.text
    assert not store.record([(dead, completions(store, batch_id)[0])]).done


@sqlite
def test_a_burst_does_not_wait_for_a_worker_that_lives(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit(store, 4)
    enqueue(store, queue)
    living = start("living", step_seconds=0.05)
    eventually(lambda: living.loop.stats().running == 4, "it has begun")  # else it would share
    living.loop.hold()
    assert start("burst", burst=True).join() == 0
    assert not is_complete(store, batch_id)
    assert living.stop() == 0
