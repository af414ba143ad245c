"""Queries that users write: they read everything and change nothing, each on a connection of its own.

What keeps them from changing anything: on SQLite an authorizer that allows reading alone; on PostgreSQL a transaction
that may only read, a cursor, which takes a single SELECT, and no function that PostgreSQL calls volatile, for such a
function may do anything: end a session, write a file, send a query to another server.
"""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchjobs.errors import UsageError, WaitTimeout
from batchjobs.store.rows import is_storable
from batchjobs.tables import instant_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from batchjobs.database import Database

_FETCH = 500
_COMMENTS = r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_IS_QUERY = re.compile(rf"{_COMMENTS}(SELECT|WITH|VALUES)\b", re.IGNORECASE | re.DOTALL)
_ONLY_READING = "only reading is possible here"
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock."""

_WORD = re.compile(r"\w[\w$]*")
_VOLATILE = """
SELECT DISTINCT p.proname FROM pg_proc p JOIN pg_type t ON t.oid = p.prorettype
WHERE p.provolatile = 'v' AND t.typname NOT LIKE '%%handler' AND p.proname = ANY(%s)
"""  # no query can call a handler, and `system` is one
_HARMLESS = frozenset(
    {
        "random",
        "random_normal",
        "clock_timestamp",
        "timeofday",
        "current_query",
        "gen_random_uuid",
        "uuidv4",
        "uuidv7",
        "array_sample",
        "array_shuffle",
        "pg_relation_size",
        "pg_total_relation_size",
        "pg_table_size",
        "pg_indexes_size",
        "pg_database_size",
    }
)
_LARGEST_INTEGER = 2**63
_ENDED, _READ_ONLY = "57014", "25006"
"""States of PostgreSQL: ended at its timeout, a change in a transaction that may only read."""


def run_free_query(
    database: Database, sql: str, limit: int | None, timeout_seconds: float
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """See :meth:`Store.select`. The time that whoever reads the rows takes does not count."""
    if not _IS_QUERY.match(sql) or not is_storable(sql):
        raise UsageError(f"{_ONLY_READING}: give one statement that begins with SELECT or WITH")
    run = _run_sqlite if database.is_sqlite else _run_postgresql
    rows = run(database, sql, timeout_seconds)
    names: list[str] = next(rows)
    return names, _first(rows, limit)


def _first(rows: Generator[Any], limit: int | None) -> Iterator[tuple[Any, ...]]:
    with closing(rows):
        yield from islice(rows, limit)


def _run_sqlite(database: Database, sql: str, timeout_seconds: float) -> Generator[Any]:
    """Yields the names of the columns, then the rows."""
    deadline = 0.0

    def is_late() -> bool:
        return time.monotonic() > deadline

    with database.own_connection() as driver, _query_errors(timeout_seconds, is_late, sqlite3.Error, sqlite3.Warning):
        driver.execute("PRAGMA query_only = ON")
        for function in ("json_each", "json_tree"):  # their first use would look like a change
            driver.execute(f"SELECT 1 FROM {function}('[]')")  # noqa: S608 - our own names
        driver.set_progress_handler(is_late, _STEPS)
        driver.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
        deadline = time.monotonic() + timeout_seconds
        cursor = driver.execute(sql)
        yield [column[0] for column in cursor.description]
        deadline = time.monotonic() + timeout_seconds
        while rows := cursor.fetchmany(_FETCH):
            yield from (tuple(map(_plain, row)) for row in rows)
            deadline = time.monotonic() + timeout_seconds


def _run_postgresql(database: Database, sql: str, timeout_seconds: float) -> Generator[Any]:
    """Yields the names of the columns, then the rows."""
    import psycopg
    from psycopg.types.string import TextLoader

    errors = _query_errors(timeout_seconds, lambda: False, psycopg.Error)
    with database.own_connection() as driver, errors, driver.cursor() as cursor:
        for name in ("json", "jsonb"):
            cursor.adapters.register_loader(name, TextLoader)  # as SQLite gives it
        cursor.execute("SET TRANSACTION READ ONLY")
        _refuse_volatile_functions(cursor, sql)
        cursor.execute(f"SET LOCAL statement_timeout = {_milliseconds(timeout_seconds)}")
        # The binary format needs the extended protocol, and that takes a single statement: nothing can come behind it.
        cursor.execute(f"DECLARE free_query NO SCROLL CURSOR FOR {sql}", binary=True)
        cursor.execute(f"FETCH {_FETCH} FROM free_query")
        yield [column.name for column in cursor.description or ()]
        while rows := cursor.fetchall():
            yield from (tuple(map(_plain, row)) for row in rows)
            cursor.execute(f"FETCH {_FETCH} FROM free_query")


def _refuse_volatile_functions(cursor: Any, sql: str) -> None:
    """Looks at each word, in texts and comments too: that cannot be led astray by any way of quoting."""
    words = set(_WORD.findall(sql))
    if re.search(r'[uU]&"', sql):
        raise UsageError(f'{_ONLY_READING}: write names without U&"…" escapes')
    cursor.execute(_VOLATILE, [sorted(words | {word.lower() for word in words})])
    if found := sorted({name for (name,) in cursor.fetchall()} - _HARMLESS):
        raise UsageError(
            f"{_ONLY_READING}, and {found[0]} is the name of a function that may do more; leave it out"
            " (a function of your own can be declared STABLE)"
        )


def _milliseconds(seconds: float) -> int:
    """As PostgreSQL takes it, where 0 would be no limit at all."""
    return int(min(max(seconds * 1000, 1), 2**31 - 1))


def _plain(value: Any) -> Any:
    """Numbers and text, as JSON and tables can show them. A number that JSON cannot hold is a text."""
    if value is None or isinstance(value, (str, float, bool)):
        return value
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value.as_tuple().exponent == 0
        return _plain(int(value)) if is_whole else float(value)
    if isinstance(value, int):
        return value if -_LARGEST_INTEGER <= value < _LARGEST_INTEGER else str(value)
    if isinstance(value, datetime):
        return instant_text(value) if value.tzinfo is not None else value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, memoryview)):
        return f"\\x{bytes(value).hex()}"
    return [_plain(each) for each in value] if isinstance(value, list) else str(value)


@contextmanager
def _query_errors(timeout_seconds: float, is_late: Callable[[], bool], *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        state = getattr(error, "sqlstate", "")
        if state is None or state.startswith("57P"):  # the server is gone
            raise
        reason = _reason(error)
        if reason == "interrupted" and not is_late():
            raise KeyboardInterrupt from error  # SQLite swallows it on its way out of the look at the clock
        if state == _ENDED or reason == "interrupted":
            raise WaitTimeout(
                f"the query took longer than its timeout of {timeout_seconds:g} s; ask about one batch, or allow more"
            ) from error
        if state == _READ_ONLY or reason == "not authorized" or "data-modifying" in reason:
            reason = _ONLY_READING
        raise UsageError(f"the query failed: {reason}") from error


def _reason(error: Exception) -> str:
    """What the database says, without the statement around the query."""
    said = getattr(error, "diag", None)
    parts = (said.message_primary, said.message_hint) if said and said.message_primary else (str(error),)
    return " ".join("; ".join(part for part in parts if part).split())
