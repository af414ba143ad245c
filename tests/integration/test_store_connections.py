"""What happens when the database is not there, goes away, or is used by many at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchjobs.errors import BatchjobsError, ConnectionFailed, UsageError
from batchjobs.store import Store, outcomes
from batchjobs.types import Counts
from tests.support.batches import answer, claim, finish, submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.sql import PostgresServer

SECRET = "s3cret/pass"
QUOTED = "s3cret%2Fpass"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.create_database(migrated=True)
    yield url
    postgres_server.drop_database(url)


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            (f"postgresql://me:{QUOTED}@db:5433/jobs", "postgresql+psycopg://me@db:5433/jobs"),
            (f"postgres://me:{QUOTED}@db/jobs", "postgresql+psycopg://me@db/jobs"),
            (
                f"postgresql+psycopg://db/jobs?password={QUOTED}&sslmode=require",
                "postgresql+psycopg://db/jobs?sslmode=require",
            ),
            ("sqlite:////data/jobs.sqlite3", "sqlite:////data/jobs.sqlite3"),
        ],
    )
    def test_passwords_are_left_out(self, url: str, shown: str) -> None:
        store = Store(url)
        assert store.url_without_password == shown
        assert repr(store) == f"Store('{shown}')"
        assert "s3cret" not in repr(vars(store))

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("nonsense", "not the address of a database"),
            (f"postgresql://me:{SECRET}@db:port/jobs", "not the address of a database"),
            (f"mysql://me:{SECRET}@db/jobs", "databases of the kind 'mysql' are not supported"),
            (f"postgresql+asyncpg://me:{SECRET}@db/jobs", "'postgresql\\+asyncpg' are not supported"),
            ("sqlite://", "a database in memory cannot be shared"),
            ("sqlite:///:memory:", "a database in memory cannot be shared"),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, url: str, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            Store(url)
        assert "s3cret" not in str(caught.value)


class TestUnreachable:
    def test_nobody_listens(self) -> None:
        store = Store(f"postgresql://me:{QUOTED}@127.0.0.1:1/jobs")
        with pytest.raises(
            ConnectionFailed, match=r"cannot reach PostgreSQL at 127\.0\.0\.1:1/jobs: .*refused"
        ) as caught:
            store.batches()
        assert "check BATCHJOBS_DATABASE_URL or start the server" in str(caught.value)
        assert "s3cret" not in str(caught.value)
        with pytest.raises(ConnectionFailed):
            store.prepare()
        with pytest.raises(ConnectionFailed):
            store.select("SELECT 1")

    def test_no_such_database(self, postgres_server: PostgresServer) -> None:
        store = Store(postgres_server.url("nope"))
        with pytest.raises(ConnectionFailed, match=r"/nope: .*does not exist"):
            store.batches()

    def test_an_option_that_does_not_exist(self) -> None:
        store = Store(f"postgresql://me:{QUOTED}@127.0.0.1/jobs?colour=red")
        with pytest.raises(
            UsageError, match='BATCHJOBS_DATABASE_URL cannot be used: invalid connection option "colour"'
        ):
            store.batches()

    def test_no_such_directory(self, tmp_path: Path) -> None:
        store = Store(f"sqlite:///{tmp_path}/nope/jobs.sqlite3")
        with pytest.raises(ConnectionFailed, match=r"nope/jobs.sqlite3: .*check that its directory exists"):
            store.prepare()

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "jobs.sqlite3").write_text("prompt,answer\n" * 1000)
        store = Store(f"sqlite:///{tmp_path}/jobs.sqlite3")
        with pytest.raises(BatchjobsError, match="file is not a database; restore it from a backup or choose another"):
            store.prepare()
        store.close()

    def test_tables_are_missing(self, empty_database_url: str) -> None:
        store = Store(empty_database_url)
        with pytest.raises(BatchjobsError, match="run `batchjobs db upgrade`"):
            store.batches()
        store.close()


class TestServerGoesAway:
    def test_a_connection_cut_while_idle_is_replaced(self, postgres_url: str, postgres_server: PostgresServer) -> None:
        store = Store(postgres_url)
        batch_id = submit(store, 4)
        postgres_server.disconnect_all()
        assert store.batch(batch_id).counts == Counts(total=4, queued=4)
        store.close()

    def test_one_cut_in_the_middle_is_reported_and_nothing_is_written(
        self, postgres_url: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Store(postgres_url)
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        records = [(lease, answer(index)) for index in range(4)]
        for broken in ("insert_rows", "_count", "_close_finished"):
            with monkeypatch.context() as patched:
                whole = getattr(outcomes, broken)

                def cut_first(*args: object, whole=whole) -> object:
                    postgres_server.disconnect_all()
                    return whole(*args)

                patched.setattr(outcomes, broken, cut_first)
                with pytest.raises(
                    ConnectionFailed,
                    match=r"cannot reach PostgreSQL at .*: .*(connection is lost|terminating).*; check BATCHJOBS",
                ):
                    store.record(records)
            assert store.batch(batch_id).counts == Counts(total=4, running=4)
        assert store.record(records).done == [lease.shard]
        assert store.batch(batch_id).counts == Counts(total=4, completed=4)
        store.close()


class TestManyAtOnce:
    def test_reading_does_not_wait_for_a_writer(self, store: Store) -> None:
        batch_id = submit(store, 4)
        with store._database.writing() as connection:
            connection.exec_driver_sql("UPDATE batches SET name = 'new'")
            with ThreadPoolExecutor(1) as other:
                assert other.submit(store.batch, batch_id).result(timeout=30).name is None
        assert store.batch(batch_id).name == "new"

    def test_nor_a_writer_for_readers(self, store: Store) -> None:
        batch_id = submit(store, 4)
        with store._database.reading() as connection:
            connection.exec_driver_sql("SELECT * FROM requests").fetchone()
            with ThreadPoolExecutor(1) as other:
                other.submit(store.pause_batch, batch_id).result(timeout=30)
        assert store.batch(batch_id).paused

    def test_two_processes_hammer_one_database(self, store: Store, database_url: str) -> None:
        batch_id = submit(store, 240, shard_size=3)
        workers = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.support.hammer", database_url, batch_id, f"w{number}"],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(2)
        ]
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], outputs
        assert sum(int(output) for output in outputs) == 80
        info = store.batch(batch_id)
        assert info.counts == Counts(total=240, completed=240)
        assert info.tokens.completion == 720

    def test_threads_share_a_store(self, store: Store) -> None:
        batch_id = submit(store, 80)

        def work(number: int) -> None:
            lease = claim(store, batch_id, number)
            store.renew([lease], 60)
            finish(store, lease)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(20)))
        assert store.batch(batch_id).counts == Counts(total=80, completed=80)


class TestDiskFull:
    def test_nothing_is_written_and_it_works_again_later(self, tmp_path: Path) -> None:
        store = Store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
        store.prepare()
        batch_id = submit(store, 4)
        lease = claim(store, batch_id)
        large = [(lease, answer(index, text="x" * 1_000_000)) for index in range(4)]
        for size, outcome in ((1, "full"), (2**20, None)):
            with store._database.writing() as connection:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + size}")
            if outcome:
                with pytest.raises(ConnectionFailed, match="disk is full; free some space on that disk; nothing was"):
                    store.record(large)
                assert store.batch(batch_id).counts == Counts(total=4, running=4)
        assert store.record(large).done == [lease.shard]
        store.close()
