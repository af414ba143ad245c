"""What Redis lacks is put back, whatever happened to it; what SQL does not give away is left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import queue as queues
from batchjobs.errors import ConnectionFailed
from batchjobs.queue import JobQueue
from batchjobs.reconcile import Reconciled, reconcile
from batchjobs.types import BatchStatus, Priority
from tests.support.batches import FOREVER, GONE, claim, crash, create, finish, request, submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.store import Store
    from tests.support.redis import RedisServer


@pytest.fixture
def queue(redis_url: str) -> Iterator[JobQueue]:
    queue = JobQueue(redis_url)
    yield queue
    queue.close()


def test_a_submission_without_redis_is_queued_later(store: Store, queue: JobQueue) -> None:
    high, low = submit(store, 8, queue=Priority.HIGH), submit(store, 4, queue=Priority.LOW)
    assert reconcile(store, queue) == Reconciled(queued=3)
    assert queue.queues[Priority.HIGH].job_ids == [f"{high}-0", f"{high}-1"]
    assert queue.queues[Priority.LOW].job_ids == [f"{low}-0"]
    assert reconcile(store, queue) == Reconciled()


def test_a_flushed_redis_is_filled_again(store: Store, queue: JobQueue, redis_server: RedisServer) -> None:
    batch_id = submit(store, 40)
    reconcile(store, queue)
    before = queue.queues[Priority.DEFAULT].job_ids
    redis_server.flush()
    assert reconcile(store, queue).queued == 10
    assert queue.queues[Priority.DEFAULT].job_ids == before == [f"{batch_id}-{n}" for n in range(10)]


def test_only_what_is_claimable_is_queued(store: Store, queue: JobQueue) -> None:
    loading = create(store)
    store.add_requests(loading, [request(0)])
    batch_id = submit(store, 16)
    claim(store, batch_id, 0, ttl=FOREVER)
    claim(store, batch_id, 1, ttl=GONE)
    finish(store, claim(store, batch_id, 2))
    assert reconcile(store, queue).queued == 2
    assert queue.queues[Priority.DEFAULT].job_ids == [f"{batch_id}-1", f"{batch_id}-3"]


def test_shards_of_a_dead_worker_in_a_cancelled_batch_get_their_outcomes(store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 8)
    lease = claim(store, batch_id, 0, ttl=FOREVER)
    store.cancel_batch(batch_id)
    assert reconcile(store, queue) == Reconciled()
    store.renew([lease], GONE)
    assert reconcile(store, queue) == Reconciled(swept=4)
    assert store.batch(batch_id).status == BatchStatus.CANCELLED


def test_entries_that_sql_refuses_can_hide_missing_ones_only_until_a_thorough_run(
    store: Store, queue: JobQueue
) -> None:
    cancelled = submit(store, 8)
    reconcile(store, queue)
    store.cancel_batch(cancelled)
    batch_id = submit(store, 8)
    assert reconcile(store, queue) == Reconciled()
    assert reconcile(store, queue, thorough=True) == Reconciled(queued=2)
    assert queue.queues[Priority.DEFAULT].job_ids[2:] == [f"{batch_id}-0", f"{batch_id}-1"]


def test_a_shard_claimed_while_it_looks_is_not_queued(
    store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(store, 8)
    look = queue.missing

    def look_and_be_overtaken(shards: list, **options: Any) -> list:  # type: ignore[type-arg]
        found = look(shards, **options)
        claim(store, batch_id, 0)
        return found

    monkeypatch.setattr(queue, "missing", look_and_be_overtaken)
    assert reconcile(store, queue).queued == 1
    assert queue.queues[Priority.DEFAULT].job_ids == [f"{batch_id}-1"]


def test_while_another_process_is_at_it_nothing_is_queued(store: Store, queue: JobQueue, redis_url: str) -> None:
    submit(store, 8)
    other = JobQueue(redis_url)
    with other.reconciling() as mine:
        assert mine
        assert reconcile(store, queue) == Reconciled()
    assert reconcile(store, queue).queued == 2
    other.close()


def test_without_redis_cancelled_shards_are_swept_all_the_same(
    store: Store, queue: JobQueue, redis_server: RedisServer
) -> None:
    batch_id = submit(store, 4)
    lease = claim(store, batch_id)
    store.cancel_batch(batch_id)
    store.renew([lease], GONE)
    redis_server.kill()
    with pytest.raises(ConnectionFailed):
        reconcile(store, queue)
    assert store.batch(batch_id).status == BatchStatus.CANCELLED


def test_shards_whose_workers_died_are_split_and_their_requests_queued(store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 8)
    assert reconcile(store, queue) == Reconciled(queued=2)
    crash(store, batch_id, 0, times=2)
    assert reconcile(store, queue) == Reconciled(queued=4, split=1)
    assert queue.queues[Priority.DEFAULT].job_ids == [f"{batch_id}-{n}" for n in (2, 3, 4, 5, 0, 1)]
    assert reconcile(store, queue) == Reconciled()


def test_the_queue_is_filled_after_a_split_though_it_looks_long_enough(store: Store, queue: JobQueue) -> None:
    cancelled, batch_id = submit(store, 40), submit(store, 4)
    reconcile(store, queue)
    store.cancel_batch(cancelled)
    crash(store, batch_id, 0, times=2)
    assert reconcile(store, queue) == Reconciled(queued=4, split=1)


def test_a_request_whose_workers_always_die_is_given_up(store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 1)
    crash(store, batch_id, times=5)
    assert reconcile(store, queue) == Reconciled(failed=1)
    assert store.batch(batch_id).status == BatchStatus.COMPLETED


def test_a_submission_that_was_cut_a_day_ago_is_discarded(
    store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    assert reconcile(store, queue) == Reconciled()
    monkeypatch.setattr("batchjobs.reconcile.ABANDONED_SECONDS", -60.0)
    assert reconcile(store, queue) == Reconciled(discarded=1)
    assert store.batches() == []


def test_pages_are_walked_to_the_end(store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.reconcile._PAGE", 3)
    batch_id = submit(store, 40)
    assert reconcile(store, queue).queued == 10
    assert queue.queues[Priority.DEFAULT].job_ids == [f"{batch_id}-{n}" for n in range(10)]


def test_what_was_begun_goes_first_also_where_it_waits(store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 40)
    reconcile(store, queue)
    claim(store, batch_id, 7, ttl=GONE)  # by a worker that could not reach Redis: its entry is still in the queue
    assert reconcile(store, queue).queued == 1
    waiting = [f"{batch_id}-{number}" for number in (7, 0, 1, 2, 3, 4, 5, 6, 8, 9)]
    assert queue.queues[Priority.DEFAULT].job_ids == waiting
    assert reconcile(store, queue).queued == 0


def test_what_a_dead_worker_had_begun_goes_first(store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, 24)
    reconcile(store, queue)
    lost = [claim(store, batch_id, number, ttl=GONE).shard for number in (2, 4)]
    for shard in lost:  # as its worker popped them
        queue.connection.lrem(queue.queues[Priority.DEFAULT].key, 1, str(shard))
    queue.connection.rpush(queue.queues[Priority.DEFAULT].key, "junk-1", "junk-2")  # so that the queue is long enough
    assert reconcile(store, queue).queued == 2
    waiting = queue.queues[Priority.DEFAULT].job_ids
    assert waiting[:6] == [f"{batch_id}-{number}" for number in (2, 4, 0, 1, 3, 5)]
    assert reconcile(store, queue).queued == 0


def test_what_was_popped_by_a_worker_that_died_does_not_stay_popped(
    store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody else did the shard meanwhile."""
    monkeypatch.setattr(queues, "STRANDED_SECONDS", -1)  # whatever is there is old
    batch_id = submit(store, 8)
    reconcile(store, queue)
    rq = queue.queues[Priority.DEFAULT]
    for _ in range(2):
        queue.connection.lmove(rq.key, rq.intermediate_queue_key)
    finish(store, claim(store, batch_id, 0))
    assert reconcile(store, queue).queued == 1
    assert queue.connection.lrange(rq.intermediate_queue_key, 0, -1) == []
    assert rq.job_ids == [f"{batch_id}-1"]
