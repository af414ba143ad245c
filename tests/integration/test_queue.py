"""The producers' side of the queue, on a real Redis."""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import RedisError
from rq import Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from batchjobs.errors import BatchjobsError, ConnectionFailed, UsageError
from batchjobs.queue import WAKE_CHANNEL, JobQueue, run_shard
from batchjobs.redis_client import connect
from batchjobs.types import Priority, ShardId
from tests.support.cases import case
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.redis import RedisServer

BATCH = "01J8ZK3T5Q0000000000000000"


def shards(*numbers: int, priority: Priority = Priority.DEFAULT) -> list[tuple[ShardId, Priority]]:
    return [(ShardId(BATCH, number), priority) for number in numbers]


def waiting(queue: JobQueue, priority: Priority = Priority.DEFAULT) -> list[int]:
    return [ShardId.parse(job_id).shard_no for job_id in queue.queues[priority].job_ids]


@pytest.fixture
def queue(redis_url: str) -> Iterator[JobQueue]:
    queue = JobQueue(redis_url)
    yield queue
    queue.close()


def test_a_shard_becomes_one_small_json_job(queue: JobQueue) -> None:
    assert queue.enqueue(shards(7)) == 1
    job = Queue("batchjobs-default", connection=queue.connection, serializer=JSONSerializer).jobs[0]
    assert job.id == f"{BATCH}-7"
    assert job.func_name == "batchjobs.queue.run_shard"
    assert job.args == [BATCH, 7]
    assert job.timeout == -1
    assert job.retries_left == 10
    assert job.get_retry_interval() == 0
    assert job.description == f"shard {BATCH}-7"
    assert job.get_status() == JobStatus.QUEUED


def test_each_priority_has_its_queue_and_order_is_kept(queue: JobQueue) -> None:
    queue.enqueue([*shards(1, 2, 3), *shards(4, priority=Priority.HIGH), *shards(5, 6, priority=Priority.LOW)])
    assert queue.depths() == {Priority.HIGH: 1, Priority.DEFAULT: 3, Priority.LOW: 2}
    assert waiting(queue) == [1, 2, 3]
    assert waiting(queue, Priority.LOW) == [5, 6]


def test_many_shards_go_in_by_chunks(queue: JobQueue) -> None:
    assert queue.enqueue(shards(*range(1203))) == 1203
    assert waiting(queue) == list(range(1203))


@case("A-q-02")
def test_an_id_that_waits_is_not_queued_twice(queue: JobQueue) -> None:
    queue.enqueue(shards(1, 2))
    assert queue.enqueue(shards(2, 1, 3)) == 1
    assert waiting(queue) == [1, 2, 3]


def test_the_same_id_twice_in_one_call_is_queued_once(queue: JobQueue) -> None:
    assert queue.enqueue(shards(1, 1, 2, 1)) == 2
    assert waiting(queue) == [1, 2]


def test_at_front_moves_what_waits_and_keeps_the_order(queue: JobQueue) -> None:
    queue.enqueue(shards(1, 2, 3))
    assert queue.enqueue(shards(3, 9), at_front=True) == 2
    assert waiting(queue) == [3, 9, 1, 2]


def test_two_producers_at_once_leave_one_entry_each(queue: JobQueue, redis_url: str) -> None:
    def produce() -> None:
        producer = JobQueue(redis_url)
        producer.enqueue(shards(*range(300)))
        producer.close()

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waiting(queue)) == list(range(300))


def test_queueing_again_wipes_the_traces_of_an_earlier_life(queue: JobQueue) -> None:
    queue.enqueue(shards(1))
    job = queue.queues[Priority.DEFAULT].jobs[0]
    queue.connection.lmove(queue.queues[Priority.DEFAULT].key, queue.queues[Priority.DEFAULT].intermediate_queue_key)
    queue.connection.expire(job.key, 5)
    queue.queues[Priority.DEFAULT].failed_job_registry.add(job, exc_string="worker died")
    queue.enqueue(shards(1))
    assert waiting(queue) == [1]
    assert queue.connection.ttl(job.key) == -1, "a queued job must not expire"
    assert queue.connection.llen(queue.queues[Priority.DEFAULT].intermediate_queue_key) == 0
    assert queue.queues[Priority.DEFAULT].failed_job_registry.count == 0
    assert Job.fetch(job.id, connection=queue.connection, serializer=JSONSerializer).get_status() == JobStatus.QUEUED


def test_missing_is_what_no_queue_holds(queue: JobQueue) -> None:
    queue.enqueue([*shards(1), *shards(2, priority=Priority.HIGH)])
    asked = [*shards(1, 5), *shards(2, priority=Priority.HIGH), *shards(3, priority=Priority.LOW)]
    assert queue.missing(asked) == [*shards(5), *shards(3, priority=Priority.LOW)]


