"""Pausing and resuming batches and workers, on a stub engine, a real Redis and a real database."""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from rq import Worker

from batchjobs.queue import JobQueue
from batchjobs.settings import Settings
from batchjobs.types import BatchStatus, RequestStatus
from tests.support.batches import submit
from tests.support.cases import case
from tests.support.running import (
    attempts,
    checkpointed,
    completions,
    enqueue,
    is_complete,
    is_still,
    open_long,
    postgresql,
    queue,
    settings,
    sqlite,
    start,
    state,
)
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker, ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from tests.support.redis import RedisServer

__all__ = ["queue", "settings", "start"]


def pause(store: Store, queue: JobQueue, worker: str | None = None, **options: bool) -> None:
    store.pause_worker(worker, by="ann@host", reason="a test", **options)
    queue.wake()


def resume(store: Store, queue: JobQueue, worker: str | None = None) -> None:
    store.resume_worker(worker)
    queue.wake()


def pause_batch(store: Store, queue: JobQueue, batch_id: str, **options: bool) -> None:
    store.pause_batch(batch_id, by="ann@host", reason="a test", **options)
    queue.wake()


def resume_batch(store: Store, queue: JobQueue, batch_id: str) -> None:
    store.resume_batch(batch_id)
    queue.wake()


class TestWorkers:
    @case("A-eng-03")
    def test_while_paused_no_token_is_made_and_then_all_of_it(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "batchjobs.worker")
        batch_id = open_long(store, queue, 50, max_tokens=60)
        worker = start(step_seconds=0.005)
        eventually(lambda: store.batch(batch_id).counts.completed >= 10, "some are done")
        assert worker.loop.stats().running > 0
        pause(store, queue)
        eventually(lambda: is_still(worker), "it stands still")
        made, done = worker.loop.stats().generated_tokens, worker.daemon._holdings.finished
        eventually(lambda: state(store) == "paused", "it says so")
        eventually(lambda: store.batch(batch_id).counts.completed == done, "what was finished is stored")
        (row,) = store.workers()
        assert row.pause is not None
        assert (row.pause.by, row.pause.reason, row.pause.release) == ("ann@host", "a test", False)
        claimed = store.claimable_count()
        eventually(
            lambda: [w.get_state() for w in Worker.all(connection=queue.connection)] == ["suspended"], "RQ shows it"
        )
        leases = worker.daemon._holdings.leases
        assert store.renew(leases, 2) == {lease.shard for lease in leases}, "the leases are kept"
        assert worker.loop.stats().generated_tokens == made
        assert store.claimable_count() == claimed > 0, "nothing is claimed"
        resume(store, queue)
        eventually(lambda: is_complete(store, batch_id), "it goes on")
        assert [c.text for c in completions(store, batch_id)] == [expected_text(f"prompt {i}", 60) for i in range(50)]
        assert attempts(store, batch_id) == [1] * 13
        assert "paused by ann@host (a test)" in caplog.text
        assert "resumed: work goes on" in caplog.text

    @sqlite
    def test_one_of_two_is_paused(self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
        pause(store, queue, "first")
        first, second = start("first"), start("second")
        batch_id = submit(store, 40)
        enqueue(store, queue)
        eventually(lambda: is_complete(store, batch_id), "the other one does all of it")
        assert {c.worker for c in completions(store, batch_id)} == {"second"}
        assert is_still(first)
        assert not is_still(second)
        assert (first.loop.stats().steps, state(store, "first")) == (0, "paused")

    @sqlite
    def test_paused_twice_it_waits_for_both(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        pause(store, queue)
        pause(store, queue, "w1")
        worker = start()
        batch_id = submit(store, 4)
        enqueue(store, queue)
        eventually(lambda: is_still(worker), "it starts paused")
        store.pause_worker("w1", by="ann@host", release=True)
        resume(store, queue, "*")
        mode = worker.daemon._parts.mode
        eventually(lambda: mode.pause is not None and mode.pause.release, "it has looked since")
        assert is_still(worker)
        assert store.batch(batch_id).counts.queued == 4
        resume(store, queue, "w1")
        eventually(lambda: is_complete(store, batch_id), "both are lifted")

    def test_released_it_goes_on_elsewhere_from_the_last_token(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        batch_id = open_long(store, queue, 12, max_tokens=400)
        first = start("first", step_seconds=0.005)
        eventually(lambda: first.loop.stats().generated_tokens > 400, "it works")
        pause(store, queue, "first")
        eventually(lambda: is_still(first), "it stands still")
        made = first.loop.progress()
        assert len(made) == 8
        pause(store, queue, "first", release=True)
        eventually(lambda: len(first.daemon._holdings) == 0, "it has given back everything")
        tokens = sorted(len(choice.token_ids) for (choice,) in made.values())
        assert sorted(checkpointed(store, batch_id).values()) == tokens
        eventually(lambda: attempts(store, batch_id) == [0, 0, 0], "which is no attempt")
        assert store.batch(batch_id).counts.queued == 12
        eventually(lambda: not first.loop.progress(), "the engine has nothing of it any more")
        start("second", logprob=-0.25)
        eventually(lambda: is_complete(store, batch_id), "another worker finishes it", 30)
        done = completions(store, batch_id)
        assert sorted(c.logprobs.count(-0.5) for c in done) == [0] * 4 + tokens, "none was made twice"
        begun = [c for c in done if -0.5 in c.logprobs]
        for c in begun:
            assert [(s.worker, s.from_token) for s in c.version_spans] == [
                ("first", 0),
                ("second", c.logprobs.count(-0.5)),
            ]
        assert {c.worker for c in done} == {"second"}
        assert is_still(first), "and is paused still"

    @sqlite
    def test_cancelled_while_paused(self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
        batch_id, other = open_long(store, queue, 4), open_long(store, queue, 4)
        worker = start()
        eventually(lambda: worker.loop.stats().running == 8 and len(worker.loop.progress()) == 8, "it works")
        pause(store, queue)
        eventually(lambda: is_still(worker), "it stands still")
        store.cancel_batch(batch_id)
        store.cancel_request(other, 2)
        queue.wake()
        eventually(lambda: is_complete(store, batch_id), "the batch is cancelled")
        eventually(lambda: store.batch(other).counts.cancelled == 1, "the request is")
        (done,) = completions(store, other)
        assert done.text.startswith(expected_text("prompt 2", 1)), "what there was of it is kept"
        assert done.status == RequestStatus.CANCELLED
        assert all(c.text for c in completions(store, batch_id))
        assert is_still(worker)

    @postgresql
    def test_killed_and_started_again_it_is_still_paused(
        self, settings: Settings, store: Store, queue: JobQueue, redis_server: RedisServer
    ) -> None:
        batch_id = open_long(store, queue, 8, max_tokens=200)
        victim = ProcessWorker(settings, "w1", step_seconds=0.01)
        eventually(lambda: store.workers() and store.workers()[0].generated_tokens, "it works", 40)
        pause(store, queue, "w1")
        eventually(lambda: state(store) == "paused", "it is paused")
        victim.kill()
        redis_server.kill()
        redis_server.start()
        again = ProcessWorker(settings, "w1", step_seconds=0.001)
        eventually(lambda: store.workers()[0].pid == again.process.pid, "it is back", 40)
        eventually(lambda: state(store) == "paused" and store.claimable_count() == 2, "the old leases ran out")
        assert store.workers()[0].generated_tokens == 0
        resume(store, queue, "w1")
        eventually(lambda: is_complete(store, batch_id), "it goes on")
        again.signal(signal.SIGTERM)
        assert again.join()[0] == 0
        assert attempts(store, batch_id) == [2, 2]

    @sqlite
    def test_a_restart_of_redis_lifts_nothing_and_hides_no_order(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, redis_server: RedisServer
    ) -> None:
        batch_id = open_long(store, queue, 12, max_tokens=100)
        worker = start(step_seconds=0.005)
        eventually(lambda: worker.loop.stats().generated_tokens, "it works")
        pause(store, queue)
        eventually(lambda: is_still(worker), "it stands still")
        redis_server.kill()
        store.cancel_request(batch_id, 0)
        eventually(lambda: store.batch(batch_id).counts.cancelled == 1, "heard without Redis")
        assert is_still(worker)
        redis_server.start()
        store.resume_worker(None)
        eventually(lambda: is_complete(store, batch_id), "heard by looking")

    @sqlite
    def test_stopped_while_paused_it_gives_back_what_it_holds(
        self, settings: Settings, store: Store, queue: JobQueue
    ) -> None:
        batch_id = open_long(store, queue, 8)
        worker = ProcessWorker(settings, "w1", step_seconds=0.005)
        eventually(lambda: store.workers() and store.workers()[0].running == 8, "it works", 40)
        pause(store, queue)
        eventually(lambda: state(store) == "paused", "it is paused")
        tokens = store.workers()[0].generated_tokens
        worker.signal(signal.SIGTERM)
        code, log = worker.join()
        assert code == 0, log
        assert "stored 8 unfinished answers" in log
        assert sum(checkpointed(store, batch_id).values()) == store.workers()[0].generated_tokens >= tokens
        assert attempts(store, batch_id) == [0, 0]

    @sqlite
    def test_an_engine_that_dies_while_paused_ends_the_worker(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch_id = open_long(store, queue, 4)
        worker = start()
        eventually(lambda: worker.loop.stats().running == 4, "it works")
        pause(store, queue)
        eventually(lambda: is_still(worker), "it stands still")

        def explode() -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(worker.loop, "_cancel", explode)
        assert worker.join() == 1
        assert store.claimable_count() == 1, "what it held is free"
        assert attempts(store, batch_id) == [1]

    @sqlite
    def test_a_burst_that_is_paused_waits(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        pause(store, queue)
        batch_id = submit(store, 4)
        enqueue(store, queue)
        worker = start(burst=True)
        eventually(lambda: state(store) == "paused", "it is paused")
        for _ in range(3):
            assert not worker.daemon._parts.burst.is_over()
        resume(store, queue)
        assert worker.join() == 0
        assert is_complete(store, batch_id)


class TestBatches:
    def test_others_go_on(self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
        paused = open_long(store, queue, 24, max_tokens=300)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().running == 8 and worker.loop.stats().generated_tokens, "it works")
        pause_batch(store, queue, paused)
        eventually(lambda: worker.loop.stats().running == 0, "none of it runs")
        stats = worker.loop.stats()
        assert (stats.waiting, stats.suspended) == (0, worker.daemon._holdings.unfinished_requests)
        assert worker.daemon._holdings.unfinished == 0
        before = worker.loop.progress()
        assert store.batch(paused).paused
        other = submit(store, 40)
        enqueue(store, queue)
        eventually(lambda: is_complete(store, other), "the other one is done meanwhile")
        assert worker.loop.progress() == before, "no token of the paused one was made"
        eventually(lambda: state(store) == "idle", "there is room for others")
        leases = worker.daemon._holdings.suspended
        assert len(leases) >= 2
        assert store.renew(leases, 2) == {lease.shard for lease in leases}
        resume_batch(store, queue, paused)
        eventually(lambda: is_complete(store, paused), "it goes on where it stood", 30)
        assert [c.text for c in completions(store, paused)] == [expected_text(f"prompt {i}", 300) for i in range(24)]
        assert attempts(store, paused) == [1] * 6
        assert worker.loop.stats().generated_tokens == 24 * 300 + 40 * 8, "nothing was made twice"

    @sqlite
    def test_what_is_read_while_its_batch_is_paused_does_not_begin(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The order comes between the claim of a shard and the reading of its requests."""
        pending = store.pending_requests
        batch_id = submit(store, 4)

        def paused_meanwhile(lease: object) -> object:
            store.pause_batch(batch_id)
            worker.daemon._parts.control.obey()
            return pending(lease)  # type: ignore[arg-type]

        worker = start()
        monkeypatch.setattr(store, "pending_requests", paused_meanwhile)
        enqueue(store, queue)
        eventually(lambda: worker.loop.stats().suspended == 4, "it was added suspended")
        assert worker.loop.stats().generated_tokens == 0
        monkeypatch.undo()
        resume_batch(store, queue, batch_id)
        eventually(lambda: is_complete(store, batch_id), "and goes on")

    def test_released_it_leaves_the_worker(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        batch_id, other = open_long(store, queue, 4, max_tokens=150), open_long(store, queue, 4, max_tokens=150)
        worker = start(step_seconds=0.005)
        eventually(
            lambda: (
                worker.loop.stats().running == 8 and len(worker.loop.progress()) == 8 and worker.loop.stats().steps > 20
            ),
            "it works",
        )
        pause_batch(store, queue, batch_id, release=True)
        eventually(lambda: store.batch(batch_id).counts.queued == 4, "it is given back")
        assert [lease.shard.batch_id for lease in worker.daemon._holdings.leases] == [other]
        stored = checkpointed(store, batch_id)
        assert set(stored) == {0, 1, 2, 3}
        assert min(stored.values()) > 10
        eventually(lambda: is_complete(store, other), "the other one is done")
        assert attempts(store, batch_id) == [0]
        assert not is_complete(store, batch_id)
        resume_batch(store, queue, batch_id)
        eventually(lambda: is_complete(store, batch_id), "it goes on from what was stored", 20)
        assert worker.loop.stats().generated_tokens == 8 * 150

    @sqlite
    def test_cancelled_while_paused(self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
        batch_id = open_long(store, queue, 12)
        worker = start()

        def has_all() -> bool:
            stats = worker.loop.stats()
            return (stats.running, stats.waiting) == (8, 4) and stats.generated_tokens > 0

        eventually(has_all, "it has all of it")
        pause_batch(store, queue, batch_id)
        eventually(lambda: worker.loop.stats().suspended == 12, "it stands still")
        store.cancel_request(batch_id, 0)
        queue.wake()
        eventually(lambda: store.batch(batch_id).counts.cancelled == 1, "one request is cancelled")
        store.cancel_batch(batch_id)
        queue.wake()
        eventually(lambda: is_complete(store, batch_id), "all of it is")
        assert Counter(c.status for c in completions(store, batch_id)) == {RequestStatus.CANCELLED: 12}
        assert store.batch(batch_id).status == BatchStatus.CANCELLED
        stats = worker.loop.stats()
        assert stats.running + stats.waiting + stats.suspended == 0

    @sqlite
    def test_while_a_shard_is_read_it_is_released_and_everything_else_is_heard(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A grammar may take seconds to make, and a shard may have many."""
        running = open_long(store, queue, 4)
        worker = start(step_seconds=0.005)
        eventually(lambda: worker.loop.stats().generated_tokens > 20, "it works")
        is_read, go_on = threading.Event(), threading.Event()

        def compile_format(response_format: object) -> None:
            is_read.set()
            go_on.wait(30)

        monkeypatch.setattr(worker.loop.engine, "compile_format", compile_format)
        slow = open_long(store, queue, 2, max_tokens=5, shard_size=2)
        eventually(is_read.is_set, "it is being read")
        pause_batch(store, queue, running, release=True)
        eventually(lambda: store.batch(running).counts.queued == 4, "what runs is given back", 5)
        pause_batch(store, queue, slow, release=True)
        eventually(lambda: store.batch(slow).counts.queued == 2, "so is what is being read", 5)
        pause(store, queue)
        eventually(lambda: is_still(worker), "the worker is paused", 5)
        resume(store, queue)
        go_on.set()
        resume_batch(store, queue, slow)
        eventually(lambda: is_complete(store, slow), "it goes on")
        assert attempts(store, slow) == [1]
        assert worker.loop.stats().running + worker.loop.stats().waiting == 0, "nothing that nobody wants is left"

    @pytest.mark.parametrize("whose", ["batch", "worker"])
    def test_resumed_after_a_release_it_goes_on_at_once(
        self,
        start: Callable[..., ThreadWorker],
        store: Store,
        queue: JobQueue,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        whose: str,
    ) -> None:
        """Not only when what is missing in Redis is looked for anyway."""
        monkeypatch.setattr("workers.parts.RECONCILE_SECONDS", 3600.0)
        calm = settings.model_copy(update={"lease_seconds": 7200.0})
        batch_id = open_long(store, queue, 8)
        worker = start(step_seconds=0.01, settings=calm)
        eventually(lambda: worker.loop.stats().running == 8, "it works")
        if whose == "batch":
            pause_batch(store, queue, batch_id, release=True)
            eventually(lambda: store.batch(batch_id).counts.queued == 8, "it is given back")
            eventually(lambda: not sum(queue.depths().values()), "nobody may have it, so it leaves the queue")
            resume_batch(store, queue, batch_id)
        else:
            pause(store, queue, "w1", release=True)
            eventually(lambda: store.batch(batch_id).counts.queued == 8, "it is given back")
            resume(store, queue, "w1")
        eventually(lambda: worker.loop.stats().running == 8, "it is taken again", 2)

    @sqlite
    def test_a_burst_does_not_wait_for_it(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "batchjobs.worker")
        batch_id, other = open_long(store, queue, 4, max_tokens=2000), submit(store, 12)
        enqueue(store, queue)
        worker = start(burst=True)
        eventually(lambda: worker.loop.stats().generated_tokens, "it works")
        pause_batch(store, queue, batch_id)
        assert worker.join() == 0
        assert is_complete(store, other)
        assert "what is left is paused: 1 shard of it here, given back" in caplog.text
        assert store.batch(batch_id).counts.queued == 4
        assert len(checkpointed(store, batch_id)) == 4
        assert attempts(store, batch_id) == [0]

    @postgresql
    def test_a_shard_that_runs_alone_does_not_hold_up_the_others_when_paused(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
    ) -> None:
        batch_id = open_long(store, queue, 1, shard_size=1)
        with store._database.writing() as connection:
            connection.exec_driver_sql(f"UPDATE shards SET attempts = 3 WHERE batch_id = '{batch_id}'")
        worker = start()
        eventually(lambda: worker.loop.stats().running == 1, "it runs alone")
        pause_batch(store, queue, batch_id)
        eventually(lambda: len(worker.daemon._holdings) == 0, "it gives way")
        eventually(lambda: attempts(store, batch_id) == [3], "which is no attempt")
        later = submit(store, 8)
        enqueue(store, queue)
        eventually(lambda: is_complete(store, later), "others go on")
