"""Contract tests on RQ's internals: what `rq info`, its registries and its workers' list show at each stage."""

from __future__ import annotations

import pickle
import queue as queues
import signal
import threading
import time
import zlib
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from rq import Queue, Worker
from rq.cli import main as rq_cli
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from batchjobs.errors import ConnectionFailed, UsageError
from batchjobs.queue import JobQueue
from batchjobs.types import Priority, ShardId
from tests.support.cases import case
from tests.support.waiting import eventually
from workers.command_listener import Message, MessageKind
from workers.queue_view import QueueView
from workers.rq_states import Ending
from workers.rq_worker import RqWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.redis import RedisServer

BATCH = "01J8ZK3T5Q0000000000000000"


def shard(number: int) -> ShardId:
    return ShardId(BATCH, number)


def entries(*numbers: int, priority: Priority = Priority.DEFAULT) -> list[tuple[ShardId, Priority]]:
    return [(shard(number), priority) for number in numbers]


@pytest.fixture
def queue(redis_url: str) -> Iterator[JobQueue]:
    queue = JobQueue(redis_url)
    yield queue
    queue.close()


@pytest.fixture
def worker(redis_url: str) -> Iterator[RqWorker]:
    worker = RqWorker(redis_url, "w1", lease_seconds=15)
    worker.open()
    yield worker
    worker.close()


