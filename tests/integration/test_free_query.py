"""Queries of users, on both databases: whatever they try, nothing is changed, and every value can be shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from batchjobs.errors import UsageError, WaitTimeout
from batchjobs.results import json_line
from batchjobs.store import Store
from tests.support.batches import submit
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.sql import PostgresServer

ROOT = Path(__file__).parents[2]
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {}) SELECT x FROM n"


@pytest.fixture
def sqlite(tmp_path: Path) -> Store:
    store = Store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    store.prepare()
    return store


@pytest.fixture
def server(postgres_server: PostgresServer) -> Any:
    url = postgres_server.create_database(migrated=True)
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def postgresql(server: str) -> Any:
    store = Store(server)
    yield store
    store.close()


def test_no_time_at_all_is_a_short_time(sqlite: Store, postgresql: Store) -> None:
    for store in (sqlite, postgresql):
        with pytest.raises(WaitTimeout):
            list(store.select(NUMBERS.format(3_000_000), None, timeout_seconds=0.0001)[1])
        assert list(store.select(NUMBERS.format(2), None, timeout_seconds=float("inf"))[1]) == [(1,), (2,)]


def refused(store: Store, sql: str) -> str:
    with pytest.raises(UsageError) as raised:
        list(store.select(sql, None)[1])
    return str(raised.value)


@pytest.mark.parametrize(
    "sql",
    [
        "WITH x AS (INSERT INTO batches (id) VALUES ('x') RETURNING id) SELECT * FROM x",
        "SELECT * FROM (DELETE FROM requests RETURNING custom_id)",
        "SELECT * FROM pragma_journal_mode('delete')",
        "SELECT * FROM pragma_user_version(1)",
        "SELECT load_extension('/tmp/x.so')",
        "SELECT writefile('{file}', 'x')",
        "SELECT 1; ATTACH '{file}' AS x",
        "WITH x AS (SELECT 1) INSERT INTO batches (id) SELECT 'x'",
        "VALUES (1); VACUUM INTO '{file}'",
    ],
)
def test_nothing_writes_on_sqlite(sqlite: Store, tmp_path: Path, sql: str) -> None:
    submit(sqlite, 1)
    assert refused(sqlite, sql.format(file=tmp_path / "made")).startswith(("only reading", "the query failed: "))
    assert list(sqlite.select("SELECT count(*), (SELECT count(*) FROM batches) FROM requests")[1]) == [(1, 1)]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "WITH x AS (INSERT INTO worker_pauses VALUES ('w', now(), 'x', NULL, false) RETURNING *) SELECT * FROM x",
        "SELECT * FROM batches FOR UPDATE",
        "SELECT 1 INTO made",
        "SELECT 1) TO '/tmp/made'; COPY (SELECT 1",
        "SELECT 1; DO $$ BEGIN DELETE FROM requests; END $$",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity",
        "SELECT PG_Terminate_Backend /* a comment */ (pid) FROM pg_stat_activity",
        'SELECT "pg_cancel_backend"(pid) FROM pg_stat_activity',
        'SELECT U&"pg\\005fcancel_backend"(pid) FROM pg_stat_activity',
        "SELECT * FROM pg_read_file('/etc/hostname')",
        "SELECT * FROM pg_ls_dir('/')",
        "SELECT lo_import('/etc/hostname')",
        "SELECT lo_export(1, '/tmp/made')",
        "SELECT set_config('transaction_read_only', 'off', true)",
        "SELECT set_config('statement_timeout', '0', true)",
        "SELECT nextval('counter')",
        "SELECT setval('counter', 9)",
        "SELECT dblink_exec('dbname=postgres', 'CREATE TABLE made ()')",
        "SELECT query_to_xml('SELECT pg_reload_conf()', true, true, '')",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_notify('a', 'b')",
        "SELECT pg_sleep(3600)",
        "SELECT changes_something()",
    ],
)
def test_nothing_writes_on_postgresql(postgresql: Store, server: str, sql: str) -> None:
    submit(postgresql, 1)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE SEQUENCE counter")
        connection.execute("CREATE FUNCTION changes_something() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        assert refused(postgresql, sql).startswith(("only reading", "the query failed: "))
        counted = (
            "SELECT count(*), (SELECT count(*) FROM worker_pauses), (SELECT last_value FROM counter) FROM requests"
        )
        assert connection.execute(counted).fetchall() == [(1, 0, 1)]
        assert connection.execute("SELECT count(*) FROM pg_class WHERE relname = 'made'").fetchall() == [(0,)]


def test_words_that_only_look_like_functions_are_free(postgresql: Store) -> None:
    sql = "SELECT 'system' AS system, random() < 2, clock_timestamp() > 'epoch', pg_size_pretty(1::bigint)"
    assert list(postgresql.select(sql)[1]) == [("system", True, True, "1 bytes")]


def test_values_of_every_kind_become_json_on_postgresql(postgresql: Store) -> None:
    sql = """SELECT 9223372036854775807, 9223372036854775808::numeric, sum(5::bigint), 0.5::numeric, 'NaN'::numeric,
        interval '90 seconds', '\\x00ff'::bytea, ARRAY[1.5, 2], '{"a": [1]}'::jsonb, '{"a": 1}'::json,
        date '2026-03-01', timestamp '2026-03-01 12:00:00', timestamptz '2026-03-01 12:00:00+01',
        int4range(1, 2), inet '127.0.0.1', true,
        NULL"""
    _, [row] = postgresql.select(sql)
    assert json_line({"row": row}) == (
        b'{"row":[9223372036854775807,"9223372036854775808",5,0.5,null,90.0,"\\\\x00ff",[1.5,2],"{\\"a\\": [1]}",'
        b'"{\\"a\\": 1}","2026-03-01","2026-03-01T12:00:00","2026-03-01T11:00:00.000000Z","[1, 2)","127.0.0.1",true,'
        b"null]}"
    )


def test_values_of_every_kind_become_json_on_sqlite(sqlite: Store) -> None:
    _, [row] = sqlite.select("SELECT 9223372036854775807, 9e999, -0.5, x'00ff', 'a', NULL")
    assert json_line({"row": row}) == b'{"row":[9223372036854775807,null,-0.5,"\\\\x00ff","a",null]}'
    assert "UTF-8" in refused(sqlite, "SELECT CAST(x'ff' AS TEXT)")


def test_errors_show_the_query_and_nothing_around_it(store: Store) -> None:
    for sql in ("SELECT nope FROM requests", "SELECT * FROM nope"):
        said = refused(store, sql)
        assert "nope" in said
        assert "DECLARE" not in said


def test_the_time_of_the_reader_does_not_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day passes between any two rows; each page of rows has its own time."""
    clock = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr("batchjobs.store.free_query.time.monotonic", lambda: 0.0)
    _, rows = store.select(NUMBERS.format(1200), None, timeout_seconds=30)
    seen = 0
    for _ in rows:
        seen += 1
        now = next(clock)
        monkeypatch.setattr("batchjobs.store.free_query.time.monotonic", lambda now=now: float(now))
    assert seen == 1200


def test_ctrl_c_ends_the_query(store: Store, database_url: str, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "batchjobs", "sql", ENDLESS],
        cwd=ROOT,
        env={**os.environ, "BATCHJOBS_HOME": str(tmp_path / "home"), "BATCHJOBS_DATABASE_URL": database_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: _runs(child, database_url), 30)
        child.send_signal(signal.SIGINT)
        out, said = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130, said
    assert (out, said) == (b"", b"")
    if database_url.startswith("postgresql"):
        eventually(lambda: not _active(database_url), 30)


def _runs(child: subprocess.Popen[bytes], url: str) -> bool:
    assert child.poll() is None, child.communicate()
    if url.startswith("postgresql"):
        return _active(url)
    ticks = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[11]
    return int(ticks) > 2 * os.sysconf("SC_CLK_TCK")  # more work than a start takes


def _active(url: str) -> bool:
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%FROM free_query%' AND state"
            " = 'active' AND pid <> pg_backend_pid()"
        ).fetchone()
    return bool(found and found[0])