def test_a_popped_shard_is_missing_only_after_a_while(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.enqueue(shards(1))
    default = queue.queues[Priority.DEFAULT]
    queue.connection.lmove(default.key, default.intermediate_queue_key)
    assert queue.missing(shards(1)) == []
    monkeypatch.setattr("batchjobs.queue.STRANDED_SECONDS", -1)
    assert queue.missing(shards(1)) == shards(1)
    queue.tidy()
    assert queue.connection.llen(default.intermediate_queue_key) == 0


@case("A-q-10")
def test_tidy_survives_a_job_whose_hash_was_deleted(queue: JobQueue) -> None:
    default = queue.queues[Priority.DEFAULT]
    queue.connection.zadd(default.started_job_registry.key, {f"{BATCH}-1:abc": 1, f"{BATCH}-2:def": 1})
    queue.tidy()
    assert queue.connection.zcard(default.started_job_registry.key) == 0


def test_enqueue_wakes_listening_workers(queue: JobQueue) -> None:
    heard = queue.connection.pubsub(ignore_subscribe_messages=True)
    heard.subscribe(WAKE_CHANNEL)
    heard.get_message(timeout=1)
    queue.enqueue(shards(1))
    assert eventually(lambda: heard.get_message(timeout=0.1), "the wake-up arrives")["type"] == "message"
    heard.close()


def test_one_process_reconciles_at_a_time(queue: JobQueue, redis_url: str) -> None:
    other = JobQueue(redis_url)
    with queue.reconciling() as mine:
        assert mine
        with other.reconciling() as theirs:
            assert not theirs
        with other.reconciling() as still:
            assert not still, "leaving without the lock must not free it"
    with other.reconciling() as theirs:
        assert theirs
    other.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_an_evicting_redis_is_refused(redis_server: RedisServer, policy: str) -> None:
    redis_server.client().config_set("maxmemory-policy", policy)
    with pytest.raises(UsageError, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
        JobQueue(redis_server.url)


@case("A-sec-06")
def test_an_unreachable_redis_is_named_without_its_password() -> None:
    with pytest.raises(ConnectionFailed) as caught:
        JobQueue("redis://:s3cr%40t@127.0.0.1:1/0")
    assert "127.0.0.1:1" in str(caught.value)
    for secret in ("s3cr%40t", "s3cr@t"):
        assert secret not in str(caught.value)
        assert secret not in str(caught.value.__cause__)


@case("A-sec-06")
def test_a_wrong_password_is_reported_without_it(redis_server: RedisServer) -> None:
    redis_server.client().config_set("requirepass", "right")
    redis_server.client()
    with pytest.raises(ConnectionFailed) as caught:
        JobQueue(f"unix://:wr0ng@{redis_server.socket}")
    assert "wr0ng" not in str(caught.value)


def test_what_is_no_redis_url_is_said_so() -> None:
    with pytest.raises(UsageError, match="redis://, rediss:// or unix://"):
        JobQueue("http://:s3cret@host/")


@case("A-q-07")
def test_a_full_redis_says_so_and_what_is_missing_goes_in_later(redis_server: RedisServer) -> None:
    queue = JobQueue(redis_server.url)
    used = int(queue.connection.info("memory")["used_memory"])
    queue.connection.config_set("maxmemory", used + 2_000_000)
    with pytest.raises(ConnectionFailed, match="full"):
        queue.enqueue(shards(*range(6_000)))
    queue.connection.config_set("maxmemory", 0)
    everything = shards(*range(6_000))
    missing = queue.missing(everything)
    assert 0 < len(missing) < 6_000
    assert queue.enqueue(missing) == len(missing)
    assert sorted(waiting(queue)) == list(range(6_000))
    queue.close()


class _CutAfterRunning(socketserver.BaseRequestHandler):
    """Passes what it gets to Redis, and hangs up instead of passing on the answer to an LMOVE."""

    def handle(self) -> None:
        upstream = socket.socket(socket.AF_UNIX)
        upstream.connect(self.server.socket_path)  # type: ignore[attr-defined]
        while data := self.request.recv(65536):
            upstream.sendall(data)
            answer = upstream.recv(65536)
            if b"LMOVE" in data:
                break
            self.request.sendall(answer)
        upstream.close()


def test_a_command_that_was_cut_is_not_sent_again(redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.rpush("from", "a", "b", "c")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _CutAfterRunning) as proxy:
        proxy.socket_path = str(redis_server.socket)  # type: ignore[attr-defined]
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        cut = connect(f"redis://127.0.0.1:{proxy.server_address[1]}/0")
        with pytest.raises(RedisError):
            cut.lmove("from", "to")
        cut.close()
        proxy.shutdown()
    assert client.lrange("to", 0, -1) == [b"a"]
    assert client.lrange("from", 0, -1) == [b"b", b"c"]
    client.close()


@case("A-eng-11")
def test_the_job_function_refuses_a_plain_rq_worker() -> None:
    with pytest.raises(BatchjobsError, match="start `batchjobs worker` instead"):
        run_shard(BATCH, 3)


def test_the_shards_of_a_cancelled_batch_leave_the_queues_and_others_stay(queue: JobQueue) -> None:
    other = "01J8ZK3T5Q0000000000000001"
    queue.enqueue([*shards(1, 2), (ShardId(other, 7), Priority.DEFAULT), *shards(3), *shards(4, priority=Priority.LOW)])
    queue.enqueue([(ShardId(other, 8), Priority.DEFAULT)])
    assert queue.drop_batch(BATCH) == 4
    assert queue.queues[Priority.DEFAULT].job_ids == [f"{other}-7", f"{other}-8"]
    assert queue.depths()[Priority.LOW] == 0
    assert [Job.exists(f"{BATCH}-{number}", queue.connection) for number in (1, 2, 3, 4)] == [False] * 4
    assert Job.exists(f"{other}-7", queue.connection)
    assert queue.drop_batch(BATCH) == 0
