"""Who drew which tokens: spans travel with checkpoints and outcomes, and the view `completion_versions` has all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.types import FinishReason, RequestError, RequestStatus, VersionSpan
from tests.support.batches import FOREVER, answer, claim, crash, failure, finish, progress, select, submit
from tests.support.cases import case

if TYPE_CHECKING:
    from batchjobs.store import Store
    from batchjobs.types import Completion

OLD = VersionSpan(version="v1", worker="w1", attempt=1)
NEW = VersionSpan(version="v2", from_token=2, worker="w2", attempt=2)


def spans(store: Store) -> list[tuple[Any, ...]]:
    return select(store, 'SELECT * FROM completion_versions ORDER BY batch_id, "index", choice, span')


def outcome(store: Store, batch_id: str, index: int = 0) -> Completion:
    completion = store.result(batch_id, index).completion
    assert completion is not None
    return completion


class TestOutcomes:
    @pytest.mark.parametrize(
        "given",
        [
            (),
            (OLD,),
            (OLD, NEW),
            (VersionSpan(version="v1"), VersionSpan(version="größer", from_token=1, worker='a"b\\', attempt=3)),
        ],
    )
    def test_what_goes_in_comes_out(self, store: Store, given: tuple[VersionSpan, ...]) -> None:
        batch_id = submit(store, 2)
        store.record([(claim(store, batch_id), answer(0, version_spans=given))])
        assert outcome(store, batch_id).version_spans == given

    def test_they_are_null_where_there_is_no_token(self, store: Store) -> None:
        batch_id = submit(store, 2)
        store.record([(claim(store, batch_id), failure(0))])
        assert outcome(store, batch_id).version_spans == ()
        assert select(store, "SELECT version_spans IS NULL FROM completions") == [(True,)]
        assert spans(store) == []

    def test_a_name_that_no_database_takes(self, store: Store) -> None:
        batch_id = submit(store, 1)
        odd = (VersionSpan(version="v\0", worker="\ud800"), VersionSpan(version="v\0", from_token=1))
        store.record([(claim(store, batch_id), answer(0, version_spans=odd))])
        assert [(span.version, span.worker) for span in outcome(store, batch_id).version_spans] == [
            ("v\ufffd", "\ufffd"), ("v\ufffd", None),
        ]  # fmt: skip

    def test_a_retry_keeps_those_of_before(self, store: Store) -> None:
        batch_id = submit(store, 1)
        failed = replace(failure(0), token_ids=(1, 2, 3), version_spans=(OLD, NEW), model_version="v2")
        store.record([(claim(store, batch_id), failed)])
        store.retry_failed(batch_id)
        assert [past.version_spans for past in store.past_completions(batch_id, 0)] == [(OLD, NEW)]
        assert spans(store) == []
        store.record([(claim(store, batch_id), answer(0, version_spans=(OLD,)))])
        assert outcome(store, batch_id).version_spans == (OLD,)


class TestCheckpoints:
    def test_the_next_worker_gets_them(self, store: Store) -> None:
        batch_id = submit(store, 2)
        begun = (progress(3, version_spans=(OLD, NEW)), progress(1, choice=1, version_spans=(OLD,)))
        store.save_checkpoints([(crash(store, batch_id), 0, begun)], "v2")
        assert store.checkpoints(claim(store, batch_id), "v2") == {0: begun}
        assert store.progress(batch_id, 0) == begun

    def test_tokens_in_progress_are_summed_up(self, store: Store) -> None:
        batch_id, other = submit(store, 8), submit(store, 4)
        lease = claim(store, batch_id)
        records = [(lease, 0, (progress(3), progress(2, choice=1))), (lease, 1, (progress(4),))]
        store.save_checkpoints(records, "v1")
        store.save_checkpoints([(claim(store, batch_id, 1), 5, (progress(1),))], "v1")
        assert store.batch(batch_id).tokens.in_progress == 10
        assert store.batch(other).tokens.in_progress == 0
        store.save_checkpoints([(lease, 1, (progress(6),))], "v1")
        store.record([(lease, answer(0, tokens=5))])
        tokens = store.batch(batch_id).tokens
        assert (tokens.completion, tokens.in_progress) == (5, 7)
        store.cancel_batch(other)
        assert [batch.tokens.in_progress for batch in store.batches()] == [0, 7]

    def test_what_the_store_ends_is_of_the_version_that_drew_the_last_token(self, store: Store) -> None:
        """The worker had been updated, and had not drawn a token since."""
        batch_id = submit(store, 2)
        store.register_model_version("v1", "old", "/models/old", "float32", {})
        store.register_model_version("v2", "new", "/models/new", "float32", {})
        lease = crash(store, batch_id, worker="w2")
        begun = progress(1, version_spans=(OLD,)), progress(3, choice=1, version_spans=(OLD, NEW))
        store.save_checkpoints([(lease, 0, begun), (lease, 1, (progress(2),))], "v2")
        store.cancel_batch(batch_id)
        choices = [choice for stored in store.results(batch_id) for choice in stored.choices]
        assert [(each.model_version, each.model, each.version_spans) for each in choices] == [
            ("v1", "old", (OLD,)),
            ("v2", "new", (OLD, NEW)),
            ("v2", "new", ()),
        ]

    def test_one_that_is_given_up_keeps_them(self, store: Store) -> None:
        batch_id = submit(store, 1)
        store.save_checkpoints([(crash(store, batch_id, times=5), 0, (progress(3, version_spans=(OLD, NEW)),))], "v2")
        assert store.isolate().failed == 1
        kept = outcome(store, batch_id)
        assert (kept.status, kept.model_version, kept.version_spans) == (RequestStatus.FAILED, "v2", (OLD, NEW))

    def test_one_request_that_is_cancelled_keeps_them(self, store: Store) -> None:
        batch_id = submit(store, 2)
        store.save_checkpoints([(crash(store, batch_id), 1, (progress(3, version_spans=(OLD, NEW)),))], "v2")
        store.cancel_request(batch_id, 1)
        assert outcome(store, batch_id, 1).version_spans == (OLD, NEW)


class TestView:
    @case("A-eng-04")
    def test_one_row_a_span(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        third = replace(NEW, from_token=4, attempt=3)
        error = RequestError(code="e", message="m")
        broken = {"status": RequestStatus.FAILED, "finish_reason": FinishReason.ERROR, "error": error}
        store.record(
            [
                (lease, answer(0, tokens=5, version_spans=(OLD, NEW, third))),
                (lease, answer(0, choice=1, tokens=1, version_spans=(OLD,))),
                (lease, answer(1, tokens=3)),  # as before there were spans
                (lease, failure(2)),
                (lease, answer(3, tokens=2, version_spans=(VersionSpan(version="v2"),), **broken)),
            ]
        )
        assert spans(store) == [
            (batch_id, 0, 0, 0, "v1", "w1", 1, 0, 2),
            (batch_id, 0, 0, 1, "v2", "w2", 2, 2, 2),
            (batch_id, 0, 0, 2, "v2", "w2", 3, 4, 1),
            (batch_id, 0, 1, 0, "v1", "w1", 1, 0, 1),
            (batch_id, 1, 0, 0, "v1", "w1", 1, 0, 3),
            (batch_id, 3, 0, 0, "v2", None, 0, 0, 2),
        ]
        by_version = "SELECT version, sum(tokens) FROM completion_versions GROUP BY version ORDER BY version"
        assert select(store, by_version) == [("v1", 6), ("v2", 5)]
        generated = select(store, "SELECT sum(completion_tokens) FROM completions")
        assert generated == [(11,)]

    def test_the_tokens_of_all_spans_are_those_of_all_rows(self, store: Store) -> None:
        """Whatever ends them: workers, the store, and those that were never begun."""
        batch_id = submit(store, 12, shard_size=3)
        store.save_checkpoints([(crash(store, batch_id, 0), 0, (progress(3, version_spans=(OLD, NEW)),))], "v2")
        finish(store, claim(store, batch_id, 1, ttl=FOREVER))
        store.cancel_batch(batch_id)
        [[rows, tokens]] = select(store, "SELECT count(*), sum(tokens) FROM completion_versions")
        assert (rows, tokens) == (5, store.batch(batch_id).tokens.completion)
