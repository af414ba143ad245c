"""One database, SQLite or PostgreSQL: how it is opened, how its transactions begin, and what its failures mean.

Invariants:

- A writing transaction on SQLite begins with BEGIN IMMEDIATE, so it never has to upgrade a read lock, which SQLite
  would refuse at once. Waiting for the lock is done here, in small random steps, so that no process is starved.
- Reading never waits for a writer, nor a writer for a reader: WAL on SQLite, row versions on PostgreSQL.
- Every failure of the connection leaves as ConnectionFailed, with a sentence and without a password.
- No connection is shared by two processes: a process that forks closes its idle ones before, and the child begins anew.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import threading
import time
import weakref
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url

from batchjobs.errors import BatchjobsError, ConnectionFailed, UsageError
from batchjobs.folders import make_private_file
from batchjobs.interrupts import heed, uninterrupted
from batchjobs.text import has_stray_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUSY_SECONDS = 60.0
"""How long to wait on SQLite for the write lock of another process."""

_SECRET_KEYS = frozenset({"password", "sslpassword", "passfile", "oauth_client_secret"})
_BEGIN_IMMEDIATE = {"batchjobs_begin": "IMMEDIATE"}


class Database:
    """A pool of connections. Thread-safe. Opens nothing before the first use."""

    def __init__(self, url: str) -> None:
        self._url = parse_url(url)
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        self.place = _place(self._url)
        self.engine = _sqlite_engine(self._url) if self.is_sqlite else _postgresql_engine(self._url)
        self._writing_engine = self.engine.execution_options(**_BEGIN_IMMEDIATE) if self.is_sqlite else self.engine
        self._writer = self._new_writer()
        _databases.add(self)

    def _new_writer(self) -> AbstractContextManager[object]:
        """Threads of one process queue up here, which is fair, and only one of them polls SQLite's lock."""
        return threading.Lock() if self.is_sqlite else nullcontext()

    @property
    def url_without_password(self) -> str:
        query = {key: value for key, value in self._url.query.items() if key not in _SECRET_KEYS}
        return self._url.set(query=query)._replace(password=None).render_as_string()

    def __repr__(self) -> str:
        return f"Database({self.url_without_password!r})"

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent snapshot on SQLite; statement by statement on PostgreSQL."""
        with uninterrupted(), self._failures(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction: all of it is stored, or nothing where it raises. Must not be nested."""
        connect = self._writing_engine.connect
        with self._failures(), self._writer, uninterrupted(), connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def own_connection(self) -> Iterator[Any]:
        """A connection of the driver's own kind, outside of the pool, closed at the end whatever was done to it."""
        with self._failures():
            proxy = self.engine.raw_connection()
            proxy.detach()
            try:
                yield proxy.dbapi_connection
            finally:
                proxy.close()

    def close(self) -> None:
        self.engine.dispose()

    def begin_in_child(self) -> None:
        """After a fork: what other threads of the parent were using is not ours, nor is the lock that they may hold."""
        self.engine.dispose(close=False)
        self._writer = self._new_writer()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.TimeoutError as error:
            raise ConnectionFailed(f"no free connection to {self.place}: too many threads use it at once") from error
        except sa.exc.DBAPIError as error:
            failure = self._explain(error.orig, error.connection_invalidated)
            raise failure or error from error.orig
        except self.engine.dialect.loaded_dbapi.Error as error:  # bulk copies run below SQLAlchemy
            if failure := self._explain(error, False):
                raise failure from error
            raise

    def _explain(self, error: BaseException | None, disconnected: bool) -> BatchjobsError | None:
        if isinstance(error, sqlite3.Error):
            return _explain_sqlite(error, self.place, Path(self._url.database or ""))
        dbapi = self.engine.dialect.loaded_dbapi
        without_answer = isinstance(error, (dbapi.OperationalError, dbapi.InterfaceError)) and not error.sqlstate
        return _explain_postgresql(error, disconnected or without_answer, self.place)


_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _before_fork() -> None:
    for database in list(_databases):
        database.close()


