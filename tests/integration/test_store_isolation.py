"""A request that kills its workers is parted from the others and given up; the others finish."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from batchjobs.errors import LineError
from batchjobs.store import Isolated, Store
from batchjobs.store.isolation import WORKER_CRASHED
from batchjobs.types import BatchStatus, Counts, FinishReason, RequestStatus, ShardId
from tests.support.batches import (
    FOREVER,
    GONE,
    STARTED,
    answer,
    claim,
    crash,
    create,
    failure,
    finish,
    progress,
    request,
    submit,
)

if TYPE_CHECKING:
    from typing import Any

COLUMNS = (
    "shard_no, first_index, last_index, requests, state, attempts, forgiven,"
    " completed, failed, cancelled, prompt_tokens, completion_tokens"
)


def rows(store: Store, columns: str = COLUMNS) -> list[tuple[Any, ...]]:
    return list(store.select(f"SELECT {columns} FROM shards ORDER BY batch_id, shard_no", None)[1])


def claimable(store: Store) -> list[int]:
    return [shard.shard_no for shard, _ in store.claimable(100)]


class TestLimits:
    def test_a_shard_of_several_waits_for_its_split_after_two_crashes(self, store: Store) -> None:
        batch_id = submit(store, 8)
        crash(store, batch_id, 0)
        assert claimable(store) == [0, 1]
        crash(store, batch_id, 0)
        assert claimable(store) == [1]
        assert store.claimable_count() == 1
        assert store.claim([ShardId(batch_id, 0)], "w", FOREVER) == []

    def test_crashes_of_a_clean_return_do_not_count(self, store: Store) -> None:
        batch_id = submit(store, 4)
        crash(store, batch_id)
        for _ in range(3):
            store.release([claim(store, batch_id)])
        assert (claimable(store), store.isolate()) == ([0], Isolated())
        crash(store, batch_id)
        assert (claimable(store), store.isolate()) == ([], Isolated(split=1))

    def test_a_single_request_comes_alone_after_three_crashes_and_fails_after_five(self, store: Store) -> None:
        batch_id = submit(store, 1)
        assert [crash(store, batch_id).alone for _ in range(5)] == [False, False, False, True, True]
        assert (claimable(store), store.claim([ShardId(batch_id, 0)], "w", FOREVER)) == ([], [])

    def test_a_batch_of_single_requests_splits_nothing(self, store: Store) -> None:
        batch_id = submit(store, 3, shard_size=1)
        crash(store, batch_id, 1, times=4)
        assert (claimable(store), store.isolate()) == ([0, 1, 2], Isolated())
        crash(store, batch_id, 1)
        assert (claimable(store), store.isolate()) == ([0, 2], Isolated(failed=1))
        assert store.result(batch_id, 1).state == "failed"

    def test_a_lease_that_is_held_is_left_alone(self, store: Store) -> None:
        batch_id = submit(store, 4)
        crash(store, batch_id)
        lease = claim(store, batch_id, ttl=FOREVER)
        assert store.isolate() == Isolated()
        assert finish(store, lease).done == [lease.shard]
        assert store.isolate() == Isolated()


class TestSplitting:
    def test_each_request_gets_a_shard_of_its_own(self, store: Store) -> None:
        batch_id = submit(store, 10)
        lease = claim(store, batch_id, 1, ttl=GONE)
        two = [replace(answer(6), choice=choice, attempt=1) for choice in (0, 1)]
        store.record([(lease, answer(4)), (lease, failure(7)), *((lease, each) for each in two)])
        crash(store, batch_id, 1, worker="w9")
        assert store.isolate() == Isolated(split=1)
        assert rows(store) == [
            (0, 0, 3, 4, "ready", 0, 0, 0, 0, 0, 0, 0),
            (2, 8, 9, 2, "ready", 0, 0, 0, 0, 0, 0, 0),
            (3, 4, 4, 1, "done", 2, 0, 1, 0, 0, 10, 3),
            (4, 5, 5, 1, "ready", 2, 0, 0, 0, 0, 0, 0),
            (5, 6, 6, 1, "done", 2, 0, 1, 0, 0, 10, 6),
            (6, 7, 7, 1, "done", 2, 0, 0, 1, 0, 0, 0),
        ]
        assert store.isolate() == Isolated()
        assert set(rows(store, "owner, fence, started_at IS NULL, finished_at IS NULL, state, lease_until")[2:]) == {
            ("w9", 2, False, False, "done", 0.0),
            ("w9", 2, False, True, "ready", 0.0),
        }
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.RUNNING, Counts(total=10, queued=7, completed=2, failed=1))
        assert (info.tokens.prompt, info.tokens.completion) == (20, 9)

    def test_the_last_outcome_of_a_lost_lease_is_refused(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lost = crash(store, batch_id, times=2)
        store.isolate()
        assert store.record([(lost, answer(0))]).stale == [lost.shard]
        assert store.save_checkpoints([(lost, 0, (progress(),))], "v1") == [lost.shard]
        assert (store.renew([lost], FOREVER), store.pending_requests(lost)) == (set(), [])
        store.release([lost])
        assert store.batch(batch_id).counts == Counts(total=4, queued=4)

    def test_checkpoints_stay(self, store: Store) -> None:
        batch_id = submit(store, 4)
        store.save_checkpoints([(crash(store, batch_id, times=2), 2, (progress(3),))], "v1")
        store.isolate()
        leases = {n: claim(store, batch_id, n) for n in claimable(store)}
        assert {n: store.checkpoints(lease, "v1") for n, lease in leases.items()} == {
            1: {},
            2: {},
            3: {2: (progress(3),)},
            4: {},
        }

    def test_refused_lines_and_gaps_in_the_indexes(self, store: Store) -> None:
        batch_id = create(store, shard_size=8)
        store.add_requests(batch_id, [request(n) for n in (1, 2, 6)], {2: LineError(3, "no prompt")})
        store.open_batch(batch_id)
        crash(store, batch_id, times=2)
        assert store.isolate() == Isolated(split=1)
        assert rows(store, "first_index, last_index, state, failed") == [
            (1, 1, "ready", 0),
            (2, 2, "done", 1),
            (6, 6, "ready", 0),
        ]

    def test_several_shards_of_several_batches(self, store: Store) -> None:
        first, second = submit(store, 12), submit(store, 8)
        for batch_id, number in ((first, 0), (first, 2), (second, 1)):
            crash(store, batch_id, number, times=2)
        assert store.isolate() == Isolated(split=3)
        assert [row[:2] for row in rows(store)] == [
            (1, 4),
            *((3 + place, place) for place in range(4)),
            *((7 + place, 8 + place) for place in range(4)),
            (0, 0),
            *((2 + place, 4 + place) for place in range(4)),
        ]

    def test_in_portions(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.isolation._AT_ONCE", 2)
        batch_id = submit(store, 20)
        for number in range(5):
            crash(store, batch_id, number, times=2)
        assert store.isolate() == Isolated(split=5)
        assert [row[1] for row in rows(store)] == list(range(20))

    def test_a_cancelled_batch_is_left_to_the_sweep(self, store: Store) -> None:
        batch_id = submit(store, 4)
        crash(store, batch_id)
        lease = claim(store, batch_id)
        store.cancel_batch(batch_id)
        store.renew([lease], GONE)
        assert (store.isolate(), store.sweep_cancelled()) == (Isolated(), 4)

    def test_a_cancelled_shard_that_had_crashed(self, store: Store) -> None:
        batch_id = submit(store, 4)
        crash(store, batch_id, times=2)
        assert store.cancel_batch(batch_id) == Counts(total=4, cancelled=4)
        assert store.isolate() == Isolated()

    def test_requests_can_be_cancelled_before_and_after(self, store: Store) -> None:
        batch_id = submit(store, 4)
        crash(store, batch_id, times=2)
        store.cancel_request(batch_id, 1)
        store.isolate()
        assert store.cancel_request(batch_id, 2) == Counts(total=4, queued=2, cancelled=2)
        held = claim(store, batch_id, 4)
        store.cancel_request(batch_id, 3)
        assert store.orders("w1", [held]).cancelled_requests == {(batch_id, 3)}


class TestGivingUp:
    def test_with_what_there_was(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = crash(store, batch_id, times=5, worker="w3")
        store.save_checkpoints([(lease, 0, (progress(2),))], "v1")
        assert store.isolate() == Isolated(failed=1)
        stored = store.result(batch_id, 0)
        [kept] = stored.choices
        assert (kept.status, kept.finish_reason) == (RequestStatus.FAILED, FinishReason.ERROR)
        assert (kept.text, kept.completion_tokens, kept.model_version) == (" t0 t1", 2, "v1")
        assert (kept.worker, kept.attempt, kept.started_at) == ("w3", 5, STARTED)
        assert stored.error is not None
        assert stored.error.code == WORKER_CRASHED
        assert stored.error.message.startswith(
            "5 attempts came to no end, the last 2 with nothing beside it: its workers died, or were cut off"
        )
        assert rows(store, "state, fence, failed, completion_tokens") == [("done", 6, 1, 2)]
        assert list(store.select("SELECT count(*) FROM checkpoints")[1]) == [(0,)]
        assert (store.batch(batch_id).status, store.failures(batch_id)) == (BatchStatus.COMPLETED, {WORKER_CRASHED: 1})
        assert store.record([(lease, answer(0))]).stale == [lease.shard]

    def test_one_that_was_to_be_cancelled_is_cancelled(self, store: Store) -> None:
        """Its worker held it when somebody asked, and died before it heard of it."""
        batch_id = submit(store, 1)
        crash(store, batch_id, times=4)
        claim(store, batch_id, ttl=FOREVER)
        assert store.cancel_request(batch_id, 0).running == 1
        with store._database.writing() as connection:
            connection.exec_driver_sql("UPDATE shards SET lease_until = 0")
        assert store.isolate() == Isolated(failed=1)
        [kept] = store.result(batch_id, 0).choices
        assert (kept.status, kept.finish_reason, kept.error) == (RequestStatus.CANCELLED, FinishReason.CANCELLED, None)
        assert store.batch(batch_id).counts == Counts(total=1, cancelled=1)

    def test_without_a_token(self, store: Store) -> None:
        batch_id = submit(store, 1)
        crash(store, batch_id, times=5)
        assert store.isolate() == Isolated(failed=1)
        [kept] = store.result(batch_id, 0).choices
        assert (kept.text, kept.tokens, kept.started_at) == ("", (), None)
        assert kept.error is not None
        assert kept.finished_at is not None

    def test_one_of_many_and_the_others_finish(self, store: Store) -> None:
        """Whoever runs request 5 dies, and all that it holds crashes with it."""
        batch_id = submit(store, 12)
        deaths = 0
        for _ in range(20):
            store.isolate()
            shards = [shard for shard, _ in store.claimable(100)]
            if not shards:
                break
            leases = store.claim(shards, "w", FOREVER)
            alone = [lease for lease in leases if lease.alone]
            together = [lease for lease in leases if not lease.alone]
            for group in ([lease] for lease in alone) if not together else [together]:
                if any(pending.index == 5 for lease in group for pending in store.pending_requests(lease)):
                    deaths += 1
                    store.renew(group, GONE)
                else:
                    for lease in group:
                        finish(store, lease)
            store.release([lease for lease in alone if together])
        assert deaths == 5
        assert store.batch(batch_id).counts == Counts(total=12, completed=11, failed=1)
        assert store.failures(batch_id) == {WORKER_CRASHED: 1}


class TestViews:
    """The state of a request is that of the shard that it is in now."""

    def states(self, store: Store, batch_id: str) -> list[str]:
        _, found = store.select('SELECT state FROM results ORDER BY "index"')
        return [state for (state,) in found]

    def test_before_and_after_a_split(self, store: Store) -> None:
        batch_id = submit(store, 6)
        lease = claim(store, batch_id, 0, ttl=GONE)
        store.record([(lease, answer(1))])
        lease = claim(store, batch_id, 0)
        claim(store, batch_id, 1)
        expected = ["running", "completed", "running", "running", "running", "running"]
        assert self.states(store, batch_id) == expected
        store.renew([lease], GONE)
        store.isolate()
        single = claim(store, batch_id, 4)
        crash(store, batch_id, 5)
        expected = ["queued", "completed", "running", "queued", "running", "running"]
        assert self.states(store, batch_id) == expected
        assert [stored.state for stored in store.results(batch_id)] == expected
        assert [store.result(batch_id, index).state for index in range(6)] == expected
        assert store.batch(batch_id).counts == Counts(total=6, queued=2, running=3, completed=1)
        finish(store, single)
        assert self.states(store, batch_id)[2] == "completed"

    def test_of_a_batch_of_single_requests(self, store: Store) -> None:
        batch_id = submit(store, 3, shard_size=1)
        claim(store, batch_id, 1)
        assert self.states(store, batch_id) == ["queued", "running", "queued"]
        assert [stored.state for stored in store.results(batch_id)] == ["queued", "running", "queued"]


class TestAtTheSameTime:
    def test_several_reconcilers_split_each_shard_once(self, store: Store) -> None:
        batches = [submit(store, 24) for _ in range(2)]
        for batch_id in batches:
            for number in range(6):
                crash(store, batch_id, number, times=2)
        start = Barrier(4)

        def isolate(_: int) -> int:
            start.wait()
            return store.isolate().split

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(isolate, range(4))) == 12
        found = rows(store, "batch_id, first_index")
        assert found == [(batch_id, index) for batch_id in batches for index in range(24)]

    def test_beside_claims_records_checkpoints_and_cancellations(self, store: Store) -> None:
        batch_id = submit(store, 60)
        start = Barrier(6)

        def work(number: int) -> None:
            start.wait()
            for turn in range(12):
                shards = [shard for shard, _ in store.claimable(6)]
                for lease in store.claim(shards, f"w{number}", GONE if (turn + number) % 3 else FOREVER):
                    pending = store.pending_requests(lease)
                    store.save_checkpoints([(lease, each.index, (progress(),)) for each in pending], "v1")
                    store.record([(lease, answer(each.index)) for each in pending[: turn % 3]])
                    store.release([lease] if turn % 2 else [])

        def isolate() -> None:
            start.wait()
            for _ in range(12):
                store.isolate()

        def cancel() -> None:
            start.wait()
            for index in range(0, 60, 7):
                store.cancel_request(batch_id, index)

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(work, number) for number in range(3)]
            futures += [pool.submit(isolate) for _ in range(2)] + [pool.submit(cancel)]
            for future in futures:
                future.result()
        counts = store.batch(batch_id).counts
        found = rows(store, "first_index, last_index, requests, completed + failed + cancelled")
        assert [index for first, last, *_ in sorted(found) for index in range(first, last + 1)] == list(range(60))
        assert sum(done for *_, done in found) == counts.done
        assert counts.total == 60
        ended = {stored.request.index for stored in store.results(batch_id) if stored.choices}
        begun = {index for (index,) in store.select('SELECT "index" FROM checkpoints')[1]}
        assert (len(ended), begun & ended) == (counts.done, set())
