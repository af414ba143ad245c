"""Checkpoints: written under the lease alone, read back as they were, gone with the outcome."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from batchjobs.store import Store, partial
from batchjobs.types import Counts, FinishReason, Lease, RequestStatus
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
from tests.support.cases import case

if TYPE_CHECKING:
    from typing import Any


def rows(store: Store) -> list[tuple[Any, ...]]:
    query = 'SELECT "index", choice, fence, model_version FROM checkpoints ORDER BY "index", choice'
    return list(store.select(query)[1])


class TestSaving:
    def test_what_was_saved_comes_back(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        tops = (((100, -0.5, " t"), (7, math.inf * -1, (226, 130))), ((101, -0.25, "\N{SNOWMAN}"),))
        first = progress(
            2, tokens=(" t", (226, 130)), top_logprobs=tops, started_at=STARTED + timedelta(microseconds=1)
        )
        second = progress(3, choice=2)
        assert store.save_checkpoints([(lease, 1, (first, second)), (lease, 3, (progress(),))], "v1") == []
        stored = store.checkpoints(lease, "v1")
        unlikely = ((100, -0.5, " t"), (7, math.nan, (226, 130)))
        [kept], [other] = (stored[1][:1], stored[1][1:])
        assert repr(kept) == repr(replace(first, top_logprobs=(unlikely, tops[1])))  # JSON has no infinity
        assert (other, stored[3]) == (second, (progress(),))
        assert list(stored) == [1, 3]

    def test_the_newest_replaces_what_was_there(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = crash(store, batch_id)
        store.save_checkpoints([(lease, 0, (progress(1), progress(1, choice=1))), (lease, 2, (progress(),))], "v1")
        lease = claim(store, batch_id)
        store.save_checkpoints([(lease, 0, (progress(5, choice=1),))], "v1")
        assert store.checkpoints(lease, "v1") == {0: (progress(5, choice=1),), 2: (progress(),)}
        assert rows(store) == [(0, 1, 2, "v1"), (2, 0, 1, "v1")]

    def test_nothing_at_all(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        assert store.save_checkpoints([], "v1") == []
        assert store.save_checkpoints([(lease, 0, ())], "v1") == []
        assert store.checkpoints(lease, "v1") == {}

    def test_what_no_database_takes_is_replaced(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        odd = progress(2, tokens=("a\0", "\ud800"), logprobs=(math.nan, -1.0))
        store.save_checkpoints([(lease, 0, (odd,))], "v1")
        [[kept]] = store.checkpoints(lease, "v1").values()
        assert kept.tokens == ("a\ufffd", "\ufffd")
        assert (math.isnan(kept.logprobs[0]), kept.logprobs[1]) == (True, -1.0)

    def test_many_shards_of_several_batches_at_once(self, store: Store) -> None:
        batches = [submit(store, 8) for _ in range(2)]
        leases = [claim(store, batch_id, number) for batch_id in batches for number in range(2)]
        records = [
            (lease, 4 * lease.shard.shard_no + place, (progress(place + 1),)) for lease in leases for place in (0, 2)
        ]
        assert store.save_checkpoints(records[::-1], "v1") == []
        for lease in leases:
            first = 4 * lease.shard.shard_no
            assert store.checkpoints(lease, "v1") == {first: (progress(1),), first + 2: (progress(3),)}

    def test_a_request_of_another_shard_is_a_mistake(self, store: Store) -> None:
        lease = claim(store, submit(store, 8))
        with pytest.raises(ValueError, match="request 4 does not belong to shard"):
            store.save_checkpoints([(lease, 0, (progress(),)), (lease, 4, (progress(),))], "v1")
        assert rows(store) == []


class TestLeases:
    def test_a_stale_lease_writes_nothing(self, store: Store) -> None:
        batch_id = submit(store, 12)
        lost, kept, back = crash(store, batch_id, 0), claim(store, batch_id, 1), claim(store, batch_id, 2)
        held = claim(store, batch_id, 0, worker="w2")
        store.save_checkpoints([(held, 0, (progress(4),))], "v1")
        store.release([back])
        records = [
            (lost, 0, (progress(9),)),
            (lost, 1, (progress(9),)),
            (kept, 5, (progress(),)),
            (back, 8, (progress(),)),
        ]
        assert store.save_checkpoints(records, "v1") == [lost.shard, back.shard]
        assert rows(store) == [(0, 0, 2, "v1"), (5, 0, 1, "v1")]
        assert store.checkpoints(held, "v1") == {0: (progress(4),)}

    def test_old_and_new_lease_of_a_shard_in_one_call(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lost, held = crash(store, batch_id), claim(store, batch_id)
        records = [(lost, 0, (progress(9),)), (held, 1, (progress(),))]
        assert store.save_checkpoints(records, "v1") == [lost.shard]
        assert rows(store) == [(1, 0, 2, "v1")]

    def test_a_lease_that_ran_out_may_still_write_until_somebody_takes_it(self, store: Store) -> None:
        lease = crash(store, submit(store, 4))
        assert store.save_checkpoints([(lease, 0, (progress(),))], "v1") == []
        assert rows(store) == [(0, 0, 1, "v1")]

    @case("A-q-04")
    def test_the_next_worker_goes_on_from_there(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id, ttl=GONE)
        store.save_checkpoints([(lease, 0, (progress(3),)), (lease, 1, (progress(1),))], "v1")
        store.record([(lease, answer(1))])
        successor = claim(store, batch_id, worker="w2")
        assert store.checkpoints(successor, "v1") == {0: (progress(3),)}

    def test_another_model_does_not(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        store.save_checkpoints([(lease, 0, (progress(3),))], "v1")
        assert store.checkpoints(lease, "v2") == {}
        store.save_checkpoints([(lease, 0, (progress(1),))], "v2")
        assert (store.checkpoints(lease, "v1"), store.checkpoints(lease, "v2")) == ({}, {0: (progress(1),)})

    def test_a_clean_return_keeps_them(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.save_checkpoints([(lease, 2, (progress(),))], "v1")
        store.release([lease])
        assert store.checkpoints(claim(store, batch_id), "v1") == {2: (progress(),)}

    def test_a_shard_that_is_not_there_has_none(self, store: Store) -> None:
        lease = claim(store, submit(store, 4))
        unknown = Lease(replace(lease.shard, shard_no=7), 1, 1)
        assert store.checkpoints(unknown, "v1") == {}
        assert store.save_checkpoints([(unknown, 0, (progress(),))], "v1") == [unknown.shard]


class TestEnding:
    def test_an_outcome_takes_its_checkpoints_along(self, store: Store) -> None:
        batch_id = submit(store, 8)
        leases = [claim(store, batch_id, number) for number in range(2)]
        saved = [(leases[i // 4], i, (progress(), progress(choice=1))) for i in (0, 1, 2, 4, 7)]
        store.save_checkpoints(saved, "v1")
        store.record([(leases[0], answer(0)), (leases[0], failure(2)), (leases[1], answer(4))])
        assert [(index, choice) for index, choice, *_ in rows(store)] == [(1, 0), (1, 1), (7, 0), (7, 1)]
        for lease in leases:
            finish(store, lease)
        assert rows(store) == []

    def test_a_late_checkpoint_of_an_ended_request_is_passed_over(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.record([(lease, answer(1))])
        assert store.save_checkpoints([(lease, 1, (progress(),)), (lease, 2, (progress(),))], "v1") == []
        assert rows(store) == [(2, 0, 1, "v1")]
        finish(store, lease)
        assert store.save_checkpoints([(lease, 2, (progress(),))], "v1") == []  # the shard is done, and was ours
        assert rows(store) == []

    def test_savers_and_recorders_at_the_same_time(self, store: Store) -> None:
        batch_id = submit(store, 48)
        leases = [claim(store, batch_id, number) for number in range(12)]
        start = Barrier(4)
        requests = [(lease, 4 * lease.shard.shard_no + place) for lease in leases for place in range(4)]

        def save(turn: int) -> None:
            start.wait()
            for at in range(0, 48, 8):
                chosen = requests[at:] + requests[:at]
                assert store.save_checkpoints([(lease, i, (progress(turn + 1),)) for lease, i in chosen], "v1") == []

        def record(turn: int) -> None:
            start.wait()
            for at in range(turn, 48, 2):
                lease, index = requests[-at - 1]
                assert store.record([(lease, answer(index))]).stale == []

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(what, turn) for what in (save, record) for turn in range(2)]:
                done.result()
        assert rows(store) == []
        assert store.batch(batch_id).counts == Counts(total=48, completed=48)


class TestEndingWithoutAWorker:
    """What the store itself cancels keeps what there was of the answer."""

    def test_a_batch(self, store: Store) -> None:
        batch_id = submit(store, 8)
        store.register_model_version("v1", "tiny", "/models/tiny", "float32", {})
        lease = crash(store, batch_id, worker="w7")
        euro = ("1", (0xE2, 0x82), (0xAC,), (0xFF,), "!")
        begun = progress(5, tokens=euro, top_logprobs=(((1, -0.5, "x"),),) * 5)
        store.save_checkpoints([(lease, 1, (begun,)), (lease, 3, (progress(2),))], "v1")
        assert store.cancel_batch(batch_id) == Counts(total=8, cancelled=8)
        kept = store.result(batch_id, 1).completion
        assert kept is not None
        assert (kept.status, kept.finish_reason) == (RequestStatus.CANCELLED, FinishReason.CANCELLED)
        assert (kept.text, kept.tokens) == ("1€\ufffd!", euro)
        assert (kept.token_ids, kept.logprobs, kept.token_times) == (begun.token_ids, begun.logprobs, begun.token_times)
        assert (kept.top_logprobs, kept.started_at) == (begun.top_logprobs, STARTED)
        assert kept.first_token_at == STARTED + timedelta(seconds=0.25)
        assert kept.finished_at is not None
        assert (kept.model, kept.model_version, kept.worker, kept.attempt) == ("tiny", "v1", "w7", 0)
        assert store.batch(batch_id).tokens.completion == 7
        assert [len(stored.choices) for stored in store.results(batch_id)] == [1] * 8
        assert [stored.choices[0].text for stored in store.results(batch_id)][3:5] == [" t0 t1", ""]
        assert rows(store) == []

    def test_sweeping(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.save_checkpoints([(lease, 1, (progress(3),))], "v1")
        store.record([(lease, answer(0))])
        store.cancel_batch(batch_id)
        store.renew([lease], GONE)
        assert store.sweep_cancelled() == 3
        assert [stored.choices[0].completion_tokens for stored in store.results(batch_id)] == [3, 3, 0, 0]
        assert store.batch(batch_id).counts == Counts(total=4, completed=1, cancelled=3)
        assert (store.batch(batch_id).tokens.completion, rows(store)) == (6, [])

    def test_a_request(self, store: Store) -> None:
        batch_id = submit(store, 2)
        lease = claim(store, batch_id)
        store.save_checkpoints([(lease, 0, (progress(3),)), (lease, 1, (progress(2),))], "v1")
        store.release([lease])
        assert store.cancel_request(batch_id, 1) == Counts(total=2, queued=1, cancelled=1)
        assert store.cancel_request(batch_id, 1) == Counts(total=2, queued=1, cancelled=1)
        kept = store.result(batch_id, 1).completion
        assert kept is not None
        assert (kept.text, kept.completion_tokens, kept.model) == (" t0 t1", 2, None)
        assert [index for index, *_ in rows(store)] == [0]
        assert store.batch(batch_id).tokens.completion == 2
        assert store.cancel_request(batch_id, 0) == Counts(total=2, cancelled=2)
        assert store.batch(batch_id).tokens.completion == 5

    def test_all_choices_in_order(self, store: Store) -> None:
        batch_id = submit(store, 1)
        lease = crash(store, batch_id)
        store.save_checkpoints([(lease, 0, (progress(1, choice=1), progress(2, choice=3)))], "v1")
        assert store.cancel_batch(batch_id) == Counts(total=1, cancelled=1)
        choices = store.result(batch_id, 0).choices
        assert [(c.choice, c.status, c.completion_tokens) for c in choices] == [
            (number, RequestStatus.CANCELLED, tokens) for number, tokens in enumerate([0, 1, 0, 2])
        ]
        assert [choice.started_at for choice in choices] == [None, STARTED, None, STARTED]

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ({"prompt": "Say:", "echo": True}, "Say: t0 t1"),
            ({"prompt": "Say:", "echo": False}, " t0 t1"),
            ({"prompt": [1, 2], "echo": True}, " t0 t1"),
        ],
    )
    def test_behind_an_echoed_prompt(self, store: Store, body: dict[str, Any], text: str) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0, **body)])
        store.open_batch(batch_id)
        store.save_checkpoints([(crash(store, batch_id), 0, (progress(2),))], "v1")
        store.cancel_batch(batch_id)
        assert store.result(batch_id, 0).choices[0].text == text

    def test_what_a_worker_holds_is_left_to_it(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id, ttl=FOREVER)
        store.save_checkpoints([(lease, 0, (progress(),))], "v1")
        store.cancel_batch(batch_id)
        assert len(rows(store)) == 1
        assert store.checkpoints(lease, "v1") == {0: (progress(),)}


def test_recording_looks_at_the_checkpoints_of_neighbours_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(store, 20)
    leases = [claim(store, batch_id, number) for number in (0, 1, 2, 4)]
    looked_at: list[tuple[int, int]] = []
    run = partial.run_each

    def note(connection: Any, statement: Any, parameters: list[dict[str, Any]]) -> None:
        looked_at.extend((each["first"], each["last"]) for each in parameters)
        run(connection, statement, parameters)

    monkeypatch.setattr(partial, "run_each", note)
    saved = [(lease, 4 * lease.shard.shard_no + place, (progress(),)) for lease in leases for place in range(3)]
    store.save_checkpoints(saved, "v1")
    store.record([(lease, answer(4 * lease.shard.shard_no + place)) for lease in leases for place in range(2)])
    assert looked_at == [(0, 11), (16, 19)]
    assert [index for index, *_ in rows(store)] == [2, 6, 10, 18]
