"""Outcomes are stored exactly once, and the counts agree with them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta, timezone
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from batchjobs.store.records import Recorded
from batchjobs.types import BatchStatus, Counts, FinishReason, Lease, RequestError, RequestStatus, ShardId, TokenCounts
from tests.support.batches import GONE, STARTED, answer, claim, failure, finish, submit

if TYPE_CHECKING:
    from batchjobs.store import Store
    from batchjobs.types import Completion


def stored(store: Store, batch_id: str, index: int = 0) -> Completion:
    completion = store.result(batch_id, index).completion
    assert completion is not None
    return completion


def count_completions(store: Store) -> int:
    [(count,)] = store.select("SELECT count(*) FROM completions")[1]
    return count


class TestContent:
    def test_everything_comes_back_as_it_was(self, store: Store) -> None:
        lease = claim(store, submit(store, 2))
        given = replace(
            answer(0, tokens=2, text="müßig 🦊\n\\u0000"),
            tokens=("\\u0000", (240, 159)),
            top_logprobs=(((100, -0.0, " t0"), (7, -1.5, (240, 159))), ((101, -0.5, " t1"),)),
        )
        failed = replace(failure(1, "oom", 'no "memory"'), finished_at=STARTED, worker="w2")
        store.record([(lease, given), (lease, failed)])
        assert stored(store, lease.shard.batch_id, 0) == given
        assert stored(store, lease.shard.batch_id, 1) == failed

    def test_nul_and_half_characters_become_replacement_characters(self, store: Store) -> None:
        lease = claim(store, submit(store, 2))
        bad = replace(
            answer(0, tokens=2, text="a\0b\ud800c"),
            tokens=("\0", "\ud800x"),
            top_logprobs=(((1, -0.5, "\0"),), ((2, -0.5, "\ud800"),)),
        )
        store.record([(lease, bad), (lease, failure(1, message="bad \0 byte"))])
        completion = stored(store, lease.shard.batch_id)
        assert completion.text == "a\ufffdb\ufffdc"
        assert completion.tokens == ("\ufffd", "\ufffdx")
        assert completion.top_logprobs == (((1, -0.5, "\ufffd"),), ((2, -0.5, "\ufffd"),))
        assert stored(store, lease.shard.batch_id, 1).error == RequestError(
            code="context_length_exceeded", message="bad \ufffd byte"
        )

    def test_numbers_that_json_lacks_become_null_and_read_as_nan(self, store: Store) -> None:
        lease = claim(store, submit(store, 1))
        logprobs = (math.nan, -math.inf, -0.5)
        store.record([(lease, replace(answer(0), logprobs=logprobs, top_logprobs=(((1, -math.inf, "x"),),) * 3))])
        completion = stored(store, lease.shard.batch_id)
        assert [math.isnan(value) for value in completion.logprobs] == [True, True, False]
        assert completion.top_logprobs is not None
        assert math.isnan(completion.top_logprobs[0][0][1])
        [(text,)] = store.select("SELECT logprobs FROM completions")[1]
        assert text == "[null,null,-0.5]"

    def test_instants_of_any_zone_are_stored_in_utc(self, store: Store) -> None:
        lease = claim(store, submit(store, 1))
        away = STARTED.replace(microsecond=0).astimezone(timezone(timedelta(hours=5, minutes=30)))
        store.record([(lease, replace(answer(0), started_at=away))])
        started_at = stored(store, lease.shard.batch_id).started_at
        assert started_at == STARTED.replace(microsecond=0)
        assert started_at.utcoffset() == timedelta(0)
        [(text,)] = store.select("SELECT started_at FROM completions")[1]
        assert text == "2026-03-01T12:00:00.000000Z"


class TestFencing:
    def test_a_stale_lease_writes_nothing(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lost, kept = claim(store, batch_id, 0, ttl=GONE), claim(store, batch_id, 1)
        new = claim(store, batch_id, 0, worker="w2")
        recorded = store.record([(lost, answer(0)), (kept, answer(4)), (lost, answer(1))])
        assert recorded == Recorded(done=[], stale=[ShardId(batch_id, 0)])
        assert count_completions(store) == 1
        assert [pending.index for pending in store.pending_requests(new)] == [0, 1, 2, 3]

    def test_a_lease_that_ran_out_but_was_not_taken_still_writes(self, store: Store) -> None:
        lease = claim(store, submit(store, 4), ttl=GONE)
        assert finish(store, lease) == Recorded(done=[lease.shard], stale=[])

    def test_nor_does_one_that_was_given_back(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        store.release([lease])
        assert store.record([(lease, answer(0))]) == Recorded(done=[], stale=[lease.shard])
        assert count_completions(store) == 0

    def test_an_invented_shard_is_stale(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = Lease(ShardId(batch_id, 7), 1, 1)
        assert store.record([(lease, answer(28))]) == Recorded(done=[], stale=[lease.shard])

    def test_a_completion_of_another_shard_is_refused_whole(self, store: Store) -> None:
        lease = claim(store, submit(store, 8), 0)
        with pytest.raises(ValueError, match="request 4 does not belong to shard"):
            store.record([(lease, answer(0)), (lease, answer(4))])
        assert count_completions(store) == 0


class TestRepeating:
    def test_the_same_call_gives_the_same_and_stores_nothing_twice(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        first = [(lease, answer(0)), (lease, answer(1))]
        assert store.record(first) == store.record(first) == Recorded(done=[], stale=[])
        last = [(lease, replace(answer(index), text="again")) for index in range(4)]
        assert store.record(last) == store.record(last) == Recorded(done=[lease.shard], stale=[])
        assert [each.completion.text for each in store.results(batch_id) if each.completion] == [
            "answer 0",
            "answer 1",
            "again",
            "again",
        ]
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.COMPLETED, Counts(total=4, completed=4))
        assert info.tokens == TokenCounts(prompt=40, completion=12)

    def test_a_request_twice_in_one_call_counts_once(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.record([(lease, answer(2)), (lease, replace(answer(2), text="second"))])
        assert stored(store, batch_id, 2).text == "answer 2"
        assert store.batch(batch_id).counts.completed == 1

    def test_two_records_of_one_shard_at_once(self, store: Store) -> None:
        batch_id = submit(store, 64, shard_size=64)
        lease = claim(store, batch_id)
        start = Barrier(4)

        def record_some(thread: int) -> list[ShardId]:
            start.wait()
            done = []
            for first in range(0, 64, 8):
                chunk = range(first, first + 8) if thread % 2 else range(first + 7, first - 1, -1)
                done += store.record([(lease, answer(index)) for index in chunk]).done
            return done

        with ThreadPoolExecutor(4) as pool:
            done = [shard for each in [pool.submit(record_some, n) for n in range(4)] for shard in each.result()]
        assert set(done) == {lease.shard}
        assert count_completions(store) == 64
        info = store.batch(batch_id)
        assert info.counts == Counts(total=64, completed=64)
        assert info.tokens == TokenCounts(prompt=640, completion=192)

    def test_nothing_to_record(self, store: Store) -> None:
        assert store.record([]) == Recorded(done=[], stale=[])


class TestCounting:
    def test_each_status_is_counted_in_its_shard(self, store: Store) -> None:
        batch_id = submit(store, 6)
        first, second = claim(store, batch_id, 0), claim(store, batch_id, 1)
        cancelled = replace(
            answer(1, tokens=2), status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED, text="partial"
        )
        expired = replace(failure(2), status=RequestStatus.EXPIRED)
        recorded = store.record(
            [(second, answer(5)), (first, answer(0)), (first, cancelled), (first, expired), (second, failure(4))]
        )
        assert recorded == Recorded(done=[second.shard], stale=[])
        columns = "completed, failed, cancelled, expired, prompt_tokens, completion_tokens, state"
        _, rows = store.select(f"SELECT {columns} FROM shards ORDER BY shard_no")
        assert list(rows) == [(1, 0, 1, 1, 20, 5, "leased"), (1, 1, 0, 0, 10, 3, "done")]
        info = store.batch(batch_id)
        assert info.counts == Counts(total=6, running=1, completed=2, failed=1, cancelled=1, expired=1)
        assert info.counts.done == 5
        assert info.tokens == TokenCounts(prompt=30, completion=8)

    def test_of_several_choices_the_request_counts_and_all_tokens(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = claim(store, batch_id)
        choices = [(lease, replace(answer(0), choice=number, text=f"choice {number}")) for number in (1, 0, 2)]
        for _ in range(2):
            assert store.record(choices).done == [lease.shard]
        info = store.batch(batch_id)
        assert info.counts == Counts(total=1, completed=1)
        assert info.tokens == TokenCounts(prompt=10, completion=9)
        [found] = store.results(batch_id)
        assert [(each.choice, each.text) for each in found.choices] == [(n, f"choice {n}") for n in range(3)]
        assert stored(store, batch_id).choice == 0
