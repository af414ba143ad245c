"""Requests that only one version of a model may answer: how they come into shards, and who may claim those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.errors import LineError, UsageError
from batchjobs.types import Counts, ShardId
from tests.support.batches import FOREVER, answer, claim, crash, create, failure, finish, request, select, submit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import Store

A, B = "sha256:aaaaaaaaaaaaaaaa", "sha256:bbbbbbbbbbbbbbbb"


def pinned(store: Store, pins: Sequence[str | None], *, refused: Sequence[int] = (), shard_size: int = 3) -> str:
    """An open batch of one request for each of these pins, or lack of one."""
    batch_id = create(store, shard_size=shard_size)
    given = [request(i, prompt="p", max_tokens=8, **({"model_version": p} if p else {})) for i, p in enumerate(pins)]
    store.add_requests(batch_id, given, {i: LineError(i + 1, None, "bad", "no") for i in refused})
    store.open_batch(batch_id)
    return batch_id


def shards(store: Store) -> list[tuple[Any, ...]]:
    columns = "shard_no, first_index, last_index, requests, state, failed, model_version"
    return select(store, f"SELECT {columns} FROM shards ORDER BY shard_no")


class TestOpening:
    def test_a_shard_of_one_pin_gets_it_and_a_mixed_one_becomes_single_ones(self, store: Store) -> None:
        pins = [A, A, A, None, None, None, A, B, None, B]
        batch_id = pinned(store, pins)
        assert shards(store) == [
            (0, 0, 2, 3, "ready", 0, A),
            (1, 3, 5, 3, "ready", 0, None),
            (3, 9, 9, 1, "ready", 0, B),
            (4, 6, 6, 1, "ready", 0, A),
            (5, 7, 7, 1, "ready", 0, B),
            (6, 8, 8, 1, "ready", 0, None),
        ]
        assert store.open_batch(batch_id) == 6
        assert [stored.request.model_version for stored in store.results(batch_id)] == pins
        assert [stored.state for stored in store.results(batch_id)] == ["queued"] * 10

    def test_refused_lines_do_not_count_and_stay_in_one_shard_each(self, store: Store) -> None:
        batch_id = pinned(store, [A, B, A, A, B, None, B], refused=[1, 4, 6])
        assert shards(store) == [
            (0, 0, 2, 3, "ready", 1, A),
            (2, 6, 6, 1, "done", 1, None),
            (3, 3, 3, 1, "ready", 0, A),
            (4, 4, 4, 1, "done", 1, None),
            (5, 5, 5, 1, "ready", 0, None),
        ]
        assert store.batch(batch_id).counts == Counts(total=7, queued=4, failed=3)
        for shard, _ in store.claimable(9):
            finish(store, claim(store, batch_id, shard.shard_no))
        assert store.batch(batch_id).counts == Counts(total=7, completed=4, failed=3)
        assert store.batch(batch_id).status.is_final

    def test_many_mixed_shards(self, store: Store) -> None:
        batch_id = pinned(store, [A, B] * 210, shard_size=2)
        rows = shards(store)
        assert len(rows) == 420
        assert sorted((first, pin) for _, first, _, _, _, _, pin in rows) == list(enumerate([A, B] * 210))
        assert all(first == last for _, first, last, *_ in rows)
        assert store.claimable_count(version=A) == 210
        assert store.batch(batch_id).counts == Counts(total=420, queued=420)

    def test_one_that_was_cancelled_while_it_loaded(self, store: Store) -> None:
        batch_id = create(store, shard_size=2)
        store.add_requests(batch_id, [request(i, prompt="p", model_version=[A, B][i % 2]) for i in range(3)])
        store.cancel_batch(batch_id)
        store.open_batch(batch_id)
        assert store.batch(batch_id).counts == Counts(total=3, cancelled=3)

    def test_a_pin_that_no_database_takes(self, store: Store) -> None:
        batch_id = create(store)
        with pytest.raises(UsageError, match="request 0: model_version"):
            store.add_requests(batch_id, [request(0, prompt="p", model_version="a\0")])


class TestClaiming:
    def test_only_that_version_gets_them(self, store: Store) -> None:
        batch_id = pinned(store, [None, A, B], shard_size=1)
        free, first, second = everything = [ShardId(batch_id, n) for n in range(3)]
        assert [shard for shard, _ in store.claimable(9)] == everything
        assert [shard for shard, _ in store.claimable(9, version=A)] == [free, first]
        assert [shard for shard, _ in store.claimable(9, models={"m"}, version="other")] == [free]
        assert (store.claimable_count({"m"}, B), store.claimable_count()) == (2, 3)
        assert store.for_other_models(everything, {"m"}, A) == {second}
        assert store.for_other_models(everything, None, "other") == {first, second}
        assert store.for_other_models(everything, {"m"}) == set()
        leases = store.claim(everything, "w1", FOREVER, {"m"}, A)
        assert [(lease.shard, lease.model_version) for lease in leases] == [(free, None), (first, A)]
        assert store.claim([second], "w1", FOREVER, None, A) == []
        [lease] = store.claim([second], "w2", FOREVER)
        assert lease.model_version == B

    def test_a_model_and_a_version_are_both_needed(self, store: Store) -> None:
        batch_id = create(store, model="large")
        store.add_requests(batch_id, [request(0, prompt="p", model_version=A)])
        store.open_batch(batch_id)
        found = [store.claimable_count(*w) for w in (({"large"}, A), ({"large"}, B), ({"m"}, A), (None, A))]
        assert found == [1, 0, 0, 1]
        assert store.for_other_models([ShardId(batch_id, 0)], {"large"}, B) == {ShardId(batch_id, 0)}

    def test_what_others_hold_of_other_versions_is_not_waited_for(self, store: Store) -> None:
        batch_id = pinned(store, [A, B], shard_size=1)
        claim(store, batch_id, 0, worker="w1")
        claim(store, batch_id, 1, worker="w2")
        assert (store.holders().keys(), store.holders({"m"}, B).keys()) == ({"w1", "w2"}, {"w2"})

    def test_what_is_parted_stays_pinned(self, store: Store) -> None:
        batch_id = pinned(store, [A, A, A])
        crash(store, batch_id, times=2)
        assert store.isolate().split == 1
        assert [(first, pin) for _, first, _, _, _, _, pin in shards(store)] == [(0, A), (1, A), (2, A)]
        assert claim(store, batch_id, 2).model_version == A

    def test_what_is_run_again_stays_pinned(self, store: Store) -> None:
        batch_id = pinned(store, [A, B])
        for shard, _ in store.claimable(9):
            lease = claim(store, batch_id, shard.shard_no)
            [pending] = store.pending_requests(lease)
            store.record([(lease, failure(pending.index) if pending.index else answer(0))])
        assert store.retry_failed(batch_id).requests == 1
        assert [store.claimable_count(version=version) for version in (A, B)] == [0, 1]


def test_what_is_needed_to_finish_a_batch(store: Store) -> None:
    batch_id = create(store, shard_size=1, model="large")
    pins = [None, A, A, B]
    store.add_requests(
        batch_id, [request(i, prompt="p", **({"model_version": p} if p else {})) for i, p in enumerate(pins)]
    )
    assert store.unserved(batch_id) == []
    store.open_batch(batch_id)
    submit(store, 1, model="other")
    assert store.unserved(batch_id) == [("large", None), ("large", A), ("large", B)]
    for number in (0, 3):
        finish(store, claim(store, batch_id, number))
    assert store.unserved(batch_id) == [("large", A)]
    assert store.unserved("nope") == []
