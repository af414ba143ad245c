"""Results as a stream, single requests, and queries that users write."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchjobs.errors import LineError, NotFound, UsageError, WaitTimeout
from batchjobs.types import RequestStatus
from tests.support.batches import GONE, answer, claim, create, failure, finish, request, submit
from tests.support.cases import case

if TYPE_CHECKING:
    from batchjobs.store import Store


class TestResults:
    def test_input_order_whatever_the_order_of_the_answers(self, store: Store) -> None:
        batch_id = submit(store, 12)
        second, first = claim(store, batch_id, 1), claim(store, batch_id, 0)
        finish(store, second)
        store.record([(first, answer(3)), (first, failure(0))])
        claim(store, batch_id, 2, ttl=GONE)
        found = list(store.results(batch_id))
        assert [stored.request for stored in found] == [request(index) for index in range(12)]
        states = ["failed", "running", "running", "completed", *["completed"] * 4, *["queued"] * 4]
        assert [stored.state for stored in found] == states
        assert [stored.completion is None for stored in found] == [state in ("running", "queued") for state in states]
        assert {stored.created_at for stored in found} == {store.batch(batch_id).created_at}
        assert {stored.batch_id for stored in found} == {batch_id}

    def test_pages_join_without_a_seam(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.reading.PAGE_ROWS", 3)
        batch_id = submit(store, 10, shard_size=2)
        assert [stored.request.index for stored in store.results(batch_id)] == list(range(10))
        assert [stored.request.index for stored in store.results(batch_id, after_index=6)] == [7, 8, 9]
        assert list(store.results(batch_id, after_index=9)) == []

    def test_only_some_states(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.reading.PAGE_ROWS", 2)
        batch_id = submit(store, 12)
        first, _ = claim(store, batch_id, 0), claim(store, batch_id, 1)
        store.record([(first, failure(0)), (first, answer(1)), (first, failure(2)), (first, failure(3))])

        def indexes(only: str | list[str]) -> list[int]:
            return [stored.request.index for stored in store.results(batch_id, only=only)]

        assert indexes("failed") == [0, 2, 3]
        assert indexes(RequestStatus.COMPLETED) == [1]
        assert indexes(["completed", "failed"]) == [0, 1, 2, 3]
        assert indexes("running") == [4, 5, 6, 7]
        assert indexes(["queued", "completed"]) == [1, 8, 9, 10, 11]
        assert indexes([]) == []

    def test_rows_that_arrive_meanwhile_are_seen(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.reading.PAGE_ROWS", 2)
        batch_id = submit(store, 4)
        stream = store.results(batch_id)
        assert next(stream).state == "queued"
        finish(store, claim(store, batch_id))
        assert [stored.state for stored in stream] == ["queued", "completed", "completed"]

    def test_memory_stays_flat(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("batchjobs.store.reading.PAGE_BYTES", 500_000)
        batch_id = submit(store, 2000, shard_size=2000)
        lease = claim(store, batch_id)
        store.record([(lease, replace(answer(index), text="x" * 8000)) for index in range(2000)])
        tracemalloc.start()
        try:
            assert sum(len(stored.completion.text) for stored in store.results(batch_id) if stored.completion) == 16e6
            assert tracemalloc.get_traced_memory()[1] < 3e6
        finally:
            tracemalloc.stop()

    def test_unknown_batch(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.results("nope")


class TestSingleRequests:
    def test_by_index_and_by_custom_id(self, store: Store) -> None:
        batch_id = submit(store, 3)
        finish(store, claim(store, batch_id))
        found = store.result(batch_id, 1)
        assert (found.request, found.state, found.completion) == (request(1), "completed", answer(1))
        assert store.result_by_custom_id(batch_id, "request-1") == found

    def test_a_refused_line_is_found_by_its_custom_id(self, store: Store) -> None:
        batch_id = create(store)
        store.add_requests(batch_id, [request(0)], {1: LineError(line=2, message="bad", custom_id="other")})
        assert store.result_by_custom_id(batch_id, "other").request.index == 1

    @pytest.mark.parametrize("index", [-1, 3, 2**63])
    def test_unknown_index(self, store: Store, index: int) -> None:
        batch_id = submit(store, 3)
        with pytest.raises(NotFound, match=f"has no request {index}"):
            store.result(batch_id, index)

    @pytest.mark.parametrize("custom_id", ["", "request", "request-%", "REQUEST-1", "request-1\0"])
    @case("A-cli-04")
    def test_unknown_custom_id(self, store: Store, custom_id: str) -> None:
        batch_id = submit(store, 3)
        with pytest.raises(NotFound):
            store.result_by_custom_id(batch_id, custom_id)


class TestViews:
    def test_results(self, store: Store) -> None:
        batch_id = create(store, shard_size=2)
        bodies = [
            {"prompt": "a\0b \\u0000 \\"},
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
            {"prompt": [1, 2, 3]},
        ]
        store.add_requests(batch_id, [request(index, **body) for index, body in enumerate(bodies)])
        store.open_batch(batch_id)
        lease = claim(store, batch_id)
        store.record([(lease, answer(0)), (lease, failure(1))])
        columns = (
            'batch_id, "index", custom_id, state, prompt, text, finish_reason, error_code, error_message, model,'
            " prompt_tokens, completion_tokens, cached_tokens, worker, attempt, started_at"
        )
        _, rows = store.select(f'SELECT {columns} FROM results ORDER BY "index"')
        chat = '[{"role":"user","content":"hi"}]'
        made = ("tiny", 10, 3, 4, "w1", 1, "2026-03-01T12:00:00.250000Z")
        code = "context_length_exceeded"
        assert list(rows) == [
            (batch_id, 0, "request-0", "completed", "a\ufffdb \\u0000 \\", "answer 0", "stop", None, None, *made),
            (batch_id, 1, "request-1", "failed", chat, "", "error", code, "too long", None, 0, 0, 0, None, 1, None),
            (batch_id, 2, "request-2", "queued", "[1,2,3]", *[None] * 11),
        ]
        _, rows = store.select('SELECT first_token_seconds, duration_seconds FROM results WHERE "index" = 0')
        assert list(rows) == [(pytest.approx(0.25, abs=1e-3), pytest.approx(0.75, abs=1e-3))]

    def test_a_running_request(self, store: Store) -> None:
        batch_id = submit(store, 8)
        claim(store, batch_id, 0)
        claim(store, batch_id, 1, ttl=GONE)
        _, rows = store.select('SELECT state FROM results ORDER BY "index"')
        assert [state for (state,) in rows] == ["running"] * 4 + ["queued"] * 4

    def test_completion_tokens(self, store: Store) -> None:
        batch_id = submit(store, 2)
        lease = claim(store, batch_id)
        given = replace(answer(0), tokens=(" a", (240, 159), '"'), logprobs=(-0.5, float("nan"), -1.0))
        store.record([(lease, given), (lease, failure(1)), (lease, replace(answer(0, tokens=1), choice=1))])
        columns = 'batch_id, "index", choice, position, token_id, token, logprob, at_seconds'
        _, rows = store.select(f"SELECT {columns} FROM completion_tokens ORDER BY choice, position")
        assert list(rows) == [
            (batch_id, 0, 0, 0, 100, " a", -0.5, 0.25),
            (batch_id, 0, 0, 1, 101, "[240,159]", None, 0.5),
            (batch_id, 0, 0, 2, 102, '"', -1.0, 0.75),
            (batch_id, 0, 1, 0, 100, " t0", 0.0, 0.25),
        ]

    def test_batch_progress(self, store: Store) -> None:
        batch_id = submit(store, 12, name="eval", key="k", model="tiny")
        finish(store, claim(store, batch_id, 0))
        claim(store, batch_id, 1)
        columns = (
            "batch_id, name, key, model, queue, status, total, queued, running, completed, failed, cancelled, expired,"
            " prompt_tokens, completion_tokens, shard_size, shards, shards_ready, shards_leased, shards_done"
        )
        _, rows = store.select(f"SELECT {columns} FROM batch_progress")
        assert list(rows) == [
            (batch_id, "eval", "k", "tiny", "default", "running", 12, 4, 4, 4, 0, 0, 0, 40, 12, 4, 3, 1, 1, 1)
        ]


class TestSelect:
    def test_columns_and_rows(self, store: Store) -> None:
        submit(store, 5)
        columns, rows = store.select('SELECT "index" AS i, custom_id FROM requests ORDER BY i', limit=2)
        assert columns == ["i", "custom_id"]
        assert list(rows) == [(0, "request-0"), (1, "request-1")]
        assert len(list(store.select("SELECT 1 FROM requests", limit=None)[1])) == 5
        assert store.select("SELECT custom_id FROM requests WHERE 1 = 0")[0] == ["custom_id"]

    def test_more_rows_than_one_fetch(self, store: Store) -> None:
        numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 1203) SELECT x FROM n"
        _, rows = store.select(numbers, limit=None)
        assert [x for (x,) in rows] == list(range(1, 1204))

    def test_json_arrays_can_be_unrolled(self, store: Store) -> None:
        batch_id = submit(store, 1, shard_size=1)
        store.record([(claim(store, batch_id), answer(0))])
        is_sqlite = store.url_without_password.startswith("sqlite")
        function = "json_each" if is_sqlite else "json_array_elements_text"
        _, rows = store.select(f"SELECT t.value FROM completions c, {function}(c.token_times) t")
        assert [float(value) for (value,) in rows] == [0.25, 0.5, 0.75]

    def test_values_are_plain(self, store: Store) -> None:
        submit(store, 1)
        [row] = store.select("SELECT created_at, defaults, NULL, 'a', 1, 1.5 FROM batches -- a % sign")[1]
        assert isinstance(row[0], str)
        assert (len(row[0]), row[0][-1]) == (27, "Z")
        assert row[1:] == ("{}", None, "a", 1, 1.5)

    @pytest.mark.parametrize(
        "sql",
        [
            "DELETE FROM requests",
            "  update batches SET name = 'x'",
            "/* SELECT */ DROP TABLE requests",
            "SELECT 1; DELETE FROM completions",
            "COMMIT; DELETE FROM completions",
            "SELECT 1; COMMIT; DELETE FROM completions",
            "WITH x AS (SELECT 1) DELETE FROM completions",
            "PRAGMA query_only = OFF",
            "SET TRANSACTION READ WRITE",
            "ATTACH DATABASE '/tmp/x' AS x",
            "",
            "SELECT 1\0",
        ],
    )
    def test_writing_is_refused(self, store: Store, sql: str) -> None:
        batch_id = submit(store, 4)
        finish(store, claim(store, batch_id))
        with pytest.raises(UsageError, match=r"only reading is possible|the query failed"):
            list(store.select(sql)[1])
        assert len(list(store.results(batch_id, only="completed"))) == 4

    @pytest.mark.parametrize("sql", ["SELECT nope FROM requests", "SELECT FROM WHERE", "SELECT * FROM nope"])
    def test_a_wrong_statement_is_an_error_for_people(self, store: Store, sql: str) -> None:
        with pytest.raises(UsageError, match=r"the query failed: .+"):
            store.select(sql)

    def test_an_endless_query_is_ended(self, store: Store) -> None:
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
        with pytest.raises(WaitTimeout, match=r"the query took longer than its timeout of 0\.05 s"):
            store.select(endless, timeout_seconds=0.05)

    def test_the_store_works_as_before_after_it(self, store: Store) -> None:
        _, rows = store.select("SELECT 1")
        del rows
        with pytest.raises(UsageError):
            store.select("SELECT nope")
        assert store.batch(submit(store, 1)).counts.total == 1
