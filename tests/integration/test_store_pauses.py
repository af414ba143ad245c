"""Pauses of batches and workers: who, when and why; kept until they are lifted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from batchjobs.errors import NotFound, UsageError
from batchjobs.store import Store, WorkerInfo
from batchjobs.types import BatchStatus, Counts, ShardId
from tests.support.batches import answer, claim, create, failure, finish, request, select, submit
from tests.support.cases import case


class TestBatches:
    @case("A-eng-03")
    def test_nothing_is_claimed_meanwhile(self, store: Store) -> None:
        batch_id = submit(store, 1)
        assert store.pause_batch(batch_id)
        assert store.batch(batch_id).paused
        assert store.claimable_count() == 0
        assert store.claim([ShardId(batch_id, 0)], "w", 60) == []
        assert store.resume_batch(batch_id)
        assert (store.batch(batch_id).paused, store.batch(batch_id).pause) == (False, None)
        assert store.claimable_count() == 1
        finish(store, claim(store, batch_id))

    def test_the_first_pause_stays_until_it_is_lifted(self, store: Store) -> None:
        batch_id = submit(store, 1)
        assert store.pause_batch(batch_id, by="ann@desk", reason="the disk fills up")
        first = store.batch(batch_id).pause
        assert first is not None
        assert (first.by, first.reason, first.release) == ("ann@desk", "the disk fills up", False)
        assert first.at >= store.batch(batch_id).created_at
        assert not store.pause_batch(batch_id, by="bob@desk", reason="other")
        assert store.batch(batch_id).pause == first
        assert store.resume_batch(batch_id)
        assert not store.resume_batch(batch_id)
        assert store.pause_batch(batch_id, by="bob@desk")
        second = store.batch(batch_id).pause
        assert second is not None
        assert (second.by, second.reason) == ("bob@desk", None)

    def test_giving_back_may_be_asked_for_later_and_stays(self, store: Store) -> None:
        batch_id = submit(store, 1)
        store.pause_batch(batch_id, by="ann@desk", reason="r")
        assert not store.pause_batch(batch_id, by="bob@desk", release=True)
        assert not store.pause_batch(batch_id, by="bob@desk", release=False)
        pause = store.batch(batch_id).pause
        assert pause is not None
        assert (pause.by, pause.reason, pause.release) == ("ann@desk", "r", True)
        store.resume_batch(batch_id)
        assert select(store, "SELECT paused_at, paused_by, pause_reason, pause_release FROM batches") == [
            (None, None, None, False)
        ]

    def test_what_is_held_goes_on_being_held_and_may_be_recorded(self, store: Store) -> None:
        batch_id = submit(store, 2)
        lease = claim(store, batch_id)
        store.pause_batch(batch_id)
        assert store.renew([lease], 60) == {lease.shard}
        assert store.record([(lease, answer(0))]).stale == []
        assert store.batch(batch_id).counts == Counts(total=2, running=1, completed=1)
        store.release([lease])
        assert store.claim([lease.shard], "w2", 60) == []

    def test_one_that_has_ended_is_left_alone(self, store: Store) -> None:
        batch_id = submit(store, 1)
        finish(store, claim(store, batch_id))
        assert not store.pause_batch(batch_id, release=True)
        assert select(store, "SELECT paused_at, pause_release FROM batches") == [(None, False)]
        assert not store.resume_batch(batch_id)

    def test_one_that_is_cancelled_is_left_alone(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = claim(store, batch_id)
        store.cancel_batch(batch_id)
        assert not store.pause_batch(batch_id)
        assert not store.batch(batch_id).paused
        assert store.orders("w1", [lease]).paused_batches == {}

    def test_cancelling_lifts_it(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lease = claim(store, batch_id)
        store.pause_batch(batch_id, reason="r", release=True)
        assert store.cancel_batch(batch_id) == Counts(total=8, running=4, cancelled=4)
        info = store.batch(batch_id)
        assert (info.status, info.paused) == (BatchStatus.CANCELLING, False)
        orders = store.orders("w1", [lease])
        assert (orders.cancelled_batches, orders.paused_batches) == ({batch_id}, {})

    def test_one_that_still_loads_is_opened_paused(self, store: Store) -> None:
        batch_id = create(store)
        assert store.pause_batch(batch_id)
        store.add_requests(batch_id, [request(0)])
        store.open_batch(batch_id)
        assert (store.batch(batch_id).paused, store.claimable_count()) == (True, 0)

    def test_one_that_ends_while_paused_is_paused_again_only_by_a_retry(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = claim(store, batch_id)
        store.pause_batch(batch_id)
        store.record([(lease, failure(0))])
        assert (store.batch(batch_id).status, store.batch(batch_id).paused) == (BatchStatus.COMPLETED, False)
        assert store.retry_failed(batch_id).requests == 1
        assert (store.batch(batch_id).paused, store.claimable_count()) == (True, 0)

    @pytest.mark.parametrize("batch_id", ["nope", "\0"])
    def test_an_unknown_one(self, store: Store, batch_id: str) -> None:
        with pytest.raises(NotFound):
            store.pause_batch(batch_id)
        with pytest.raises(NotFound):
            store.resume_batch(batch_id)

    def test_a_reason_that_no_database_takes(self, store: Store) -> None:
        batch_id = submit(store, 1)
        with pytest.raises(UsageError, match="the reason"):
            store.pause_batch(batch_id, reason="a\0b")
        with pytest.raises(UsageError, match="the reason"):
            store.pause_worker("w1", by="ann", reason="a\0b")

    def test_of_several_at_once_one_pauses(self, store: Store) -> None:
        batch_id = submit(store, 1)
        start = Barrier(4)

        def pause(number: int) -> tuple[bool, bool]:
            start.wait()
            return store.pause_batch(batch_id, by=f"{number}"), store.pause_worker("w1", by=f"{number}")

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(pause, range(4)))
        batch, worker = store.batch(batch_id).pause, store.worker_pause("w1")
        assert batch is not None
        assert worker is not None
        assert [n for n, (is_first, _) in enumerate(found) if is_first] == [int(batch.by)]
        assert [n for n, (_, is_first) in enumerate(found) if is_first] == [int(worker.by)]


class TestWorkers:
    def test_by_name_whether_there_is_one_or_not(self, store: Store) -> None:
        assert store.worker_pauses() == {}
        assert store.pause_worker("w1", by="ann@desk", reason="too hot")
        assert not store.pause_worker("w1", by="bob@desk")
        pause = store.worker_pause("w1")
        assert pause is not None
        assert (pause.by, pause.reason, pause.release) == ("ann@desk", "too hot", False)
        assert store.worker_pauses() == {"w1": pause}
        assert store.worker_pause("w2") is None
        assert store.resume_worker("w2") == []
        assert store.resume_worker("w1") == ["w1"]
        assert (store.worker_pause("w1"), store.resume_worker("w1")) == (None, [])

    def test_all_of_them_also_those_that_start_later(self, store: Store) -> None:
        store.pause_worker("w1", by="ann")
        assert store.pause_worker(None, by="bob")
        assert not store.pause_worker(None, by="cid")
        assert store.worker_pauses().keys() == {"*", "w1"}
        by = [pause and pause.by for pause in map(store.worker_pause, ("w1", "later"))]
        assert by == ["ann", "bob"]

    def test_each_is_lifted_by_itself_or_all_together(self, store: Store) -> None:
        for name in ("w1", "w2", None):
            store.pause_worker(name, by="ann")
        assert store.resume_worker("w1") == ["w1"]
        assert store.worker_pause("w1") is not None, "all are still paused"
        assert store.resume_worker("*") == ["*"]
        assert store.worker_pause("w1") is None
        store.pause_worker(None, by="ann")
        assert store.resume_worker(None) == ["*", "w2"]
        assert store.worker_pauses() == {}

    def test_giving_back_may_be_asked_for_later_and_by_either(self, store: Store) -> None:
        store.pause_worker("w1", by="ann", reason="r")
        assert not store.pause_worker("w1", by="bob", reason="s", release=True)
        pause = store.worker_pause("w1")
        assert pause is not None
        assert (pause.by, pause.reason, pause.release) == ("ann", "r", True)
        store.pause_worker("w2", by="ann")
        store.pause_worker(None, by="bob", release=True)
        releasing = [pause and (pause.by, pause.release) for pause in map(store.worker_pause, ("w1", "w2"))]
        assert releasing == [("ann", True), ("bob", True)]

    def test_the_list_of_workers_shows_it_whoever_starts_again(self, store: Store) -> None:
        info = WorkerInfo(name="w1", host="h", pid=1, device="cpu", dtype="float32", model="m", model_version="v1")
        store.register_worker(info)
        assert [worker.pause for worker in store.workers()] == [None]
        store.pause_worker("w1", by="ann", reason="r")
        store.register_worker(info)
        [worker] = store.workers()
        assert worker.pause == store.worker_pause("w1") is not None
        store.resume_worker("w1")
        store.pause_worker(None, by="bob")
        [worker] = store.workers()
        assert worker.pause is not None
        assert worker.pause.by == "bob"