def _after_fork_in_child() -> None:
    for database in list(_databases):
        database.begin_in_child()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def parse_url(url: str) -> URL:
    """Raises UsageError, which never repeats the text: it may hold a password."""
    wanted = "give sqlite:///path/to/file.sqlite3 or postgresql://user:password@host:port/name"
    if has_stray_at(url):
        raise UsageError("BATCHJOBS_DATABASE_URL has more than one @; write each @ of the user or password as %40")
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except (sa.exc.ArgumentError, ValueError):
        raise UsageError(f"BATCHJOBS_DATABASE_URL is not the address of a database: {wanted}") from None
    if backend in ("postgresql", "postgres") and parsed.drivername in (backend, f"{backend}+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise UsageError(f"databases of the kind {parsed.drivername!r} are not supported: {wanted}")
    if parsed.database in (None, "", ":memory:"):
        raise UsageError(f"a database in memory cannot be shared with workers: {wanted}")
    return parsed


def _place(url: URL) -> str:
    if url.get_backend_name() == "sqlite":
        return f"the SQLite database {url.database}"
    host = url.host or url.query.get("host") or "localhost"
    port = url.port or url.query.get("port") or 5432
    return f"PostgreSQL at {host}:{port}/{url.database or url.query.get('dbname') or url.username or ''}"


def json_text(value: Any) -> str:
    """Strict JSON: NaN and infinities become null."""
    return orjson.dumps(value).decode()


def _sqlite_engine(url: URL) -> sa.Engine:
    engine = sa.create_engine(url, json_serializer=json_text, json_deserializer=orjson.loads)
    file = Path(url.database or "")
    event.listen(engine, "do_connect", lambda *_: make_private_file(file))
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours, see _begin_sqlite
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
    # Twice the usual page and eight times the log before it is written back: a third less time for rows of 1 KB.
    connection.execute("PRAGMA page_size = 8192")  # of a new file
    _when_unlocked(lambda: _use_wal(connection))
    connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: 32 MiB
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -16384")  # 16 MiB
    connection.execute("PRAGMA journal_size_limit = 67108864")


def _use_wal(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    if "batchjobs_begin" not in connection.get_execution_options():
        connection.exec_driver_sql("BEGIN")
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    # SQLite's own waiting doubles up to 100 ms between tries, and a busy neighbour wins every time.
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        _when_unlocked(lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    finally:
        driver.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")


def _when_unlocked(attempt: Callable[[], object]) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            attempt()
            return
        except (sqlite3.OperationalError, sa.exc.OperationalError) as error:
            cause = getattr(error, "orig", error)
            if _sqlite_code(cause) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL) or time.monotonic() > deadline:
                raise
        heed()  # whoever waits may be interrupted
        time.sleep(random.uniform(0.0005, 0.005))


def _sqlite_code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain_sqlite(error: sqlite3.Error, place: str, file: Path) -> BatchjobsError | None:
    code = _sqlite_code(error)
    if "no such table" in str(error):
        return BatchjobsError(f"{place} lacks tables of batchjobs ({error}); run `batchjobs db upgrade`")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return BatchjobsError(f"{place} cannot be used: {error}; restore it from a backup or choose another file")
    if code == sqlite3.SQLITE_CANTOPEN and (reason := _why_not_opened(file)):
        return ConnectionFailed(f"cannot use {place}: {reason}")
    advice = {
        sqlite3.SQLITE_CANTOPEN: "check that its directory exists and can be written to",
        sqlite3.SQLITE_READONLY: "check the permissions of the file and of its directory",
        sqlite3.SQLITE_FULL: "free some space on that disk; nothing was written",
        sqlite3.SQLITE_IOERR: "check that disk; nothing was written",
        sqlite3.SQLITE_BUSY: f"another process has kept its write lock for {BUSY_SECONDS:.0f} s; nothing was written",
        sqlite3.SQLITE_PROTOCOL: "other processes keep its locks; nothing was written, try again",
    }.get(code)
    return ConnectionFailed(f"cannot use {place}: {error}; {advice}") if advice else None


def _why_not_opened(file: Path) -> str | None:
    folder = file.absolute().parent
    if file.is_dir():
        return "it is a folder; name a file"
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written; change its permissions or choose another one"
    return None


def _postgresql_engine(url: URL) -> sa.Engine:
    # A server that vanishes without a word is noticed within about a minute.
    network = {"connect_timeout": 10, "tcp_user_timeout": 30000, "keepalives_idle": 30, "keepalives_interval": 10}
    chosen = {key: value for key, value in network.items() if key not in url.query}
    return sa.create_engine(
        url,
        json_serializer=json_text,
        json_deserializer=orjson.loads,
        pool_pre_ping=True,
        connect_args={"application_name": "batchjobs", **chosen} if "application_name" not in url.query else chosen,
    )


# Connection exceptions, shutdowns, and no room for another connection.
_UNREACHABLE = re.compile(r"08|57P|53300")
# Resources, locks and files of the server: the same call may work later.
_TRANSIENT = re.compile(r"53|55P03|40|57014|58")


def _explain_postgresql(error: BaseException | None, disconnected: bool, place: str) -> BatchjobsError | None:
    state = getattr(error, "sqlstate", None) or ""
    reason = " ".join(str(error).split())
    if disconnected or _UNREACHABLE.match(state):
        return ConnectionFailed(f"cannot reach {place}: {reason}; check BATCHJOBS_DATABASE_URL or start the server")
    if _TRANSIENT.match(state):
        return ConnectionFailed(f"{place} could not do its work: {reason}; nothing was written, try again")
    if state in ("42P01", "42703"):
        return BatchjobsError(f"{place} lacks tables or columns of batchjobs; run `batchjobs db upgrade`")
    if "connection option" in reason:
        return UsageError(f"BATCHJOBS_DATABASE_URL cannot be used: {reason}")
    return None
