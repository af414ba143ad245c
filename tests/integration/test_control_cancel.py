"""Cancelling and draining, on a stub engine, a real Redis and a real database."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from rq.job import Job

from batchjobs.errors import ConnectionFailed
from batchjobs.queue import JobQueue
from batchjobs.types import BatchStatus, Command, CommandKind, RequestStatus
from tests.support.batches import create, request, select, submit
from tests.support.cases import case
from tests.support.running import (
    attempts,
    checkpointed,
    completions,
    enqueue,
    is_complete,
    open_batch,
    open_long,
    queue,
    settings,
    sqlite,
    start,
    state,
)
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ThreadWorker

if TYPE_CHECKING:
    from batchjobs.store import Store

__all__ = ["queue", "settings", "start"]


class TestCancelling:
    @sqlite
    @case("A-eng-05")
    def test_every_choice_stops_again_and_again(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        worker = start()
        loop: Any = worker.loop
        for _ in range(20):
            batch_id = open_batch(store, request(0, prompt="a", n=4, max_tokens=4000, ignore_eos=True))
            enqueue(store, queue)
            eventually(lambda: loop.stats().running == 4 and loop.progress(), "all four run")
            store.cancel_request(batch_id, 0)
            queue.wake()
            eventually(lambda: is_complete(store, batch_id), "it has its outcome")  # noqa: B023
            (result,) = store.results(batch_id)
            assert [c.status for c in result.choices] == [RequestStatus.CANCELLED] * 4
            assert min(len(c.token_ids) for c in result.choices) > 0
            stats = loop.stats()
            assert (stats.running, stats.waiting, stats.suspended, stats.kv_usage_ratio) == (0, 0, 0, 0.0)
        eventually(lambda: len(worker.daemon._holdings) == 0, "nothing is held")
        assert loop._running == loop._waiting == {}
        assert not loop._cancelled

    @case("A-eng-06")
    def test_at_any_moment_there_is_one_outcome(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        worker = start(step_seconds=0.004)
        chance = random.Random(1)
        batches = []
        for _ in range(25):
            batch_id = submit(store, 1)
            enqueue(store, queue)
            deadline = time.monotonic() + chance.uniform(0, 0.1)
            while time.monotonic() < deadline and not is_complete(store, batch_id):
                pass
            counts = store.cancel_batch(batch_id)
            queue.wake()
            batches.append((batch_id, counts))
        seen: Counter[RequestStatus] = Counter()
        for batch_id, at_once in batches:
            eventually(lambda: is_complete(store, batch_id), "it has its outcome")  # noqa: B023
            (done,) = completions(store, batch_id)
            seen[done.status] += 1
            info = store.batch(batch_id)
            assert info.counts.done == info.counts.total == 1
            if done.status == RequestStatus.COMPLETED:
                assert done.text == expected_text("prompt 0", 8)
                assert info.counts.completed == 1
            else:
                assert (done.status, info.counts.cancelled) == (RequestStatus.CANCELLED, 1)
                assert info.status == BatchStatus.CANCELLED
            if at_once.completed:
                assert done.status == RequestStatus.COMPLETED, "what was too late stays"
            if at_once.cancelled:
                assert done.status == RequestStatus.CANCELLED, "what took effect at once stays"
        assert seen[RequestStatus.CANCELLED]
        eventually(lambda: len(worker.daemon._holdings) == 0, "nothing is held")
        rq = next(iter(queue.queues.values()))
        eventually(lambda: rq.started_job_registry.count == 0, "RQ runs nothing")
        jobs = [f"{batch_id}-0" for batch_id, _ in batches]
        found = Job.fetch_many(jobs, connection=queue.connection, serializer=rq.serializer)
        assert {job.get_status() for job in found if job is not None} <= {"finished"}

    @sqlite
    @case("A-eng-07")
    def test_what_is_done_stays_done(self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
        batch_id = create(store, shard_size=4)
        store.add_requests(
            batch_id, [request(i, prompt=f"prompt {i}", max_tokens=8 if i < 40 else 100_000) for i in range(100)]
        )
        store.open_batch(batch_id)
        enqueue(store, queue)
        start()
        eventually(lambda: store.batch(batch_id).counts.completed == 40, "40 are done")
        for _ in range(2):
            store.cancel_batch(batch_id)
            queue.wake()
            eventually(lambda: is_complete(store, batch_id), "the rest is cancelled")
            counts = store.batch(batch_id).counts
            assert (counts.completed, counts.cancelled, counts.total) == (40, 60, 100)
        done = completions(store, batch_id)
        assert [c.text for c in done[:40]] == [expected_text(f"prompt {i}", 8) for i in range(40)]
        assert {c.status for c in done[40:]} == {RequestStatus.CANCELLED}
        assert store.batch(batch_id).status == BatchStatus.CANCELLED

    @sqlite
    def test_without_a_message_it_is_heard_within_two_seconds(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        batch_id = open_long(store, queue, 4)
        worker = start()
        eventually(lambda: worker.loop.stats().running == 4, "it runs")
        store.cancel_batch(batch_id)
        eventually(lambda: worker.loop.stats().running == 0, "it has stopped", 2)


class TestDraining:
    @pytest.fixture
    def drain(self, store: Store, queue: JobQueue) -> Callable[..., Command]:
        def drain(release: bool = False) -> Command:
            (command,) = store.order(CommandKind.DRAIN, ["w1"], arguments={"release": release}, by="ann@host")
            queue.wake()
            return command

        return drain

    def test_it_finishes_what_it_holds_and_ends(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, drain: Callable[..., Command]
    ) -> None:
        batch_id = open_long(store, queue, 48, max_tokens=100)
        worker = start(step_seconds=0.005)
        eventually(lambda: worker.loop.stats().waiting == 16, "it has taken what it wants")
        command = drain()
        eventually(lambda: state(store) == "draining", "it says so")
        assert worker.join() == 0
        counts = store.batch(batch_id).counts
        assert counts.completed >= 24
        assert counts.queued == 48 - counts.completed > 0
        (told,) = store.commands([command.id])
        assert told.result is not None, told.error
        assert told.result["given_back"] == 0
        assert 8 < told.result["finished"] <= counts.completed
        assert set(attempts(store, batch_id)) == {0, 1}
        assert checkpointed(store, batch_id) == {}
        assert [row.state for row in store.workers()] == ["stopped"]

    @sqlite
    def test_it_gives_back_what_it_holds_and_ends(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, drain: Callable[..., Command]
    ) -> None:
        batch_id = open_long(store, queue, 24)
        worker = start()
        eventually(lambda: worker.loop.stats().waiting == 16 and worker.loop.stats().generated_tokens, "it is full")
        command = drain(release=True)
        assert worker.join() == 0
        (told,) = store.commands([command.id])
        assert told.result == {"finished": 0, "given_back": 24}
        assert store.batch(batch_id).counts.queued == 24
        assert sum(checkpointed(store, batch_id).values()) == worker.loop.stats().generated_tokens
        assert set(attempts(store, batch_id)) == {0}
        assert sum(queue.depths().values()) == 6, "another worker finds it at once"

    @sqlite
    def test_what_could_not_be_released_is_released_at_the_end(
        self,
        start: Callable[..., ThreadWorker],
        store: Store,
        queue: JobQueue,
        drain: Callable[..., Command],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        release = store.release

        def away_until_the_end(leases: Any) -> None:
            if threading.current_thread().name != "w1":
                raise ConnectionFailed("the database is away")
            release(leases)

        batch_id = open_long(store, queue, 8)
        worker = start()
        eventually(lambda: worker.loop.stats().running == 8, "it works")
        monkeypatch.setattr(store, "release", away_until_the_end)
        drain(release=True)
        assert worker.join() == 0
        assert store.batch(batch_id).counts.queued == 8
        assert set(attempts(store, batch_id)) == {0}, "it is no crash"

    @sqlite
    def test_what_is_paused_goes_back(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, drain: Callable[..., Command]
    ) -> None:
        paused, other = open_long(store, queue, 4), open_long(store, queue, 4, max_tokens=400)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().running == 8, "it runs")
        store.pause_batch(paused)
        queue.wake()
        eventually(lambda: worker.loop.stats().suspended == 4, "one is paused")
        command = drain()
        assert worker.join() == 0
        assert is_complete(store, other)
        (told,) = store.commands([command.id])
        assert told.result == {"finished": 4, "given_back": 4}
        assert len(checkpointed(store, paused)) == 4

    @sqlite
    def test_cancels_and_the_end_are_heard_meanwhile(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, drain: Callable[..., Command]
    ) -> None:
        cancelled, other = open_long(store, queue, 4), open_long(store, queue, 4)
        worker = start()
        eventually(lambda: worker.loop.stats().running == 8, "it runs")
        command = drain()
        eventually(lambda: state(store) == "draining", "it drains")
        store.cancel_batch(cancelled)
        queue.wake()
        eventually(lambda: is_complete(store, cancelled), "it is cancelled")
        assert worker.stop() == 0
        (told,) = store.commands([command.id])
        assert told.result == {"finished": 4, "given_back": 4}
        assert len(checkpointed(store, other)) == 4

    @sqlite
    def test_one_that_came_for_a_worker_that_is_gone_does_not_meet_the_next(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, drain: Callable[..., Command]
    ) -> None:
        old = drain()
        batch_id = submit(store, 8)
        enqueue(store, queue)
        worker = start()
        eventually(lambda: is_complete(store, batch_id), "it works")
        (told,) = store.commands([old.id])
        assert told.finished_at is not None
        assert worker.exit_code is None
        assert select(store, "SELECT count(*) FROM commands WHERE finished_at IS NULL") == [(0,)]
