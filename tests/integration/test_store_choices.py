"""Requests with several choices: one row a choice, one request in every count; and what is kept of a scored prompt."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.store.records import Recorded
from batchjobs.types import (
    Completion,
    Counts,
    FinishReason,
    Lease,
    PromptScores,
    RequestError,
    RequestStatus,
    TokenCounts,
)
from tests.support.batches import FOREVER, GONE, answer, claim, create, failure, request, submit

if TYPE_CHECKING:
    from batchjobs.store import Store, StoredResult


def cancelled(index: int, **values: Any) -> Completion:
    return answer(index, status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED, **values)


def choices(lease: Lease, *made: Completion) -> list[tuple[Lease, Completion]]:
    """These as choices 0, 1, … of one request."""
    return [(lease, replace(each, choice=number)) for number, each in enumerate(made)]


@pytest.fixture
def mixed(store: Store) -> str:
    """Requests of three choices each that ended in every way, and a sixth that waits."""
    batch_id = submit(store, 6, shard_size=6)
    lease = claim(store, batch_id)
    records = [
        *choices(lease, answer(4, tokens=1), cancelled(4, tokens=0), failure(4, "late")),
        *choices(lease, answer(0, tokens=1), answer(0, tokens=2), answer(0, tokens=3)),
        *choices(lease, answer(1, tokens=1), failure(1, "first"), failure(1, "second")),
        *choices(lease, failure(2, "first"), answer(2), answer(2)),
        *choices(lease, cancelled(3, tokens=2, text="par"), answer(3), failure(3, "worse")),
    ]
    for _ in range(2):  # the same shard delivered twice
        assert store.record(records) == Recorded(done=[], stale=[])
    return batch_id


STATES = ["completed", "failed", "failed", "cancelled", "cancelled", "running"]


class TestCounting:
    def test_a_request_counts_once_in_the_state_of_its_worst_choice(self, store: Store, mixed: str) -> None:
        info = store.batch(mixed)
        assert info.counts == Counts(total=6, running=1, completed=1, failed=2, cancelled=2)
        assert info.tokens == TokenCounts(prompt=10 * 4, completion=6 + 1 + 6 + 5 + 1)
        [(count,)] = store.select("SELECT count(*) FROM completions")[1]
        assert count == 15

    def test_a_failure_counts_once_by_its_first_failed_choice(self, store: Store, mixed: str) -> None:
        assert store.failures(mixed) == {"first": 2}

    def test_the_last_request_closes_the_shard(self, store: Store) -> None:
        batch_id = submit(store, 2, shard_size=2)
        lease = claim(store, batch_id)
        both = [*choices(lease, answer(0), answer(0)), *choices(lease, answer(1), failure(1))]
        assert store.record(both[:2]) == Recorded(done=[], stale=[])
        for _ in range(2):
            assert store.record(both) == Recorded(done=[lease.shard], stale=[])
        assert store.batch(batch_id).counts == Counts(total=2, completed=1, failed=1)

    def test_a_request_that_has_ended_gets_no_more_choices(self, store: Store) -> None:
        """Its lease ran out, somebody cancelled it, and its worker comes back with three answers."""
        batch_id = submit(store, 2, shard_size=2)
        lease = claim(store, batch_id, ttl=GONE)
        store.cancel_request(batch_id, 0)
        store.record(choices(lease, answer(0), answer(0), answer(0)))
        found = store.result(batch_id, 0)
        assert (found.state, len(found.choices)) == ("cancelled", 1)
        assert store.batch(batch_id).tokens == TokenCounts()

    def test_a_choice_without_the_first_one_is_refused(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        with pytest.raises(ValueError, match="choice 1 of request 2 came without the first one"):
            store.record([(lease, answer(0)), (lease, answer(2, choice=1))])
        [(count,)] = store.select("SELECT count(*) FROM completions")[1]
        assert count == 0

    def test_another_worker_makes_a_request_anew_or_not_at_all(self, store: Store) -> None:
        batch_id = submit(store, 2, shard_size=2)
        lease = claim(store, batch_id, ttl=GONE)
        store.record(choices(lease, answer(1), answer(1)))
        [heir] = store.claim([lease.shard], "w2", FOREVER)
        assert [pending.index for pending in store.pending_requests(heir)] == [0]

    def test_cancelling_a_batch_leaves_the_choices_that_are_there(self, store: Store) -> None:
        batch_id = submit(store, 3, shard_size=3)
        store.record(choices(claim(store, batch_id, ttl=GONE), answer(1), answer(1), failure(1)))
        counts = store.cancel_batch(batch_id)
        assert counts == Counts(total=3, failed=1, cancelled=2)
        assert [(r.state, len(r.choices)) for r in store.results(batch_id)] == [
            ("cancelled", 1),
            ("failed", 3),
            ("cancelled", 1),
        ]


class TestReading:
    def test_one_result_a_request_with_its_choices_in_order(self, store: Store, mixed: str) -> None:
        found = list(store.results(mixed))
        assert [(each.request.index, each.state) for each in found] == list(enumerate(STATES))
        assert [[c.choice for c in each.choices] for each in found] == [[0, 1, 2]] * 5 + [[]]
        assert [c.status for c in found[3].choices] == ["cancelled", "completed", "failed"]
        assert [each.error and each.error.code for each in found] == [None, "first", "first", None, None, None]
        assert found[3].completion == cancelled(3, tokens=2, text="par")
        assert found[5].completion is None

    def test_only_some_states(self, store: Store, mixed: str) -> None:
        def indexes(only: str) -> list[int]:
            return [each.request.index for each in store.results(mixed, only=only)]

        assert (indexes("completed"), indexes("failed"), indexes("cancelled")) == ([0], [1, 2], [3, 4])

    def test_one_request(self, store: Store, mixed: str) -> None:
        found = store.result(mixed, 1)
        assert (found.state, len(found.choices)) == ("failed", 3)
        assert found.error == RequestError(code="first", message="too long")

    def test_pages_join_without_a_seam_whatever_the_number_of_choices(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("batchjobs.store.reading.MAX_CHOICES", 5)
        monkeypatch.setattr("batchjobs.store.reading.PAGE_ROWS", 4)
        numbers = [1, 5, 5, 1, 1, 5, 4, 5, 5, 5, 1, 2]
        batch_id = submit(store, 14, shard_size=14)
        lease = claim(store, batch_id)
        store.record([r for index, n in enumerate(numbers) for r in choices(lease, *[answer(index, tokens=1)] * n)])
        found = list(store.results(batch_id))
        assert [each.request.index for each in found] == list(range(14))
        assert [len(each.choices) for each in found] == [*numbers, 0, 0]
        assert [each.state for each in found[12:]] == ["running", "running"]

    def test_memory_stays_flat(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.reading.PAGE_BYTES", 500_000)
        batch_id = submit(store, 100, shard_size=100)
        lease = claim(store, batch_id)
        for index in range(100):
            store.record(choices(lease, *[answer(index, tokens=1, text="x" * 2000)] * 100))
        tracemalloc.start()
        assert sum(_characters(each) for each in store.results(batch_id)) == 100 * 100 * 2000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8e6


def _characters(found: StoredResult) -> int:
    return sum(len(choice.text) for choice in found.choices)


class TestViews:
    def test_results_has_one_row_a_request(self, store: Store, mixed: str) -> None:
        columns = '"index", state, text, completion_tokens, error_code'
        _, rows = store.select(f'SELECT {columns} FROM results ORDER BY "index"')
        assert list(rows) == [
            (0, "completed", "answer 0", 1, None),
            (1, "failed", "answer 1", 1, "first"),
            (2, "failed", "", 0, "first"),
            (3, "cancelled", "par", 2, None),
            (4, "cancelled", "answer 4", 1, None),
            (5, "running", None, None, None),
        ]

    def test_completion_tokens_has_those_of_all_choices(self, store: Store, mixed: str) -> None:
        _, rows = store.select('SELECT "index", choice, position FROM completion_tokens')
        assert Counter((index, choice) for index, choice, _ in rows) == {
            (0, 0): 1, (0, 1): 2, (0, 2): 3, (1, 0): 1, (2, 1): 3, (2, 2): 3, (3, 0): 2, (3, 1): 3, (4, 0): 1,
        }  # fmt: skip

    def test_batch_progress_counts_requests(self, store: Store, mixed: str) -> None:
        columns = "total, running, completed, failed, cancelled, prompt_tokens, completion_tokens"
        [row] = store.select(f"SELECT {columns} FROM batch_progress")[1]
        assert row == (6, 1, 1, 2, 2, 40, 19)


class TestPromptScores:
    SCORES = PromptScores(
        token_ids=(1, 72, 9),
        tokens=("<s>", "H\\u0000é", (240, 159)),
        logprobs=(None, -1.5, -0.25),
        top_logprobs=(None, ((7, -0.5, "x"), (72, -1.5, (240, 159))), ((9, -0.25, "i"),)),
    )

    def test_they_come_back_as_they_were_with_the_first_choice(self, store: Store) -> None:
        batch_id = submit(store, 2, shard_size=2)
        lease = claim(store, batch_id)
        given = answer(0, prompt_scores=self.SCORES)
        plain = answer(1, prompt_scores=replace(self.SCORES, top_logprobs=None))
        store.record([*choices(lease, given, answer(0)), (lease, plain)])
        first, second = store.result(batch_id, 0).choices
        assert first == given
        assert second.prompt_scores is None
        assert store.result(batch_id, 1).completion == plain

    def test_what_the_databases_lack_is_replaced(self, store: Store) -> None:
        lease = claim(store, submit(store, 1))
        scores = PromptScores(
            token_ids=(1, 2),
            tokens=("a\0", "\ud800"),
            logprobs=(None, -math.inf),
            top_logprobs=(None, ((1, -0.5, "\0"),)),
        )
        store.record([(lease, answer(0, prompt_scores=scores))])
        found = store.result(lease.shard.batch_id, 0).completion
        assert found is not None
        assert found.prompt_scores == PromptScores(
            token_ids=(1, 2),
            tokens=("a\ufffd", "\ufffd"),
            logprobs=(None, None),
            top_logprobs=(None, ((1, -0.5, "\ufffd"),)),
        )

    def test_they_are_one_json_object_in_sql(self, store: Store) -> None:
        lease = claim(store, submit(store, 1))
        plain = replace(self.SCORES, tokens=("<s>", "H", "i"), top_logprobs=None)
        store.record([(lease, answer(0, prompt_scores=plain))])
        [(stored,)] = store.select("SELECT prompt_logprobs FROM completions")[1]
        assert stored == (
            '{"token_ids":[1,72,9],"tokens":["<s>","H","i"],"logprobs":[null,-1.5,-0.25],"top_logprobs":null}'
        )


def test_a_request_keeps_what_it_asks_for(store: Store) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object"}}}
    body = {"prompt": "p", "max_tokens": 8, "n": 3, "echo": True, "prompt_logprobs": 2, "response_format": schema}
    batch_id = create(store)
    store.add_requests(batch_id, [request(0, **body)])
    store.open_batch(batch_id)
    found = store.result(batch_id, 0).request
    assert (found.n, found.sampling.prompt_logprobs, found.sampling.response_format) == (3, 2, schema)
