"""One batch in a SQLite file of its own: everything of it, nothing of others, from both databases."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import schema
from batchjobs.errors import NotFound
from batchjobs.store import Store, WorkerInfo, extract
from tests.integration.test_sql_docs import queries
from tests.support.batches import answer, claim, failure, progress, submit
from tests.support.cases import case
from tests.support.odd_answers import ENDED, SPANS, odd_batch

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("batches", "requests", "shards", "completions", "past_completions", "checkpoints")
INFO = WorkerInfo(
    name="w1", host="n", pid=1, device="cpu", dtype="float32", model="tiny", model_version="v1", serves=("tiny",)
)


@pytest.fixture
def batch_id(store: Store) -> str:
    """A batch of odd answers, one of which was made at the second try, and an unfinished one; and another batch, with a
    worker and a version of the model that had no part in the first one."""
    batch_id = odd_batch(store, source="/data/in.jsonl")
    for name, version in (("w1", "v1"), ("w2", SPANS[1].version), ("stranger", "v9")):
        store.register_worker(replace(INFO, name=name, model_version=version))
        store.register_model_version(version, "tiny", "/models/tiny", "float32", {"parameters": 1})
    store.retry_failed(batch_id)
    again = claim(store, batch_id, 0)
    store.record([(again, answer(pending.index)) for pending in store.pending_requests(again)])
    late = claim(store, batch_id, 1)
    store.save_checkpoints([(late, ENDED, (progress(2),))], "v1")
    other = submit(store, 4)
    lease = claim(store, other, worker="stranger")
    store.record([(lease, answer(0, worker="stranger", model_version="v9")), (lease, failure(1))])
    store.pause_worker(None, by="ann@desk")
    return batch_id


@pytest.fixture
def copy(store: Store, batch_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The batch in a file, copied in several pages."""
    monkeypatch.setattr(extract, "_PAGE_INDEXES", 3)
    monkeypatch.setattr(extract, "_PAGE_SHARDS", 1)
    file = tmp_path / "copy.db"
    file.touch()
    assert store.extract_batch(batch_id, file) == ENDED + 1
    return file


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as connection:
        return connection.execute(query).fetchall()


def test_everything_of_the_batch_is_there_as_it_was(store: Store, batch_id: str, copy: Path) -> None:
    copied = Store(f"sqlite:///{copy}")
    assert [repr(found) for found in copied.results(batch_id)] == [repr(found) for found in store.results(batch_id)]
    assert copied.batches() == [store.batch(batch_id)]
    assert copied.past_completions(batch_id, 3) == store.past_completions(batch_id, 3) != []
    assert copied.progress(batch_id, ENDED) == store.progress(batch_id, ENDED)
    for table in TABLES:
        key = "id" if table == "batches" else "batch_id"
        [[count]] = store.select(f"SELECT count(*) FROM {table} WHERE {key} = '{batch_id}'")[1]
        assert rows(copy, f"SELECT count(*) FROM {table}") == [(count,)]
        assert count > 0
    copied.close()


def test_nothing_of_others_is_there(copy: Path, batch_id: str) -> None:
    assert rows(copy, "SELECT name FROM workers ORDER BY name") == [("w1",), ("w2",)]
    assert rows(copy, "SELECT version FROM model_versions ORDER BY version") == [(SPANS[1].version,), ("v1",)]
    assert rows(copy, "SELECT (SELECT count(*) FROM commands) + (SELECT count(*) FROM worker_pauses)") == [(0,)]
    assert b"stranger" not in copy.read_bytes()


@case("A-sql-08")
def test_few_rows_are_in_memory_at_a_time(
    store: Store, batch_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many choices a page of requests has."""
    monkeypatch.setattr(extract, "_ROWS_AT_ONCE", 2)
    inserted: list[int] = []
    insert = extract._Copy._insert

    def counting(copy: extract._Copy, table: Any, rows: Any) -> None:
        inserted.append(len(given := list(rows)))
        insert(copy, table, given)

    monkeypatch.setattr(extract._Copy, "_insert", counting)
    assert store.extract_batch(batch_id, tmp_path / "copy.db") == ENDED + 1
    assert max(inserted) == 2
    assert sum(inserted) > 30


def test_a_plain_reader_finds_tables_views_comments_and_tokens(store: Store, batch_id: str, copy: Path) -> None:
    """As Datasette would open it: read-only, one file, nothing beside it."""
    assert [file.name for file in copy.parent.glob("copy.db*")] == ["copy.db"]
    assert rows(copy, "PRAGMA journal_mode") == [("delete",)]
    assert rows(copy, "PRAGMA integrity_check") == [("ok",)]
    assert rows(copy, "PRAGMA foreign_key_check") == []
    [[tokens]] = store.select(f"SELECT sum(completion_tokens) FROM completions WHERE batch_id = '{batch_id}'")[1]
    assert rows(copy, 'SELECT count(*), count(DISTINCT "index") FROM completion_tokens') == [(tokens, ENDED - 1)]
    assert rows(copy, "SELECT text, state FROM results WHERE custom_id = 'three'") == [("red", "completed")]
    [[made]] = rows(copy, "SELECT sql FROM sqlite_master WHERE name = 'completions'")
    assert re.search(r'"?text"? TEXT NOT NULL,? /\* The answer', made)
    for number, query in queries("sqlite").items():
        assert isinstance(rows(copy, query), list), number
    times = rows(copy, 'SELECT created_at, finished_at FROM completions WHERE "index" = 0')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", times[0][0])
    assert times[0][1] == "2026-03-01T12:00:01.000000Z"


def test_it_is_a_database_of_this_version(copy: Path) -> None:
    assert schema.check(f"sqlite:///{copy}") == []


def test_an_unknown_batch_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no batch 'B'"):
        store.extract_batch("B", tmp_path / "x.db")
