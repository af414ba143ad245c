"""Queries that users write: they read everything and change nothing, each on a connection of its own."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing, contextmanager
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchjobs.errors import UsageError
from batchjobs.store.rows import is_storable
from batchjobs.tables import instant_text

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from batchjobs.database import Database

_FETCH = 500
_COMMENTS = r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_IS_QUERY = re.compile(rf"{_COMMENTS}(SELECT|WITH|VALUES)\b", re.IGNORECASE | re.DOTALL)
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def run_free_query(
    database: Database, sql: str, limit: int | None, timeout_seconds: float
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """See :meth:`Store.select`."""
    if not _IS_QUERY.match(sql) or not is_storable(sql):
        raise UsageError("only reading is possible here: give one statement that begins with SELECT or WITH")
    run = _run_sqlite if database.is_sqlite else _run_postgresql
    rows = run(database, sql, timeout_seconds)
    names: list[str] = next(rows)
    return names, _first(rows, limit)


def _first(rows: Generator[Any], limit: int | None) -> Iterator[tuple[Any, ...]]:
    with closing(rows):
        yield from islice(rows, limit)


def _run_sqlite(database: Database, sql: str, timeout_seconds: float) -> Generator[Any]:
    """Yields the names of the columns, then the rows."""
    with database.own_connection() as driver, _query_errors(sqlite3.Error, sqlite3.Warning):
        deadline = time.monotonic() + timeout_seconds
        driver.execute("PRAGMA query_only = ON")
        for function in ("json_each", "json_tree"):  # their first use would look like a change
            driver.execute(f"SELECT 1 FROM {function}('[]')")
        driver.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        driver.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
        cursor = driver.execute(sql)
        yield [column[0] for column in cursor.description]
        yield from cursor


def _run_postgresql(database: Database, sql: str, timeout_seconds: float) -> Generator[Any]:
    """Yields the names of the columns, then the rows."""
    import psycopg
    from psycopg.types.string import TextLoader

    with database.own_connection() as driver, _query_errors(psycopg.Error), driver.cursor() as cursor:
        cursor.adapters.register_loader("json", TextLoader)  # as SQLite gives it
        cursor.execute("SET TRANSACTION READ ONLY")
        cursor.execute(f"SET LOCAL statement_timeout = {int(timeout_seconds * 1000)}")
        # The binary format needs the extended protocol, and that takes a single statement: nothing can come behind it.
        cursor.execute(f"DECLARE free_query NO SCROLL CURSOR FOR {sql}", binary=True)
        cursor.execute(f"FETCH {_FETCH} FROM free_query")
        yield [column.name for column in cursor.description or ()]
        while rows := cursor.fetchall():
            yield from (tuple(map(_plain, row)) for row in rows)
            cursor.execute(f"FETCH {_FETCH} FROM free_query")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return instant_text(value)
    return float(value) if isinstance(value, Decimal) else value


@contextmanager
def _query_errors(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        state = getattr(error, "sqlstate", "")
        if state is None or state.startswith("57P"):  # the server is gone
            raise
        reason = " ".join(str(error).split())
        if reason == "not authorized":
            reason = "only reading is possible here"
        raise UsageError(f"the query failed: {reason}") from error
