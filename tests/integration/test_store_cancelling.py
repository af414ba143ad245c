"""Cancelling: at once what nobody holds, by its worker what one holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from batchjobs.errors import NotFound
from batchjobs.store import Store
from batchjobs.types import BatchStatus, Completion, Counts, FinishReason, RequestStatus
from tests.support.batches import FOREVER, GONE, answer, claim, create, failure, finish, request, submit


def cancelled(index: int) -> Completion:
    return replace(
        answer(index, tokens=1), status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED, text="part"
    )


class TestBatches:
    def test_what_nobody_holds_is_cancelled_at_once(self, store: Store) -> None:
        batch_id = submit(store, 6)
        assert store.cancel_batch(batch_id) == Counts(total=6, cancelled=6)
        info = store.batch(batch_id)
        assert info.status is BatchStatus.CANCELLED
        assert info.finished_at is not None
        assert store.claimable(10) == []
        for stored in store.results(batch_id):
            completion = stored.completion
            assert completion is not None
            assert (stored.state, completion.finish_reason) == ("cancelled", FinishReason.CANCELLED)
            assert (completion.text, completion.token_ids, completion.tokens) == ("", (), ())
            assert completion.finished_at is not None

    def test_what_a_worker_holds_is_left_to_it(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lease = claim(store, batch_id, 0)
        store.record([(lease, answer(0)), (lease, failure(1))])
        assert store.cancel_batch(batch_id) == Counts(total=8, running=2, completed=1, failed=1, cancelled=4)
        assert store.batch(batch_id).status is BatchStatus.CANCELLING
        assert store.orders("w1", [lease]).cancelled_batches == {batch_id}
        recorded = store.record([(lease, cancelled(2)), (lease, answer(3))])
        assert recorded.done == [lease.shard]
        info = store.batch(batch_id)
        assert info.status is BatchStatus.CANCELLED
        assert info.counts == Counts(total=8, completed=2, failed=1, cancelled=5)
        partial = store.result(batch_id, 2).completion
        assert partial is not None
        assert partial.text == "part"

    def test_again_changes_nothing(self, store: Store) -> None:
        batch_id = submit(store, 6)
        claim(store, batch_id, 0)
        assert store.cancel_batch(batch_id) == store.cancel_batch(batch_id) == Counts(total=6, running=4, cancelled=2)
        assert len(list(store.results(batch_id))) == 6

    def test_finished_requests_of_a_free_shard_stay(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.record([(lease, answer(1))])
        store.release([lease])
        assert store.cancel_batch(batch_id) == Counts(total=4, completed=1, cancelled=3)
        assert [stored.state for stored in store.results(batch_id)] == [
            "cancelled",
            "completed",
            "cancelled",
            "cancelled",
        ]

    def test_the_holder_of_a_lease_that_ran_out_writes_nothing_more(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id, ttl=GONE)
        assert store.cancel_batch(batch_id) == Counts(total=4, cancelled=4)
        assert store.record([(lease, answer(0))]).stale == [lease.shard]
        assert store.renew([lease], 60) == set()

    def test_after_the_end_it_stays_completed(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        finish(store, lease)
        assert store.cancel_batch(batch_id) == Counts(total=4, completed=4)
        assert store.batch(batch_id).status is BatchStatus.COMPLETED
        assert store.orders("w1", [lease]).cancelled_batches == set()

    def test_a_worker_that_finishes_all_makes_it_completed(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.cancel_batch(batch_id)
        finish(store, lease)
        assert store.batch(batch_id).status is BatchStatus.COMPLETED

    def test_while_it_loads(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0), request(1)])
        assert store.cancel_batch(batch_id) == Counts(total=2, queued=2)
        assert store.batch(batch_id).status is BatchStatus.LOADING
        store.open_batch(batch_id)
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.CANCELLED, Counts(total=2, cancelled=2))

    def test_other_batches_go_on(self, store: Store) -> None:
        batch_id, other = submit(store, 4), submit(store, 4)
        store.cancel_batch(batch_id)
        assert store.batch(other).counts == Counts(total=4, queued=4)

    def test_unknown_batch(self, store: Store) -> None:
        with pytest.raises(NotFound, match="no batch 'nope'"):
            store.cancel_batch("nope")


class TestAtTheSameTime:
    def test_workers_finish_what_they_hold_and_nothing_else(self, store: Store) -> None:
        batch_id = submit(store, 120, shard_size=3)
        start = Barrier(4)

        def work(worker: str) -> int:
            start.wait()
            answered = 0
            while wanted := store.claimable(3):
                for lease in store.claim([shard for shard, _ in wanted], worker, FOREVER):
                    pending = store.pending_requests(lease)
                    answered += len(pending)
                    assert store.record([(lease, answer(each.index)) for each in pending]).done == [lease.shard]
            return answered

        def cancel() -> Counts:
            start.wait()
            return store.cancel_batch(batch_id)

        with ThreadPoolExecutor(4) as pool:
            workers = [pool.submit(work, f"w{number}") for number in range(3)]
            pool.submit(cancel).result()
            answered = sum(worker.result() for worker in workers)
        info = store.batch(batch_id)
        assert info.counts == Counts(total=120, completed=answered, cancelled=120 - answered)
        assert [stored.completion is None for stored in store.results(batch_id)] == [False] * 120


class TestSweeping:
    def test_leases_that_ran_out_and_shards_given_back(self, store: Store) -> None:
        batch_id, other = submit(store, 16), submit(store, 4)
        crashed, back, alive = (claim(store, batch_id, number) for number in range(3))
        store.record([(crashed, answer(0))])
        assert store.cancel_batch(batch_id).cancelled == 4
        assert store.sweep_cancelled() == 0
        store.renew([crashed], GONE)
        store.release([back])
        assert store.sweep_cancelled() == 7
        assert store.sweep_cancelled() == 0
        assert store.batch(batch_id).counts == Counts(total=16, running=4, completed=1, cancelled=11)
        assert store.record([(crashed, answer(1))]).stale == [crashed.shard]
        assert finish(store, alive).done == [alive.shard]
        assert store.batch(batch_id).status is BatchStatus.CANCELLED
        assert store.batch(other).counts == Counts(total=4, queued=4)


class TestRequests:
    def test_one_that_nobody_holds(self, store: Store) -> None:
        batch_id = submit(store, 4)
        for _ in range(2):
            assert store.cancel_request(batch_id, 2) == Counts(total=4, queued=3, cancelled=1)
        lease = claim(store, batch_id)
        assert [pending.index for pending in store.pending_requests(lease)] == [0, 1, 3]
        assert finish(store, lease).done == [lease.shard]
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.COMPLETED, Counts(total=4, completed=3, cancelled=1))

    def test_one_that_a_worker_holds(self, store: Store) -> None:
        batch_id = submit(store, 8)
        first, second = claim(store, batch_id, 0), claim(store, batch_id, 1)
        for _ in range(2):
            assert store.cancel_request(batch_id, 5) == Counts(total=8, running=8)
        assert store.orders("w1", [first]).cancelled_requests == set()
        assert store.orders("w1", [first, second]).cancelled_requests == {(batch_id, 5)}
        assert store.orders("w1", []).cancelled_requests == set()
        store.record([(second, cancelled(5))])
        assert store.batch(batch_id).counts == Counts(total=8, running=7, cancelled=1)

    def test_one_after_the_other_closes_the_shard(self, store: Store) -> None:
        batch_id = submit(store, 2)
        lease = claim(store, batch_id, ttl=GONE)
        store.cancel_request(batch_id, 0)
        assert store.record([(lease, answer(0))]).stale == []
        assert store.cancel_request(batch_id, 1) == Counts(total=2, cancelled=2)
        assert store.record([(lease, answer(1))]).stale == [lease.shard]
        assert store.batch(batch_id).finished_at is not None
        assert store.claimable(10) == []

    def test_one_that_has_ended_stays(self, store: Store) -> None:
        batch_id = submit(store, 2)
        lease = claim(store, batch_id)
        store.record([(lease, answer(0))])
        assert store.cancel_request(batch_id, 0) == Counts(total=2, running=1, completed=1)
        store.release([lease])
        assert store.cancel_request(batch_id, 0) == Counts(total=2, queued=1, completed=1)

    @pytest.mark.parametrize("index", [-1, 2, 2**70])
    def test_unknown_request(self, store: Store, index: int) -> None:
        batch_id = submit(store, 2)
        with pytest.raises(NotFound, match=f"has no request {index}"):
            store.cancel_request(batch_id, index)
