"""The migrations make what the store expects, on both databases."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from batchjobs import schema
from batchjobs.database import Database
from batchjobs.errors import BatchjobsError
from batchjobs.store import Store
from batchjobs.tables import VIEWS, metadata
from batchjobs.types import CommandKind, Lease, PromptScores, ShardId, VersionSpan
from tests.support.batches import answer, claim, crash, failure, select, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def execute(url: str, *statements: str) -> None:
    database = Database(url)
    with database.writing() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    database.close()


def migrate(url: str, step: Callable[..., None], revision: str) -> None:
    database = Database(url)
    with database.writing() as connection:
        config = schema._alembic_config()
        config.attributes["connection"] = connection
        step(config, revision)
    database.close()


def rows_of_the_first_revision() -> list[str]:
    """A batch B of three requests: one answered, one failed, one that waits."""
    made = "'2026-03-01T12:00:00.250000Z'"
    completion = (
        'INSERT INTO completions (batch_id, "index", choice, status, text, finish_reason, prompt_tokens,'
        " completion_tokens, cached_tokens, token_ids, tokens, logprobs, token_times, created_at, attempt, error)"
        " VALUES ('B', {}, 0, {}, 'old', {}, 1, 0, 0, '[]', '[]', '[]', '[]', " + made + ", 1, {})"
    )
    return [
        "INSERT INTO batches (id, fingerprint, queue, shard_size, defaults, created_at, submitted_at)"
        f" VALUES ('B', 'f', 'default', 3, '{{}}', {made}, {made})",
        "INSERT INTO shards (batch_id, shard_no, first_index, last_index, requests, state, completed, failed)"
        " VALUES ('B', 0, 0, 2, 3, 'ready', 1, 1)",
        *(
            'INSERT INTO requests (batch_id, "index", custom_id, endpoint, body, shard_no)'
            f""" VALUES ('B', {index}, 'q{index}', '/v1/completions', '{{"prompt":"p"}}', 0)"""
            for index in range(3)
        ),
        completion.format(0, "'completed'", "'stop'", "NULL"),
        completion.format(1, "'failed'", "'error'", """'{"code":"e","message":"m"}'"""),
    ]


ROWS_OF_THE_THIRD_REVISION = (
    "UPDATE batches SET paused_at = created_at",
    "UPDATE completions SET completion_tokens = 5, model_version = 'v1', worker = 'w1' WHERE \"index\" = 1",
    'INSERT INTO checkpoints (batch_id, "index", choice, fence, token_ids, tokens, logprobs, token_times, started_at,'
    """ updated_at, model_version) VALUES ('B', 2, 0, 1, '[7,8]', '["a","b"]', '[-1,-2]', '[0.5,1]',"""
    " '2026-03-01T12:00:00.250000Z', '2026-03-01T12:00:00.250000Z', 'v1')",
    'INSERT INTO commands (id, kind, batch_id, "index", arguments, created_at)'
    """ VALUES ('C', 'cancel_request', 'B', 2, '{"a":1}', '2026-03-01T12:00:00.250000Z')""",
    "INSERT INTO workers (name, host, pid, device, dtype, model, model_version, state, started_at, heartbeat_at)"
    " VALUES ('w1', 'h', 1, 'cpu', 'float32', 'm', 'v1', 'ready', '2026-03-01T12:00:00.250000Z', 4e9)",
)


class TestUpgrading:
    def test_from_empty_to_the_newest(self, empty_database_url: str) -> None:
        assert schema.current(empty_database_url) is None
        schema.upgrade(empty_database_url)
        assert schema.current(empty_database_url) == schema.head()
        assert schema.check(empty_database_url) == []
        schema.upgrade(empty_database_url)
        assert schema.check(empty_database_url) == []

    def test_down_to_nothing_and_up_again(self, database: Database, database_url: str) -> None:
        migrate(database_url, command.downgrade, "base")
        with database.reading() as connection:
            assert sa.inspect(connection).get_table_names() == ["alembic_version"]
            assert sa.inspect(connection).get_view_names() == []
        schema.upgrade(database_url)
        assert schema.check(database_url) == []

    def test_rows_of_the_first_revision_stay_and_take_choices_and_scores(self, empty_database_url: str) -> None:
        migrate(empty_database_url, command.upgrade, "0001")
        execute(empty_database_url, *rows_of_the_first_revision())
        schema.upgrade(empty_database_url)
        assert schema.check(empty_database_url) == []
        store = Store(empty_database_url)
        scores = PromptScores(token_ids=(1,), tokens=("p",), logprobs=(None,), top_logprobs=None)
        [lease] = store.claim([ShardId("B", 0)], "w", 60)
        new = [answer(2, prompt_scores=scores), replace(failure(2, "late"), choice=1)]
        assert store.record([(lease, each) for each in new]).done == [lease.shard]
        assert [(r.state, r.completion and r.completion.text, len(r.choices)) for r in store.results("B")] == [
            ("completed", "old", 1),
            ("failed", "old", 1),
            ("failed", "answer 2", 2),
        ]
        assert [r.completion and r.completion.prompt_scores for r in store.results("B")] == [None, None, scores]
        _, rows = store.select('SELECT "index", state, error_code FROM results ORDER BY "index"')
        assert list(rows) == [(0, "completed", None), (1, "failed", "e"), (2, "failed", "late")]
        store.close()
        migrate(empty_database_url, command.downgrade, "0001")
        store = Store(empty_database_url)
        _, rows = store.select('SELECT "index", state, error_code FROM results ORDER BY "index"')
        assert list(rows) == [(0, "completed", None), (1, "failed", "e"), (2, "completed", None)]
        store.close()

    def test_rows_of_the_second_revision_stay_and_can_be_split_and_retried(self, empty_database_url: str) -> None:
        migrate(empty_database_url, command.upgrade, "0002")
        execute(empty_database_url, *rows_of_the_first_revision())
        schema.upgrade(empty_database_url)
        store = Store(empty_database_url)
        assert list(store.select("SELECT loaded_at = created_at FROM batches")[1]) == [(1,)]
        crash(store, "B", times=2)
        assert store.isolate().split == 1
        assert store.retry_failed("B").requests == 1
        claim(store, "B", 3)
        states = 'SELECT "index", state FROM results ORDER BY "index"'
        assert list(store.select(states)[1]) == [(0, "completed"), (1, "queued"), (2, "running")]
        assert [past.text for past in store.past_completions("B", 1)] == ["old"]
        store.close()
        migrate(empty_database_url, command.downgrade, "0002")
        store = Store(empty_database_url)
        assert [state for _, state in store.select(states)[1]] == ["completed", "queued", "queued"]
        assert list(store.select("SELECT total, completed, failed FROM batch_progress")[1]) == [(3, 1, 0)]
        store.close()
        schema.upgrade(empty_database_url)
        assert schema.check(empty_database_url) == []

    def test_rows_of_the_third_revision_stay_and_can_be_controlled(self, empty_database_url: str) -> None:
        migrate(empty_database_url, command.upgrade, "0003")
        execute(empty_database_url, *rows_of_the_first_revision(), *ROWS_OF_THE_THIRD_REVISION)
        schema.upgrade(empty_database_url)
        assert schema.check(empty_database_url) == []
        store = Store(empty_database_url)
        info = store.batch("B")
        assert info.pause is not None
        assert (info.pause.by, info.pause.reason, info.pause.release) == ("", None, False)
        assert (info.tokens.in_progress, [worker.serves for worker in store.workers()]) == (2, [()])
        assert [stored.version_spans for stored in store.progress("B", 2)] == [(VersionSpan(version="v1"),)]
        versions = 'SELECT "index", version, worker, attempt, from_token, tokens FROM completion_versions'
        assert select(store, versions) == [(1, "v1", "w1", 1, 0, 5)]
        assert store.resume_batch("B")
        lease = claim(store, "B")
        assert store.orders("w1", [lease]).cancelled_requests == {("B", 2)}
        store.order(CommandKind.DRAIN, ["w1"], by="ann")
        store.pause_batch("B", by="ann", release=True)
        store.pause_worker(None, by="ann")
        store.close()

        migrate(empty_database_url, command.downgrade, "0003")
        store = Store(empty_database_url)
        assert select(store, "SELECT total, running, paused_at IS NULL FROM batch_progress") == [(3, 1, False)]
        assert select(store, 'SELECT kind, "index", arguments FROM commands') == [("cancel_request", 2, '{"a":1}')]
        assert select(store, 'SELECT "index", model_version FROM checkpoints') == [(2, "v1")]
        store.close()
        schema.upgrade(empty_database_url)
        assert schema.check(empty_database_url) == []

    def test_the_views_of_the_fourth_revision_show_what_they_showed(self, empty_database_url: str) -> None:
        migrate(empty_database_url, command.upgrade, "0004")
        store = Store(empty_database_url)
        batch_id = submit(store, 10, shard_size=2)
        lease = claim(store, batch_id)
        store.record([(lease, answer(0)), (lease, replace(failure(0), choice=1)), (lease, answer(1, tokens=300))])
        claim(store, batch_id, 1)
        crash(store, batch_id, 2, times=2)
        crash(store, batch_id, 3)
        assert store.isolate().split == 1
        [(alone,)] = select(store, "SELECT max(shard_no) FROM shards")
        claim(store, batch_id, alone)
        views = [
            f'SELECT * FROM {view} ORDER BY batch_id, "index", {order}'
            for view, order in (("results", "custom_id"), ("completion_tokens", "choice, position"))
        ]
        shown = [select(store, each) for each in views]
        assert Counter(row[3] for row in shown[0]) == {"failed": 1, "completed": 1, "running": 3, "queued": 5}
        assert len(shown[1]) == 303
        store.close()
        for step, revision in ((command.upgrade, "head"), (command.downgrade, "0004")):
            migrate(empty_database_url, step, revision)
            store = Store(empty_database_url)
            assert [select(store, each) for each in views] == shown
            store.close()

    def test_a_migration_that_fails_leaves_nothing(
        self, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object, **options: object) -> None:
            raise RuntimeError("in the middle")

        with monkeypatch.context() as patched:
            patched.setattr("alembic.op.create_index", fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                schema.upgrade(empty_database_url)
        database = Database(empty_database_url)
        with database.reading() as connection:
            assert sa.inspect(connection).get_table_names() == []
        database.close()

    def test_the_newest_revision_is_known_without_alembic(self) -> None:
        assert schema.head() == ScriptDirectory.from_config(schema._alembic_config()).get_current_head()

    @pytest.mark.parametrize("place", ["migrations", "batchjobs/_migrations"])
    def test_a_checkout_and_a_wheel_keep_them_in_different_places(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        shutil.copytree(ROOT / "migrations", tmp_path / place)
        monkeypatch.setattr(schema, "__file__", str(tmp_path / "batchjobs" / "schema.py"))
        url = f"sqlite:///{tmp_path / 'jobs.sqlite3'}"
        schema.upgrade(url)
        assert schema.current(url) == schema.head()
        shutil.rmtree(tmp_path / place)
        with pytest.raises(BatchjobsError, match="install batchjobs again"):
            schema.head()

    def test_alembic_itself_finds_nothing_to_do(self, database_url: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "alembic", "-c", "migrations/alembic.ini", "check"],
            cwd=ROOT,
            env={**os.environ, "BATCHJOBS_DATABASE_URL": database_url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "No new upgrade operations detected."), done.stderr


class TestChecking:
    def test_differences_are_named(self, database_url: str) -> None:
        execute(database_url, "DROP VIEW batch_progress", "ALTER TABLE batches ADD COLUMN extra TEXT")
        assert schema.check(database_url) == [
            "remove column: batches, batches.extra",
            "missing view batch_progress",
        ]

    def test_an_empty_database_lacks_everything(self, empty_database_url: str) -> None:
        found = schema.check(empty_database_url)
        assert found[0] == f"revision none instead of {schema.head()}"
        assert "add table: completions" in found
        assert "missing view results" in found

    def test_a_missing_column_of_a_view(self, database_url: str) -> None:
        execute(
            database_url, "DROP VIEW completion_tokens", "CREATE VIEW completion_tokens AS SELECT 1 AS position, 2 AS x"
        )
        assert "missing column completion_tokens.logprob" in schema.check(database_url)
        assert "unknown column completion_tokens.x" in schema.check(database_url)


class TestPreparing:
    def test_an_empty_database_gets_its_tables(self, empty_database_url: str) -> None:
        store = Store(empty_database_url)
        store.prepare()
        store.prepare()
        assert store.batch(submit(store, 1)).counts.total == 1
        store.close()

    def test_several_at_once(self, empty_database_url: str) -> None:
        start = Barrier(2)
        code = (
            "import sys; from batchjobs.store import Store; s = Store(sys.argv[1]); s.prepare(); s.batches(); s.close()"
        )

        def prepare(_: int) -> tuple[int, str]:
            start.wait()
            command = [sys.executable, "-W", "error", "-c", code, empty_database_url]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            return done.returncode, done.stderr

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(prepare, range(2))) == [(0, "")] * 2
        assert schema.check(empty_database_url) == []

    def test_threads_at_once(self, empty_database_url: str) -> None:
        start = Barrier(4)

        def prepare(_: int) -> None:
            store = Store(empty_database_url)
            start.wait()
            store.prepare()
            store.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(prepare, range(4)))
        assert schema.check(empty_database_url) == []

    def test_a_newer_database_is_refused(self, database_url: str) -> None:
        execute(database_url, "UPDATE alembic_version SET version_num = '9999'")
        store = Store(database_url)
        with pytest.raises(
            BatchjobsError, match=rf"newer version of batchjobs \(revision 9999, known here up to {schema.head()}\)"
        ):
            store.prepare()
        store.close()

    def test_a_file_with_other_tables_gets_ours_too(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'mine.sqlite3'}"
        execute(url, "CREATE TABLE notes (text TEXT)")
        Store(url).prepare()
        assert schema.current(url) == schema.head()

    def test_a_server_database_with_other_tables_is_left_to_its_owner(self, postgres_server) -> None:
        url = postgres_server.create_database(migrated=False)
        execute(url, "CREATE TABLE notes (text TEXT)")
        store = Store(url)
        with pytest.raises(
            BatchjobsError, match=f"is at revision none and this version needs {schema.head()}; run `batchjobs db up"
        ):
            store.prepare()
        store.close()
        schema.upgrade(url)
        store.prepare()
        store.close()
        postgres_server.drop_database(url)


class TestComments:
    def test_tables_py_says_something_about_everything(self) -> None:
        for table in metadata.sorted_tables:
            assert table.comment, table.name
            for column in table.columns:
                assert column.comment, f"{table.name}.{column.name}"

    def test_every_table_view_and_column_has_one(self, database: Database) -> None:
        with database.reading() as connection:
            missing = _uncommented_sqlite(connection) if database.is_sqlite else _uncommented_postgresql(connection)
        assert missing == []


def _uncommented_sqlite(connection: sa.Connection) -> list[str]:
    """What `.schema` would show without a word."""
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view') AND name <> 'alembic_version'"
    )
    statements = {row.name: row.sql for row in rows}
    assert statements.keys() == {table.name for table in (*metadata.sorted_tables, *VIEWS)}
    missing = []
    for table in metadata.sorted_tables:
        if f"/* {table.comment} */" not in statements[table.name]:
            missing.append(table.name)
        missing += [
            f"{table.name}.{column.name}"
            for column in table.columns
            if f"/* {column.comment} */" not in re.search(rf'(\n\t|, )"?{column.name}"? .*', statements[table.name])[0]
        ]
    for view in VIEWS:
        assert re.match(rf"CREATE VIEW {view.name} AS /\* .+ \*/", statements[view.name])
        missing += [
            f"{view.name}.{column.name}"
            for column in view.columns
            if not re.search(rf'AS "{column.name}" /\* .+ \*/', statements[view.name])
        ]
    return missing


def _uncommented_postgresql(connection: sa.Connection) -> list[str]:
    rows = connection.exec_driver_sql(
        """
        SELECT c.relname || coalesce('.' || a.attname, '') AS name
        FROM pg_class c
        LEFT JOIN LATERAL (
            SELECT attnum, attname FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
            UNION ALL SELECT 0, NULL
        ) a ON true
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')
          AND CASE a.attnum WHEN 0 THEN obj_description(c.oid) ELSE col_description(c.oid, a.attnum) END IS NULL
        """
    )
    return [row.name for row in rows]


def read(store: Store, sql: str) -> None:
    with store._database.reading() as connection:
        connection.exec_driver_sql(sql).all()


class TestPlans:
    """Queries that run all the time find their rows by an index, whatever else is in the tables."""

    @pytest.mark.parametrize(
        ("call", "table"),
        [
            (lambda store, batch_id: store.claimable(10), "shards USING INDEX ix_shards_unfinished"),
            (lambda store, batch_id: store.claimable_count(), "shards USING INDEX ix_shards_unfinished"),
            (lambda store, batch_id: store.failures(batch_id), "completions USING INDEX ix_completions_failed"),
            (
                lambda store, batch_id: store.result_by_custom_id(batch_id, "request-1"),
                "requests USING INDEX uq_requests_batch_id_custom_id",
            ),
            (lambda store, batch_id: store.batch(batch_id), r"s USING INDEX sqlite_autoindex_shards_1 \(batch_id=\?\)"),
            (lambda store, batch_id: store.isolate(), "shards USING INDEX ix_shards_unfinished"),
            (lambda store, batch_id: list(store.results(batch_id)), "shards USING INDEX ix_shards_single"),
            (lambda store, batch_id: submit(store, 1), "requests USING COVERING INDEX ix_requests_pinned"),
            (lambda store, batch_id: store.unserved(batch_id), "shards USING INDEX ix_shards_unfinished"),
            (lambda store, batch_id: store.open_commands("w1"), "commands USING INDEX ix_commands_open"),
            (
                lambda store, batch_id: store.orders("w1", [Lease(ShardId(batch_id, 0), 1, 1)]),
                r"commands USING COVERING INDEX sqlite_autoindex_commands_2 \(kind=\? AND batch_id=\?\)",
            ),
            (
                lambda store, batch_id: store.orders("w1", [Lease(ShardId(batch_id, 0), 1, 1)]),
                r"batches USING INDEX sqlite_autoindex_batches_1 \(id=\?\)",
            ),
            (
                lambda store, batch_id: read(store, f"SELECT state FROM results WHERE batch_id = '{batch_id}'"),
                r"x USING INDEX ix_shards_single \(batch_id=\? AND first_index=\?\)",
            ),
            (
                lambda store, batch_id: read(
                    store, f"SELECT token FROM completion_tokens WHERE batch_id = '{batch_id}' AND \"index\" = 1"
                ),
                r"c USING INDEX sqlite_autoindex_completions_1 \(batch_id=\? AND index=\?\)",
            ),
        ],
    )
    def test_on_sqlite(self, tmp_path: Path, call, table: str) -> None:
        store = Store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
        store.prepare()
        batch_id = submit(store, 8)
        plans: list[str] = []

        @sa.event.listens_for(store._database.engine, "before_cursor_execute")
        def explain(connection, cursor, statement, parameters, context, executemany) -> None:
            if statement.startswith("SELECT"):
                plans.extend(row[3] for row in cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall())

        call(store, batch_id)
        assert any(re.match(f"(SEARCH|SCAN) {table}", step) for step in plans), plans
        store.close()

    def test_results_on_postgresql(self, postgres_server) -> None:
        """Nothing is made that nobody asked for, and no plan joins requests and completions each with each, which is
        what the planner would do for as long as it knows nothing of a new batch."""
        url = postgres_server.create_database(migrated=True)
        database = Database(url)
        query = """SELECT custom_id, text FROM results WHERE batch_id = 'B' ORDER BY "index" LIMIT 10"""
        with database.reading() as connection:
            plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {query}"))
        database.close()
        postgres_server.drop_database(url)
        assert "Subquery Scan on results" not in plan
        assert "Join Filter" not in plan
        assert "status" not in plan
        key = r"Index Cond: \(\(batch_id = r.batch_id\) AND \(index = r.index\) AND \(choice = 0\)\)"
        assert re.search(rf"Index Scan using pk_completions on completions \w+ .*\n\s+{key}", plan), plan

    def test_logprobs_of_a_long_answer_take_no_longer_than_their_array(self, tmp_path: Path) -> None:
        """On SQLite each token would cost a walk along the whole array: a hundred times the time of this one."""
        store = Store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
        store.prepare()
        store.record([(claim(store, submit(store, 1)), answer(0, tokens=20_000))])
        array, view = (
            min(seconds_of(store, query) for _ in range(3))
            for query in (
                "SELECT sum(t.value) FROM completions c, json_each(c.logprobs) t",
                "SELECT sum(logprob) FROM completion_tokens",
            )
        )
        store.close()
        assert view < 20 * array


def seconds_of(store: Store, query: str) -> float:
    begun = time.perf_counter()
    assert select(store, query) == [(-0.5 * sum(range(20_000)),)]
    return time.perf_counter() - begun
