"""How batches come in, and how far they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from batchjobs.clock import database_instant
from batchjobs.errors import KeyConflict, LineError, NotFound, UsageError
from batchjobs.store import DuplicateCustomId, Store
from batchjobs.store import batches as store_batches
from batchjobs.tables import batches
from batchjobs.types import BatchStatus, Counts, Endpoint, Priority, Request, RequestStatus, ShardId, TokenCounts
from tests.support.batches import GONE, answer, claim, create, failure, finish, request, submit
from tests.support.cases import case

if TYPE_CHECKING:
    from collections.abc import Sequence


def count_rows(store: Store, table: str) -> int:
    _, rows = store.select(f"SELECT count(*) FROM {table}")
    [(count,)] = rows
    return count


class TestCreating:
    def test_what_was_given_comes_back(self, store: Store) -> None:
        batch_id, created = store.create_batch(
            name="eval",
            key="k1",
            fingerprint="f1",
            model="tiny",
            queue=Priority.HIGH,
            shard_size=16,
            source="prompts.jsonl",
            defaults={"max_tokens": 5, "stop": ["\n"]},
        )
        info = store.batch(batch_id)
        assert created
        assert len(batch_id) == 26
        assert (info.id, info.name, info.key, info.model) == (batch_id, "eval", "k1", "tiny")
        assert (info.queue, info.shard_size, info.paused) == (Priority.HIGH, 16, False)
        assert (info.submitted_at, info.started_at, info.finished_at) == (None, None, None)
        assert info.created_at.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - info.created_at) < timedelta(seconds=60)

    def test_the_same_key_and_content_is_the_same_batch(self, store: Store) -> None:
        first = store.create_batch(
            name=None, key="k", fingerprint="f", model=None, queue=Priority.LOW, shard_size=64, source=None, defaults={}
        )
        again = store.create_batch(
            name="x", key="k", fingerprint="f", model=None, queue=Priority.LOW, shard_size=64, source=None, defaults={}
        )
        assert first[1] is True
        assert again == (first[0], False)
        found = store.batch_by_key("k")
        assert found is not None
        assert found.id == first[0]
        assert store.batch_by_key("other") is None

    def test_the_same_key_with_other_content_is_refused(self, store: Store) -> None:
        batch_id = create(store, key="k", fingerprint="f")
        with pytest.raises(KeyConflict, match=f"the key 'k' was used for batch {batch_id}"):
            create(store, key="k", fingerprint="g")

    def test_without_a_key_each_call_makes_a_batch(self, store: Store) -> None:
        assert create(store) != create(store)

    def test_the_same_key_from_many_threads_makes_one_batch(self, store: Store) -> None:
        start = Barrier(6)

        def submit_once() -> tuple[str, int]:
            start.wait()
            batch_id = create(store, key="k")
            store.add_requests(batch_id, [request(index) for index in range(50)])
            return batch_id, store.open_batch(batch_id)

        with ThreadPoolExecutor(6) as pool:
            found = {each.result() for each in [pool.submit(submit_once) for _ in range(6)]}
        [(batch_id, shards)] = found
        assert shards == 13
        assert store.batch(batch_id).counts == Counts(total=50, queued=50)
        assert count_rows(store, "requests") == 50

    @pytest.mark.parametrize("field", ["name", "key", "model", "source"])
    def test_text_that_postgresql_cannot_hold_is_refused_on_both(self, store: Store, field: str) -> None:
        with pytest.raises(UsageError, match="NUL"):
            create(store, **{field: "a\0b"})

    def test_defaults_that_are_no_json_are_refused(self, store: Store) -> None:
        with pytest.raises(UsageError, match="the defaults of the batch cannot be stored"):
            create(store, defaults={"system": "\udcff"})


class TestAddingRequests:
    def test_adding_again_changes_nothing(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0), request(1)])
        store.add_requests(batch_id, [request(1), request(2)])
        store.open_batch(batch_id)
        store.add_requests(batch_id, [request(2)])
        assert [stored.request for stored in store.results(batch_id)] == [request(0), request(1), request(2)]

    def test_bodies_come_back_as_they_were(self, store: Store) -> None:
        chat = Request(
            index=0,
            custom_id="müßig/🦊",
            endpoint=Endpoint.CHAT,
            body={"messages": [{"role": "user", "content": "a\0b\n🦊 \\u0000"}], "max_tokens": 1, "temperature": 0.7},
        )
        ids = Request(
            index=1, custom_id="ids", endpoint=Endpoint.COMPLETIONS, body={"prompt": [1, 2, 3], "seed": -(2**63)}
        )
        batch_id = create(store)
        store.add_requests(batch_id, [chat, ids])
        store.open_batch(batch_id)
        assert store.pending_requests(claim(store, batch_id)) == [chat, ids]

    @pytest.mark.parametrize(
        ("custom_id", "body"), [("a\0b", {}), ("a\ud800", {}), ("a", {"prompt": "\ud800"}), ("a", {"seed": 2**64})]
    )
    def test_what_cannot_be_stored_is_refused_by_its_index(self, store: Store, custom_id: str, body: dict) -> None:
        batch_id = create(store)
        bad = Request(index=1, custom_id=custom_id, endpoint=Endpoint.COMPLETIONS, body=body)
        with pytest.raises(UsageError, match="request 1"):
            store.add_requests(batch_id, [request(0), bad])
        assert count_rows(store, "requests") == 0

    def test_unknown_batch(self, store: Store) -> None:
        with pytest.raises(NotFound, match="'nope'"):
            store.add_requests("nope", [request(0)])


def same_id(index: int, custom_id: str) -> Request:
    return Request(index=index, custom_id=custom_id, endpoint=Endpoint.COMPLETIONS, body={"prompt": "x"})


class TestDuplicateCustomIds:
    def test_all_of_a_call_are_named_and_the_others_stored(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [same_id(0, "a"), same_id(1, "b")])
        with pytest.raises(DuplicateCustomId) as caught:
            store.add_requests(batch_id, [same_id(i, c) for i, c in enumerate("acdcc", start=2)])
        assert caught.value.pairs == [("a", 2, 0), ("c", 5, 3), ("c", 6, 3)]
        assert str(caught.value) == (
            "custom_id used twice: 'a' (request 2, first used by request 0), 'c' (request 5, first used by request 3),"
            " 'c' (request 6, first used by request 3); give each request its own"
        )
        assert [stored.request.index for stored in store.results(batch_id)] == [0, 1, 3, 4]

    def test_other_batches_may_use_the_same(self, store: Store) -> None:
        first, second = submit(store, 3), submit(store, 3)
        assert store.result_by_custom_id(first, "request-2").batch_id == first
        assert store.result_by_custom_id(second, "request-2").batch_id == second

    @case("A-in-09")
    def test_a_refused_duplicate_is_kept_beside_the_first(self, store: Store) -> None:
        batch_id = create(store)
        error = LineError(line=2, message="custom_id used before", custom_id="a", code="duplicate_custom_id")
        store.add_requests(batch_id, [same_id(0, "a"), same_id(1, "a")], {1: error})
        store.open_batch(batch_id)
        first, second = store.results(batch_id)
        assert (first.request.custom_id, first.state) == ("a", "queued")
        assert (second.request.custom_id, second.state) == ("a", "failed")
        assert store.result_by_custom_id(batch_id, "a").request.index == 0


class TestRefusedLines:
    def test_they_are_failed_requests_from_the_start(self, store: Store) -> None:
        batch_id = create(store, shard_size=2)
        errors = {
            1: LineError(line=2, message="temperature must be from 0 to 2", field="temperature", custom_id="bad"),
            3: LineError(line=5, message="not JSON", code="invalid_json"),
        }
        for _ in range(2):
            store.add_requests(batch_id, [request(0), request(2)], errors)
        assert store.batch(batch_id).counts == Counts(total=4, queued=2, failed=2)
        store.open_batch(batch_id)
        assert store.batch(batch_id).counts == Counts(total=4, queued=2, failed=2)
        assert store.failures(batch_id) == {"invalid_json": 1, "invalid_request": 1}
        refused = [stored for stored in store.results(batch_id) if stored.completion]
        assert [stored.request.custom_id for stored in refused] == ["bad", "line-5"]
        completion = refused[0].completion
        assert completion is not None
        assert completion.status is RequestStatus.FAILED
        assert completion.error is not None
        assert completion.error.message == "line 2: temperature must be from 0 to 2"

    def test_only_the_others_are_run(self, store: Store) -> None:
        batch_id = create(store, shard_size=2)
        error = LineError(line=9, message="bad")
        store.add_requests(batch_id, [request(0)], {1: error, 2: error, 3: error})
        assert store.open_batch(batch_id) == 2
        assert [shard for shard, _ in store.claimable(10)] == [ShardId(batch_id, 0)]
        lease = claim(store, batch_id)
        assert [pending.index for pending in store.pending_requests(lease)] == [0]
        assert store.record([(lease, answer(0))]).done == [ShardId(batch_id, 0)]
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.COMPLETED, Counts(total=4, completed=1, failed=3))

    def test_a_batch_of_nothing_else_is_completed_at_once(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [], {0: LineError(line=1, message="bad", custom_id="a\0b")})
        store.open_batch(batch_id)
        info = store.batch(batch_id)
        assert info.status is BatchStatus.COMPLETED
        assert info.finished_at is not None
        assert store.result(batch_id, 0).request.custom_id == "a\ufffdb"


class TestOpening:
    @pytest.mark.parametrize(("count", "shards"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3)])
    def test_requests_are_cut_into_shards(self, store: Store, count: int, shards: int) -> None:
        batch_id = create(store, shard_size=4)
        store.add_requests(batch_id, [request(index) for index in range(count)])
        assert store.open_batch(batch_id) == shards
        assert store.open_batch(batch_id) == shards
        _, rows = store.select(
            "SELECT shard_no, first_index, last_index, requests, state FROM shards ORDER BY shard_no"
        )
        sizes = [min(4, count - 4 * number) for number in range(shards)]
        assert list(rows) == [(n, 4 * n, 4 * n + size - 1, size, "ready") for n, size in enumerate(sizes)]

    def test_nothing_can_be_claimed_before(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0)])
        assert store.claimable(10) == []
        assert store.claim([ShardId(batch_id, 0)], "w", 60) == []
        assert store.batch(batch_id).counts == Counts(total=1, queued=1)


class TestDiscarding:
    def test_nothing_stays(self, store: Store) -> None:
        batch_id = create(store, key="k")
        kept = submit(store, 3)
        store.add_requests(batch_id, [request(0)], {1: LineError(line=2, message="bad")})
        store.discard_batch(batch_id)
        with pytest.raises(NotFound, match=batch_id):
            store.batch(batch_id)
        assert count_rows(store, "requests") == 3
        assert count_rows(store, "completions") == 0
        assert store.batch(kept).counts.total == 3
        assert create(store, key="k", fingerprint="other") != batch_id

    def test_more_requests_than_fit_into_one_chunk(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.batches._DISCARD_CHUNK", 3)
        batch_id = create(store)
        store.add_requests(batch_id, [request(index) for index in range(10)])
        store.discard_batch(batch_id)
        assert count_rows(store, "requests") == 0
        assert count_rows(store, "batches") == 0

    def test_an_open_batch_is_kept(self, store: Store) -> None:
        batch_id = submit(store, 1)
        with pytest.raises(UsageError, match="was submitted; cancel it instead"):
            store.discard_batch(batch_id)
        assert store.batch(batch_id).counts.total == 1


@case("A-q-02")
class TestAbandoned:
    """A submission that was cut and that nobody ran again."""

    def age(self, store: Store, batch_id: str, *, created: float = 0.0, loaded: float = 0.0) -> None:
        """Moves the batch back in time by so many hours."""
        row = sa.update(batches).where(batches.c.id == batch_id)
        with store._database.writing() as connection:
            found = connection.execute(sa.select(batches).where(batches.c.id == batch_id)).one()
            moved = {
                "created_at": found.created_at - timedelta(hours=created),
                "loaded_at": found.loaded_at - timedelta(hours=loaded),
            }
            connection.execute(row.values(**moved))

    def test_only_what_is_loading_and_idle_for_so_long(self, store: Store) -> None:
        idle, busy, fresh = (create(store, key=key) for key in ("idle", "busy", None))
        opened = submit(store, 4)
        for batch_id in (idle, busy):
            store.add_requests(batch_id, [request(n) for n in range(3)], {3: LineError(4, "bad")})
        for batch_id in (idle, busy, opened):
            self.age(store, batch_id, created=30, loaded=25)
        store.add_requests(busy, [request(0)])  # nothing new, but somebody is at it
        assert store.discard_abandoned(24 * 3600) == 1
        assert {info.id for info in store.batches()} == {busy, fresh, opened}
        assert (count_rows(store, "requests"), count_rows(store, "completions")) == (8, 1)
        assert store.discard_abandoned(24 * 3600) == 0

    def test_whoever_begins_the_same_submission_again_keeps_it(self, store: Store) -> None:
        batch_id = create(store, key="k")
        self.age(store, batch_id, created=30, loaded=30)
        assert create(store, key="k") == batch_id
        assert store.discard_abandoned(24 * 3600) == 0

    def test_a_young_batch_of_an_older_version_is_kept(self, store: Store) -> None:
        """That one knows nothing of the column, which is then long ago."""
        batch_id = create(store)
        self.age(store, batch_id, loaded=24 * 365 * 50)
        assert store.discard_abandoned(24 * 3600) == 0
        self.age(store, batch_id, created=25)
        assert store.discard_abandoned(24 * 3600) == 1

    def test_requests_that_come_in_the_middle_stop_it(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.batches._DISCARD_CHUNK", 2)
        batch_id = create(store, key="k")
        store.add_requests(batch_id, [request(n) for n in range(6)])
        self.age(store, batch_id, created=30, loaded=30)
        delete = store_batches._delete_some
        calls = []

        def delete_and_be_overtaken(connection: sa.Connection, batch_id: str) -> bool:
            calls.append(batch_id)
            if len(calls) == 2:  # as if it had come between two transactions
                connection.execute(sa.update(batches).values(loaded_at=database_instant()))
            return delete(connection, batch_id)

        monkeypatch.setattr(store_batches, "_delete_some", delete_and_be_overtaken)
        assert store.discard_abandoned(24 * 3600) == 0
        assert (len(calls), count_rows(store, "requests")) == (2, 2)
        store.add_requests(batch_id, [request(n) for n in range(6)])
        store.open_batch(batch_id)
        assert store.batch(batch_id).counts == Counts(total=6, queued=6)

    def test_several_at_once(self, store: Store) -> None:
        for _ in range(6):
            batch_id = create(store)
            store.add_requests(batch_id, [request(n) for n in range(3)])
            self.age(store, batch_id, created=30, loaded=30)
        start = Barrier(3)

        def discard(_: int) -> int:
            start.wait()
            return store.discard_abandoned(24 * 3600)

        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(discard, range(3))) == 6
        assert (store.batches(), count_rows(store, "requests")) == ([], 0)


class TestProgress:
    def test_status_follows_the_work(self, store: Store) -> None:
        batch_id = create(store, shard_size=2)
        store.add_requests(batch_id, [request(0), request(1), request(2)])
        assert store.batch(batch_id).status is BatchStatus.LOADING
        store.open_batch(batch_id)
        assert store.batch(batch_id).status is BatchStatus.QUEUED
        first = claim(store, batch_id, 0)
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.RUNNING, Counts(total=3, queued=1, running=2))
        assert info.started_at is not None
        finish(store, first)
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.RUNNING, Counts(total=3, queued=1, completed=2))
        assert info.finished_at is None
        second = claim(store, batch_id, 1)
        store.record([(second, failure(2))])
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.COMPLETED, Counts(total=3, completed=2, failed=1))
        assert info.finished_at is not None
        assert info.started_at is not None
        assert info.started_at <= info.finished_at
        assert info.tokens == TokenCounts(prompt=20, completion=6)

    def test_requests_under_a_lease_that_ran_out_are_queued_again(self, store: Store) -> None:
        batch_id = submit(store, 3)
        claim(store, batch_id, ttl=GONE)
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.RUNNING, Counts(total=3, queued=3))

    def test_an_empty_batch_is_completed(self, store: Store) -> None:
        batch_id = submit(store, 0)
        info = store.batch(batch_id)
        assert (info.status, info.counts) == (BatchStatus.COMPLETED, Counts())
        assert info.finished_at == info.submitted_at

    def test_newest_first(self, store: Store) -> None:
        made: Sequence[str] = [submit(store, 1) for _ in range(4)]
        assert [info.id for info in store.batches()] == made[::-1]
        assert [info.id for info in store.batches(limit=2)] == [made[3], made[2]]

    def test_failures_by_reason(self, store: Store) -> None:
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        store.record([(lease, failure(i, code)) for i, code in enumerate(["b", "a", "b"])] + [(lease, answer(3))])
        assert list(store.failures(batch_id).items()) == [("b", 2), ("a", 1)]

    @pytest.mark.parametrize("batch_id", ["", "01", "\0", "\ud800", "%"])
    def test_only_the_exact_id_is_found(self, store: Store, batch_id: str) -> None:
        submit(store, 1)
        with pytest.raises(NotFound, match="no batch"):
            store.batch(batch_id)
