"""Failed requests run again, what they had been is kept, and everything else takes them for unfinished."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from batchjobs.errors import LineError, NotFound, UsageError
from batchjobs.store import Isolated, Retried, Store
from batchjobs.types import BatchStatus, Completion, Counts, FinishReason, PromptScores, RequestStatus
from tests.support.batches import (
    FOREVER,
    GONE,
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

NOTHING = Retried()


def rows(store: Store, columns: str) -> list[tuple[Any, ...]]:
    return list(store.select(f"SELECT {columns} FROM shards ORDER BY batch_id, shard_no", None)[1])


def failed_batch(store: Store) -> str:
    """Requests 0 and 2 of 4 have failed, and the batch is over."""
    batch_id = submit(store, 4)
    lease = claim(store, batch_id)
    store.record([(lease, made) for made in (failure(0), answer(1), answer(3), partly_failed(2))])
    return batch_id


def partly_failed(index: int) -> Completion:
    return replace(answer(index, tokens=2), status=RequestStatus.FAILED, finish_reason=FinishReason.ERROR, text="part")


class TestRetrying:
    def test_failed_requests_run_again(self, store: Store) -> None:
        batch_id = failed_batch(store)
        assert store.batch(batch_id).status is BatchStatus.COMPLETED
        assert store.retry_failed(batch_id) == Retried(requests=2)
        info = store.batch(batch_id)
        assert (info.status, info.finished_at) == (BatchStatus.RUNNING, None)
        assert info.counts == Counts(total=4, queued=2, completed=2)
        assert (info.tokens.prompt, info.tokens.completion) == (20, 6)
        assert store.failures(batch_id) == {}
        assert list(store.select('SELECT "index", state FROM results ORDER BY "index"')[1]) == [
            (0, "queued"),
            (1, "completed"),
            (2, "queued"),
            (3, "completed"),
        ]
        lease = claim(store, batch_id)
        assert (lease.attempt, lease.alone) == (2, False)
        assert [pending.index for pending in store.pending_requests(lease)] == [0, 2]
        assert finish(store, lease).done == [lease.shard]
        assert store.batch(batch_id).counts == Counts(total=4, completed=4)
        assert (store.batch(batch_id).tokens.prompt, store.batch(batch_id).tokens.completion) == (40, 12)

    def test_again_changes_nothing(self, store: Store) -> None:
        batch_id = failed_batch(store)
        store.retry_failed(batch_id)
        before = rows(store, "state, fence, attempts, forgiven, failed, completed")
        assert before == [("ready", 2, 1, 1, 0, 2)]
        assert store.retry_failed(batch_id) == NOTHING
        assert rows(store, "state, fence, attempts, forgiven, failed, completed") == before

    def test_nothing_to_do(self, store: Store) -> None:
        batch_id = submit(store, 4)
        assert store.retry_failed(batch_id) == NOTHING
        finish(store, claim(store, batch_id))
        assert store.retry_failed(batch_id) == NOTHING
        assert store.retry_failed(create(store)) == NOTHING

    def test_an_unfinished_shard_that_nobody_holds(self, store: Store) -> None:
        batch_id = submit(store, 8)
        back, crashed = claim(store, batch_id, 0), crash(store, batch_id, 1)
        store.record([(back, failure(0)), (crashed, failure(5)), (crashed, answer(6))])
        store.release([back])
        assert store.retry_failed(batch_id) == Retried(requests=2)
        assert rows(store, "state, attempts, forgiven, failed") == [("ready", 1, 1, 0), ("ready", 1, 1, 0)]
        assert store.record([(crashed, answer(5))]).stale == [crashed.shard]
        assert store.batch(batch_id).counts == Counts(total=8, queued=7, completed=1)

    def test_what_a_worker_holds_is_for_later(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lease = claim(store, batch_id, 0)
        store.record([(lease, failure(0)), (lease, failure(1))])
        other = claim(store, batch_id, 1)
        store.record([(other, failure(index)) for index in range(4, 8)])
        assert store.retry_failed(batch_id) == Retried(requests=4, held=2)
        assert finish(store, lease).done == [lease.shard]
        assert store.retry_failed(batch_id) == Retried(requests=2)

    def test_refused_lines_stay(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0), request(2)], {1: LineError(2, "no prompt"), 5: LineError(6, "empty")})
        store.open_batch(batch_id)
        lease = claim(store, batch_id)
        store.record([(lease, failure(0)), (lease, answer(2))])
        assert store.retry_failed(batch_id) == Retried(requests=1, refused=2)
        assert store.batch(batch_id).counts == Counts(total=4, queued=1, completed=1, failed=2)
        assert store.retry_failed(batch_id) == Retried(refused=2)

    def test_choices_go_together_by_the_worst_one(self, store: Store) -> None:
        batch_id = submit(store, 3)
        lease = claim(store, batch_id)
        ended = replace(answer(1, choice=1), status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)
        made = [answer(0), replace(failure(0), choice=1), failure(1), ended, answer(2), answer(2, choice=1)]
        store.record([(lease, each) for each in made])
        assert store.batch(batch_id).counts == Counts(total=3, completed=1, failed=1, cancelled=1)
        assert store.retry_failed(batch_id) == Retried(requests=1)
        assert [len(stored.choices) for stored in store.results(batch_id)] == [0, 2, 2]
        assert [past.choice for past in store.past_completions(batch_id, 0)] == [0, 1]
        assert store.batch(batch_id).tokens.completion == 9

    def test_crashes_are_forgiven(self, store: Store) -> None:
        batch_id = submit(store, 1)
        crash(store, batch_id, times=5)
        store.isolate()
        assert store.retry_failed(batch_id) == Retried(requests=1)
        assert [crash(store, batch_id).alone for _ in range(5)] == [False, False, False, True, True]
        assert store.isolate() == Isolated(failed=1)
        messages = [past.error and past.error.message for past in store.past_completions(batch_id, 0)]
        assert [str(message).split(" attempts")[0] for message in messages] == ["5"]
        assert store.result(batch_id, 0).choices[0].attempt == 10

    def test_in_portions(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.retrying._AT_ONCE", 2)
        batch_id = submit(store, 20)
        for number in range(5):
            lease = claim(store, batch_id, number)
            store.record([(lease, failure(4 * number + place)) for place in range(4)])
        assert store.retry_failed(batch_id) == Retried(requests=20)
        assert store.batch(batch_id).counts == Counts(total=20, queued=20)

    def test_a_cancelled_batch_stays_as_it_is(self, store: Store) -> None:
        batch_id = submit(store, 8)
        lease = claim(store, batch_id)
        store.record([(lease, failure(0))])
        store.cancel_batch(batch_id)
        with pytest.raises(UsageError, match="was cancelled, so its failed requests stay"):
            store.retry_failed(batch_id)
        assert store.batch(batch_id).counts == Counts(total=8, running=3, failed=1, cancelled=4)

    def test_unknown_batch(self, store: Store) -> None:
        for unknown in ("nope", "no\0pe"):
            with pytest.raises(NotFound, match="no batch"):
                store.retry_failed(unknown)


class TestPastCompletions:
    def test_the_oldest_first_as_they_were(self, store: Store) -> None:
        batch_id = submit(store, 1)
        scores = PromptScores(token_ids=(1,), tokens=("p",), logprobs=(None,), top_logprobs=None)
        tops = (((100, -0.5, " t"),), ((101, -0.25, (226,)),))
        made = [replace(failure(0, f"code{n}"), attempt=n + 1) for n in range(3)]
        made[1] = replace(partly_failed(0), attempt=2, prompt_scores=scores, top_logprobs=tops, error=made[1].error)
        assert store.past_completions(batch_id, 0) == []
        for number, completion in enumerate(made):
            lease = claim(store, batch_id)
            assert lease.attempt == completion.attempt
            store.record([(lease, completion)])
            assert store.past_completions(batch_id, 0) == made[:number]
            assert store.retry_failed(batch_id) == Retried(requests=1)
        assert store.past_completions(batch_id, 0) == made

    def test_an_attempt_that_was_given_back_does_not_come_twice(self, store: Store) -> None:
        """The claim is taken back, but an outcome under its number is there."""
        batch_id = submit(store, 2)
        for turn in range(3):
            lease = claim(store, batch_id)
            assert lease.attempt == turn + 1
            store.record([(lease, replace(failure(0), attempt=lease.attempt))])
            store.release([lease])
            assert store.retry_failed(batch_id) == Retried(requests=1)
        assert [past.attempt for past in store.past_completions(batch_id, 0)] == [1, 2, 3]
        assert store.past_completions(batch_id, 1) == []

    @pytest.mark.parametrize("index", [-1, 7, 2**70])
    def test_of_nothing(self, store: Store, index: int) -> None:
        assert store.past_completions(submit(store, 1), index) == []

    def test_one_that_fails_again_begins_afresh(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = claim(store, batch_id)
        store.save_checkpoints([(lease, 0, (progress(),))], "v1")
        store.record([(lease, failure(0))])
        store.retry_failed(batch_id)
        assert store.checkpoints(claim(store, batch_id), "v1") == {}


class TestAtTheSameTime:
    def test_two_retries_beside_workers_that_fail(self, store: Store) -> None:
        batch_id = submit(store, 40)
        start = Barrier(4)

        def work(number: int) -> int:
            start.wait()
            made = 0
            for _ in range(10):
                for lease in store.claim([s for s, _ in store.claimable(5)], f"w{number}", FOREVER):
                    pending = store.pending_requests(lease)
                    made += len(pending)
                    store.record([(lease, replace(failure(p.index), attempt=lease.attempt)) for p in pending])
            return made

        def retry(_: int) -> int:
            start.wait()
            return sum(store.retry_failed(batch_id).requests for _ in range(10))

        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(work, number) for number in range(2)]
            retried = [pool.submit(retry, number) for number in range(2)]
            failed, again = (sum(each.result() for each in futures) for futures in (made, retried))
        [(past,)] = store.select("SELECT count(*) FROM past_completions")[1]
        assert past == again
        assert store.batch(batch_id).counts == Counts(total=40, queued=40 - failed + again, failed=failed - again)
        assert store.retry_failed(batch_id) == Retried(requests=failed - again)
        assert store.batch(batch_id).counts == Counts(total=40, queued=40)

    def test_a_cancellation_in_the_middle_ends_it(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.retrying._AT_ONCE", 1)
        batch_id = submit(store, 8)
        for number in range(2):
            lease = claim(store, batch_id, number, ttl=GONE)
            store.record([(lease, failure(4 * number))])
        portion = store._retry

        def retry_and_be_overtaken(*given: Any) -> Retried:
            done = portion(*given)
            store.cancel_batch(batch_id)
            return done

        monkeypatch.setattr(store, "_retry", retry_and_be_overtaken)
        with pytest.raises(UsageError, match="was cancelled"):
            store.retry_failed(batch_id)
        assert store.batch(batch_id).counts == Counts(total=8, failed=1, cancelled=7)


def test_an_old_order_to_cancel_does_not_meet_a_retry(store: Store) -> None:
    batch_id = submit(store, 1)
    lease = claim(store, batch_id)
    store.cancel_request(batch_id, 0)
    store.record([(lease, failure(0))])  # it had failed before its worker heard of the order
    assert store.retry_failed(batch_id).requests == 1
    again = claim(store, batch_id)
    assert store.orders("w1", [again]).cancelled_requests == set()
