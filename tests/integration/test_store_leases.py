"""Claims, renewals and returns: who may work on a shard."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

from batchjobs.store import Store
from batchjobs.types import Counts, Lease, Priority, ShardId
from tests.support.batches import FOREVER, GONE, answer, claim, create, finish, request, submit

if TYPE_CHECKING:
    from typing import Any


def row(store: Store, shard: ShardId, columns: str) -> tuple[Any, ...]:
    _, rows = store.select(
        f"SELECT {columns} FROM shards WHERE batch_id = '{shard.batch_id}' AND shard_no = {shard.shard_no}"
    )
    [found] = rows
    return found


class TestClaimable:
    def test_the_oldest_batch_comes_first(self, store: Store) -> None:
        first = submit(store, 8, queue=Priority.LOW)
        second = submit(store, 4, queue=Priority.HIGH)
        expected = [
            (ShardId(first, 0), Priority.LOW),
            (ShardId(first, 1), Priority.LOW),
            (ShardId(second, 0), Priority.HIGH),
        ]
        assert store.claimable(10) == expected
        assert store.claimable(2) == expected[:2]
        assert store.claimable(10, after=ShardId(first, 0)) == expected[1:]
        assert store.claimable(10, after=ShardId(first, 1)) == expected[2:]
        assert store.claimable_count() == 3

    def test_leased_and_done_shards_are_left_out(self, store: Store) -> None:
        batch_id = submit(store, 12)
        finish(store, claim(store, batch_id, 0))
        claim(store, batch_id, 1)
        assert store.claimable(10) == [(ShardId(batch_id, 2), Priority.DEFAULT)]

    def test_a_lease_that_ran_out_is_claimable_again(self, store: Store) -> None:
        batch_id = submit(store, 1)
        for ttl in (0.0, GONE):
            claim(store, batch_id, ttl=ttl)
            assert store.claimable_count() == 1
        claim(store, batch_id, ttl=FOREVER)
        assert store.claimable_count() == 0


class TestClaiming:
    def test_fence_and_attempts_grow(self, store: Store) -> None:
        shard = ShardId(submit(store, 4), 0)
        assert store.claim([shard], "w1", GONE) == [Lease(shard, 1, 1)]
        assert store.claim([shard], "w2", FOREVER) == [Lease(shard, 2, 2)]
        assert store.claim([shard], "w3", FOREVER) == []
        assert row(store, shard, "state, owner, fence, attempts") == ("leased", "w2", 2, 2)

    def test_only_those_that_are_free(self, store: Store) -> None:
        first, second = submit(store, 12), submit(store, 4)
        claim(store, first, 1)
        wanted = [ShardId(second, 0), ShardId(first, 2), ShardId(first, 1), ShardId(first, 0), ShardId("nope", 0)]
        leases = store.claim(wanted, "w2", FOREVER)
        assert [lease.shard for lease in leases] == [ShardId(first, 0), ShardId(first, 2), ShardId(second, 0)]
        assert store.claim([], "w2", FOREVER) == []

    def test_each_shard_goes_to_one_of_many_claimers(self, store: Store) -> None:
        batch_id = submit(store, 120)
        shards = [ShardId(batch_id, number) for number in range(30)]
        start = Barrier(8)

        def claim_all(worker: int) -> list[Lease]:
            start.wait()
            mine = shards if worker % 2 else shards[::-1]
            return [lease for shard in mine for lease in store.claim([shard], f"w{worker}", FOREVER)]

        with ThreadPoolExecutor(8) as pool:
            won = [lease for each in [pool.submit(claim_all, n) for n in range(8)] for lease in each.result()]
        assert Counter(lease.shard for lease in won) == Counter(shards)
        assert {lease.fence for lease in won} == {1}

    def test_claimers_of_whole_groups_never_deadlock(self, store: Store) -> None:
        batches = [submit(store, 40) for _ in range(2)]
        shards = [ShardId(batch_id, number) for batch_id in batches for number in range(10)]
        start = Barrier(6)

        def claim_and_return(worker: int) -> int:
            start.wait()
            won = 0
            for turn in range(10):
                leases = store.claim(shards if turn % 2 else shards[::-1], f"w{worker}", FOREVER)
                store.renew(leases[::-1], FOREVER)
                store.release(leases)
                won += len(leases)
            return won

        with ThreadPoolExecutor(6) as pool:
            won = sum(each.result() for each in [pool.submit(claim_and_return, n) for n in range(6)])
        assert sum(row(store, shard, "fence")[0] for shard in shards) == won
        assert {row(store, shard, "state, attempts") for shard in shards} == {("ready", 0)}


class TestPendingRequests:
    def test_only_those_without_outcome_by_index(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lease = claim(store, batch_id, 1)
        assert store.pending_requests(lease) == [request(index) for index in (4, 5, 6, 7)]
        store.record([(lease, answer(6)), (lease, answer(4))])
        assert store.pending_requests(lease) == [request(5), request(7)]

    def test_gaps_in_the_indexes(self, store: Store) -> None:
        batch_id = create(store, shard_size=4)
        store.add_requests(batch_id, [request(index) for index in (1, 2, 9)])
        assert store.open_batch(batch_id) == 2
        lease = claim(store, batch_id, 2)
        assert store.pending_requests(lease) == [request(9)]
        assert finish(store, lease).done == [ShardId(batch_id, 2)]
        assert store.batch(batch_id).counts == Counts(total=3, queued=2, completed=1)


class TestRenewing:
    def test_a_lease_that_ran_out_can_be_kept_until_somebody_takes_it(self, store: Store) -> None:
        batch_id = submit(store, 2, shard_size=1)
        lost, kept = claim(store, batch_id, 0, ttl=GONE), claim(store, batch_id, 1, ttl=GONE)
        taken = claim(store, batch_id, 0, ttl=GONE, worker="w2")
        assert store.renew([lost, kept], FOREVER) == {kept.shard}
        assert store.claimable(10) == [(lost.shard, Priority.DEFAULT)]
        assert store.renew([taken], FOREVER) == {taken.shard}
        assert store.claimable_count() == 0
        assert store.renew([], FOREVER) == set()

    def test_it_ends_that_long_after_now(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        store.renew([lease], 100.0)
        _, rows = store.select("SELECT lease_until FROM shards")
        [(until,)] = rows
        [(now,)] = store.select(
            "SELECT extract(epoch FROM now())"
            if "postgresql" in store.url_without_password
            else "SELECT strftime('%s', 'now') + 0"
        )[1]
        assert 80 < until - now < 101

    def test_a_shard_that_was_done_or_given_back_is_lost(self, store: Store) -> None:
        batch_id = submit(store, 8)
        done, back = claim(store, batch_id, 0), claim(store, batch_id, 1)
        finish(store, done)
        store.release([back])
        assert store.renew([done, back], FOREVER) == set()


class TestReleasing:
    def test_it_does_not_count_as_an_attempt(self, store: Store) -> None:
        batch_id = submit(store, 4)
        for fence in (1, 2, 3):
            lease = claim(store, batch_id)
            assert (lease.fence, lease.attempt) == (fence, 1)
            store.release([lease])
        assert row(store, ShardId(batch_id, 0), "state, attempts") == ("ready", 0)

    def test_a_lost_lease_is_left_to_its_new_holder(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lost = claim(store, batch_id, ttl=GONE)
        held = claim(store, batch_id, worker="w2")
        store.release([lost])
        assert row(store, held.shard, "state, owner, attempts") == ("leased", "w2", 2)

    def test_outcomes_stay(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.record([(lease, answer(0))])
        store.release([lease])
        assert store.batch(batch_id).counts == Counts(total=4, queued=3, completed=1)
        assert len(store.pending_requests(claim(store, batch_id))) == 3


def test_a_batch_that_asks_for_a_model_is_for_workers_with_it(store: Store) -> None:
    free, small, large = (submit(store, 4, model=model) for model in (None, "small", "/models/large"))
    everywhere = [ShardId(batch, 0) for batch in (free, small, large)]
    assert [s for s, _ in store.claimable(9, models={"small", "/models/small"})] == everywhere[:2]
    assert store.claimable_count({"small"}) == 2
    assert store.claimable_count() == 3
    assert store.for_other_models(everywhere, {"small"}) == {everywhere[2]}
    assert [lease.shard for lease in store.claim(everywhere, "w1", FOREVER, {"small"})] == everywhere[:2]
    assert [lease.shard for lease in store.claim(everywhere, "w2", FOREVER, {"/models/large"})] == everywhere[2:]
    assert store.for_other_models(everywhere, set()) == set(everywhere[1:])


def test_who_holds_what_such_a_model_could_go_on_with(store: Store) -> None:
    batch_id, foreign = submit(store, 12), submit(store, 4, model="other")
    claim(store, batch_id, 0, worker="w1", ttl=100)
    claim(store, batch_id, 1, worker="w1", ttl=50)
    finish(store, claim(store, batch_id, 2, worker="w2"))
    claim(store, foreign, 0, worker="w3")
    before = store.holders({"m"})
    assert before.keys() == {"w1"}
    assert store.holders().keys() == {"w1", "w3"}
    lease = claim(store, submit(store, 4), worker="w4", ttl=10)
    first = store.holders()["w4"]
    store.renew([lease], 60)
    assert store.holders()["w4"] > first + 40
    store.cancel_batch(batch_id)
    store.pause_batch(foreign)
    assert store.holders().keys() == {"w4"}