class Books:
    """What RQ's own tools read, with RQ's own classes."""

    def __init__(self, queue: JobQueue) -> None:
        self.connection = queue.connection
        self.queue = Queue("batchjobs-default", connection=queue.connection, serializer=JSONSerializer)

    def state(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Shard numbers queued, started, finished and failed."""
        lists = (
            self.queue.job_ids,
            self.queue.started_job_registry.get_job_ids(),
            self.queue.finished_job_registry.get_job_ids(),
            self.queue.failed_job_registry.get_job_ids(),
        )
        queued, started, finished, failed = ([ShardId.parse(i).shard_no for i in ids] for ids in lists)
        return queued, sorted(started), sorted(finished), sorted(failed)

    def status(self, number: int) -> JobStatus:
        return Job.fetch(str(shard(number)), connection=self.connection, serializer=JSONSerializer).get_status()

    def worker(self) -> Worker:
        (found,) = Worker.all(connection=self.connection)
        return found

    def intermediate(self) -> int:
        return self.connection.llen(self.queue.intermediate_queue_key)

    def info(self) -> str:
        url = f"unix://{self.connection.connection_pool.connection_kwargs['path']}"
        result = CliRunner().invoke(rq_cli, ["info", "--raw", "-u", url])
        assert result.exit_code == 0, result.output
        return result.output


@pytest.fixture
def books(queue: JobQueue) -> Books:
    return Books(queue)


def heard(worker: RqWorker) -> Message:
    """The next message that is not just the wake-up call of an enqueue."""
    while (message := worker.messages.get(timeout=10)).kind == MessageKind.WAKE:
        pass
    return message


def take(worker: RqWorker, count: int) -> list[ShardId]:
    popped = worker.pop(count, worker.look())
    worker.start(popped)
    return popped


def test_queued_started_finished(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1, 2, 3))
    assert books.state() == ([1, 2, 3], [], [], [])
    assert books.worker().get_state() == "idle"

    assert worker.pop(2, worker.look()) == [shard(1), shard(2)]
    assert books.intermediate() == 2
    worker.start([shard(1), shard(2)])
    assert books.state() == ([3], [1, 2], [], [])
    assert books.intermediate() == 0
    assert books.status(1) == JobStatus.STARTED
    seen = books.worker()
    assert seen.get_state() == "busy"
    assert {e.job_id for e in seen.get_current_executions()} == {str(shard(1)), str(shard(2))}
    assert "queue batchjobs-default 1, 2 executing, 0 finished, 0 failed" in books.info()

    worker.end(shard(1), Ending.SUCCESS)
    worker.flush()
    assert books.state() == ([3], [2], [1], [])
    assert books.worker().get_state() == "busy"
    worker.end(shard(2), Ending.SUCCESS)
    worker.flush()
    assert books.state() == ([3], [], [1, 2], [])
    seen = books.worker()
    assert seen.get_state() == "idle"
    assert seen.successful_job_count == 2
    assert seen.failed_job_count == 0
    assert seen.get_current_executions() == []
    assert books.status(1) == JobStatus.FINISHED
    assert 0 < queue.connection.ttl(Job.key_for(str(shard(1)))) <= 300
    assert "queue batchjobs-default 1, 0 executing, 2 finished, 0 failed" in books.info()


def test_nothing_of_a_finished_shard_stays_for_ever(queue: JobQueue, worker: RqWorker) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    worker.end(shard(1), Ending.SUCCESS)
    worker.flush()
    left = [key for key in queue.connection.keys(f"*{BATCH}*") if queue.connection.ttl(key) == -1]
    assert left == []


def test_queues_are_served_in_order_of_priority(queue: JobQueue, worker: RqWorker) -> None:
    queue.enqueue([*entries(1, priority=Priority.LOW), *entries(2, 3), *entries(4, priority=Priority.HIGH)])
    view = worker.look()
    assert view == QueueView(depths=(1, 2, 1), idle_others=0, suspended=False)
    assert worker.pop(3, view) == [shard(4), shard(2), shard(3)]


def test_popping_more_than_there_is_takes_what_there_is(queue: JobQueue, worker: RqWorker) -> None:
    queue.enqueue(entries(1))
    assert worker.pop(5, QueueView(depths=(2, 9, 9), idle_others=0, suspended=False)) == [shard(1)]


def test_a_refused_shard_leaves_no_trace(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1))
    worker.drop(worker.pop(1, worker.look()))
    assert books.state() == ([], [], [], [])
    assert books.intermediate() == 0
    assert not Job.exists(str(shard(1)), queue.connection)


def test_refusing_a_second_entry_does_not_hurt_the_running_one(
    queue: JobQueue, worker: RqWorker, books: Books, redis_url: str
) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    other = RqWorker(redis_url, "w2", lease_seconds=15)
    queue.connection.rpush(books.queue.key, str(shard(1)))
    other.drop(other.pop(1, other.look()))
    assert books.state() == ([], [1], [], [])
    assert books.status(1) == JobStatus.STARTED


def test_missing_and_cancelled_jobs_are_dropped(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1, 2, 3))
    queue.connection.delete(Job.key_for(str(shard(1))))
    Job.fetch(str(shard(2)), connection=queue.connection, serializer=JSONSerializer).cancel()
    queue.connection.lpush(books.queue.key, str(shard(2)))
    assert worker.pop(3, worker.look()) == [shard(3)]
    assert books.intermediate() == 1


class _Bomb:
    exploded = False

    def __setstate__(self, state: object) -> None:
        _Bomb.exploded = True


@case("A-sec-01")
def test_foreign_entries_are_rejected_and_run_nothing(
    queue: JobQueue, worker: RqWorker, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    queue.enqueue(entries(1))
    bomb = zlib.compress(pickle.dumps(_Bomb()))
    for job_id in ("evil", str(shard(7)), "evil\x1b[2J"):
        queue.connection.hset(Job.key_for(job_id), mapping={"data": bomb, "result": pickle.dumps(_Bomb())})
        queue.connection.lpush(books.queue.key, job_id)
    queue.connection.hset(Job.key_for(str(shard(8))), mapping={"created_at": "not a date", "data": b"x"})
    queue.connection.lpush(books.queue.key, str(shard(8)))
    popped = worker.pop(5, worker.look())
    assert popped == [shard(7), shard(1)], "an id in our form is SQL's to judge; nothing else of it is read"
    worker.drop([shard(7)])
    worker.start([shard(1)])
    assert books.state()[1] == [1]
    assert books.intermediate() == 0
    assert not _Bomb.exploded
    assert "'evil\\x1b[2J'" in caplog.text


def test_given_back_shards_stand_in_front_in_their_order(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1, 2, 3, 4))
    take(worker, 2)
    assert worker.give_back() == 2
    assert books.state() == ([1, 2, 3, 4], [], [], [])
    assert books.status(1) == JobStatus.QUEUED
    assert books.worker().get_state() == "idle"
    assert Job.fetch(str(shard(1)), connection=queue.connection, serializer=JSONSerializer).worker_name is None


def test_a_stopped_shard_ends_as_stopped(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1, 2))
    take(worker, 2)
    send_stop_job_command(queue.connection, str(shard(2)), serializer=JSONSerializer)
    assert heard(worker) == Message(MessageKind.STOP_SHARD, shard(2))
    worker.end(shard(2), Ending.STOPPED)
    worker.flush()
    assert books.state() == ([], [1], [], [2])
    assert books.status(2) == JobStatus.STOPPED
    assert books.worker().failed_job_count == 1


def test_a_lost_shard_is_left_to_its_new_owner(queue: JobQueue, worker: RqWorker, books: Books, redis_url: str) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    queue.enqueue(entries(1))
    other = RqWorker(redis_url, "w2", lease_seconds=15)
    take(other, 1)
    worker.end(shard(1), Ending.LOST)
    worker.flush()
    assert books.state() == ([], [1], [], [])
    assert books.status(1) == JobStatus.STARTED
    assert books.worker().get_state() == "idle"
    assert books.worker().successful_job_count == 0


def test_shutdown_and_wake_only_append_to_the_messages(queue: JobQueue, worker: RqWorker) -> None:
    send_shutdown_command(queue.connection, "w1")
    assert heard(worker) == Message(MessageKind.SHUTDOWN)
    queue.wake()
    assert worker.messages.get(timeout=10) == Message(MessageKind.WAKE)


def test_foreign_messages_are_passed_over(queue: JobQueue, worker: RqWorker) -> None:
    for message in ("not json", "[]", '{"command": "kill-horse"}', '{"command": "stop-job", "job_id": "x"}'):
        queue.connection.publish(worker.pubsub_channel_name, message)
    send_shutdown_command(queue.connection, "w1")
    assert heard(worker) == Message(MessageKind.SHUTDOWN)


@case("A-q-05")
def test_commands_are_heard_again_after_a_restart_of_redis(redis_server: RedisServer, worker: RqWorker) -> None:
    redis_server.restart()
    client = redis_server.client()
    eventually(lambda: client.publish(worker.pubsub_channel_name, '{"command": "shutdown"}'), "it listens again")
    assert heard(worker) == Message(MessageKind.SHUTDOWN)
    client.close()


def test_paused_by_an_operator_it_shows_as_suspended_whatever_it_holds(
    queue: JobQueue, worker: RqWorker, books: Books
) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    assert books.worker().get_state() == "busy"
    worker.is_paused = True
    worker.beat()
    assert books.worker().get_state() == "suspended"
    assert books.state() == ([], [1], [], []), "it keeps what it holds"
    worker.is_paused = False
    worker.beat()
    assert books.worker().get_state() == "busy"


def test_suspended_and_resumed(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    suspend(queue.connection)
    assert worker.look().suspended
    assert books.worker().get_state() == "suspended"
    worker.beat()
    assert books.worker().get_state() == "suspended"
    resume(queue.connection)
    assert not worker.look().suspended
    assert books.worker().get_state() == "idle"


def test_idle_neighbours_are_counted(queue: JobQueue, worker: RqWorker, redis_url: str) -> None:
    other = RqWorker(redis_url, "w2", lease_seconds=15)
    other.open()
    assert worker.look().idle_others == 1
    queue.enqueue(entries(1))
    take(other, 1)
    assert worker.look().idle_others == 0
    other.close()


def test_a_beat_keeps_executions_alive_whoever_looks(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    registry = books.queue.started_job_registry.key
    ((member, first),) = queue.connection.zrange(registry, 0, -1, withscores=True)
    queue.connection.zadd(registry, {member: first - 70})
    queue.connection.expire(worker.key, 5)
    worker.beat()
    ((_, renewed),) = queue.connection.zrange(registry, 0, -1, withscores=True)
    assert renewed >= first
    assert queue.connection.ttl(worker.key) > 60
    assert books.state() == ([], [1], [], [])


def test_a_look_after_a_late_heartbeat_queues_the_shard_again_and_the_next_beat_corrects_it(
    queue: JobQueue, worker: RqWorker, books: Books
) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    registry = books.queue.started_job_registry.key
    ((member, _),) = queue.connection.zrange(registry, 0, -1, withscores=True)
    queue.connection.zadd(registry, {member: 1})
    assert "queue batchjobs-default 1, 0 executing, 0 finished, 0 failed" in books.info(), "RQ's clean-up requeues it"
    worker.beat()
    assert books.state() == ([1], [1], [], [])
    assert books.status(1) == JobStatus.STARTED
    worker.drop(worker.pop(1, worker.look()))  # SQL refuses the second entry
    assert books.state() == ([], [1], [], [])


def test_what_a_flushed_redis_lost_is_written_again(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1))
    take(worker, 1)
    queue.connection.flushall()
    worker.beat()
    assert books.state() == ([], [1], [], [])
    assert books.status(1) == JobStatus.STARTED
    seen = books.worker()
    assert seen.get_state() == "busy"
    assert [e.job_id for e in seen.get_current_executions()] == [str(shard(1))]
    worker.end(shard(1), Ending.SUCCESS)
    worker.flush()
    assert books.state() == ([], [], [1], [])
    assert "queue batchjobs-default 0, 0 executing, 1 finished, 0 failed" in books.info()


def test_what_ended_while_redis_was_away_is_told_later(
    redis_server: RedisServer, queue: JobQueue, worker: RqWorker, books: Books
) -> None:
    queue.enqueue(entries(1, 2))
    take(worker, 2)
    redis_server.kill()
    worker.end(shard(1), Ending.SUCCESS)
    for attempt in (worker.flush, worker.beat, worker.look):
        with pytest.raises(ConnectionFailed, match="cannot be reached"):
            attempt()
    redis_server.start()
    worker.beat()
    worker.flush()
    assert books.state() == ([], [2], [1], [])


def test_shards_leased_without_redis_show_up_with_the_next_beat(worker: RqWorker, books: Books) -> None:
    worker.adopt(entries(5))
    assert books.state() == ([], [], [], [])
    worker.beat()
    assert books.state() == ([], [5], [], [])
    worker.end(shard(5), Ending.SUCCESS)
    worker.flush()
    assert books.state() == ([], [], [5], [])


@case("A-q-07")
def test_a_full_redis_lets_ended_shards_go(queue: JobQueue, worker: RqWorker, books: Books) -> None:
    queue.enqueue(entries(1, 2))
    take(worker, 2)
    queue.connection.config_set("maxmemory", 1)
    worker.end(shard(1), Ending.SUCCESS)
    worker.flush()
    assert not Job.exists(str(shard(1)), queue.connection)
    with pytest.raises(ConnectionFailed, match="full"):
        worker.beat()
    queue.connection.config_set("maxmemory", 0)
    worker.beat()
    assert books.state() == ([], [2], [], [])


def test_a_worker_is_listed_from_birth_to_death(queue: JobQueue, redis_url: str) -> None:
    worker = RqWorker(redis_url, "w9", lease_seconds=15)
    assert Worker.all(connection=queue.connection) == []
    worker.open()
    (seen,) = Worker.all(connection=queue.connection)
    assert (seen.name, seen.get_state()) == ("w9", "idle")
    assert seen.queue_names() == ["batchjobs-high", "batchjobs-default", "batchjobs-low"]
    assert 60 < queue.connection.ttl(worker.key) <= 75
    worker.close()
    assert Worker.all(connection=queue.connection) == []


def test_a_name_is_taken_over_only_from_the_dead(queue: JobQueue, worker: RqWorker, redis_url: str) -> None:
    namesake = RqWorker(redis_url, "w1", lease_seconds=15)
    queue.connection.hset(worker.key, mapping={"hostname": "elsewhere", "pid": 1})
    with pytest.raises(UsageError, match=r"a worker named 'w1' runs already.*--name"):
        namesake.open()
    queue.connection.expire(worker.key, 59)  # silent for longer than its lease
    namesake.open()
    namesake.close()
    worker.open()


def test_rq_loops_and_signal_handlers_stay_out(worker: RqWorker) -> None:
    with pytest.raises(NotImplementedError):
        worker.work()
    assert worker.connection.connection_pool.connection_kwargs["socket_timeout"] == 10
    assert worker.connection.connection_pool.connection_kwargs["retry"].get_retries() == 0
    assert "commands" in {thread.name for thread in threading.enumerate()}


def test_a_signal_in_the_wait_for_a_command_does_not_make_it_last_for_ever(worker: RqWorker) -> None:
    """Its handler may take longer than what is left of the wait: on a busy machine any handler does."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(0.2))
    rescue = threading.Timer(5, lambda: worker.messages.put(Message(MessageKind.WAKE)))
    rescue.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(queues.Empty):
            worker.messages.get(timeout=0.1)
    finally:
        rescue.cancel()
        signal.signal(signal.SIGALRM, before)
