"""One batch in a SQLite file of its own, with the same tables and views, for tools that read such files.

It is read in pages, each a short transaction of its own and one consistent snapshot, so it takes the same memory for a
million rows as for a thousand, holds up nobody and may run while workers write. Of a batch that has not ended, shards
are read before their requests: what ends in between is there, but not counted yet.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import sqlalchemy as sa

from batchjobs import schema
from batchjobs.errors import ConnectionFailed, NotFound
from batchjobs.store.conditions import in_range
from batchjobs.tables import (
    Instant,
    batches,
    checkpoints,
    completions,
    model_versions,
    past_completions,
    requests,
    shards,
    workers,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy.engine import Connection

    from batchjobs.database import Database

_PAGE_INDEXES = 500
_PAGE_SHARDS = 5000
_ROWS_AT_ONCE = 100
"""A row has up to 128 choices beside it, and all of them may be long."""
_REMEMBERED_SPANS = 10_000
"""Spans that were looked into before need not be again; but they may differ from row to row."""


def extract(database: Database, batch_id: str, file: Path) -> int:
    """Fills an empty file, which nobody else uses yet, with a batch. Returns the number of its requests.

    What belongs to no batch is left out: orders, pauses, and workers and versions of models that had no part in it.

    Raises:
        NotFound: There is no such batch.
        OSError: The file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="batchjobs-") as folder:
        empty = Path(folder) / "empty.sqlite3"
        try:
            schema.upgrade(f"sqlite:///{empty}")
        except ConnectionFailed as error:  # which is not about the database that is read
            raise OSError(errno.ENOSPC, "there is no room for its tables", str(file)) from error
        shutil.copyfile(empty, file)
    with _errors_of(file), closing(_opened(file)) as target:
        copied = _Copy(database, batch_id, file, target).run()
        target.commit()
    return copied


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Those of the copy, which are not to be taken for those of the database that is read."""
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(file)) from error


def _opened(file: Path) -> sqlite3.Connection:
    target = sqlite3.connect(file)
    target.execute("PRAGMA journal_mode = DELETE")  # for good: readers need no second file, and no right to write
    target.execute("PRAGMA journal_mode = OFF")  # for now: the file is thrown away where something fails
    target.execute("PRAGMA synchronous = OFF")
    target.execute("PRAGMA cache_size = -16384")
    return target


class _Copy:
    """Copies page by page, and remembers which workers and versions of models there are in it."""

    def __init__(self, database: Database, batch_id: str, file: Path, target: sqlite3.Connection) -> None:
        self._database = database
        self._batch_id = batch_id
        self._file = file
        self._target = target
        self._workers: set[str] = set()
        self._versions: set[str] = set()
        self._seen_spans: set[str] = set()

    def run(self) -> int:
        with self._snapshot() as connection:
            if not self._copy(connection, batches, batches.c.id == self._batch_id):
                raise NotFound(f"no batch {self._batch_id!r}")
            last_shard = self._last(connection, shards.c.shard_no)
            last_index = self._last(connection, requests.c.index)
        for first in range(0, last_shard + 1, _PAGE_SHARDS):
            of_page = shards.c.shard_no.between(first, first + _PAGE_SHARDS - 1)
            with self._snapshot() as connection:
                self._copy(connection, shards, sa.and_(shards.c.batch_id == self._batch_id, of_page))
        copied = sum(map(self._copy_page, range(0, last_index + 1, _PAGE_INDEXES)))
        with self._snapshot() as connection:
            self._copy_named(connection, workers, self._workers)
            self._copy_named(connection, model_versions, self._versions)
        return copied

    def _copy_page(self, first: int) -> int:
        """Some requests with all that there is of them. Returns how many."""
        inside = {"batch": self._batch_id, "first": first, "last": first + _PAGE_INDEXES - 1}
        with self._snapshot() as connection:
            copied = self._copy(connection, requests, in_range(requests), inside)
            for table in (completions, past_completions, checkpoints):
                self._copy(connection, table, in_range(table), inside)
        return copied

    @contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        with self._database.reading() as connection:
            if not self._database.is_sqlite:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            yield connection

    def _last(self, connection: Connection, column: sa.Column[Any]) -> int:
        query = sa.select(sa.func.max(column)).where(column.table.c.batch_id == self._batch_id)
        found = connection.execute(query).scalar()
        return -1 if found is None else int(found)

    def _copy(
        self,
        connection: Connection,
        table: sa.Table,
        condition: sa.ColumnElement[bool],
        parameters: Mapping[str, Any] | None = None,
    ) -> int:
        copied = 0
        for rows in self._read(connection, table, condition, parameters).partitions():
            self._remember(table, rows)
            self._insert(table, map(tuple, rows))
            copied += len(rows)
        return copied

    def _copy_named(self, connection: Connection, table: sa.Table, names: Collection[str]) -> None:
        rows = self._read(connection, table, sa.true())
        self._insert(table, [tuple(row) for row in rows if row[0] in names])

    def _insert(self, table: sa.Table, rows: Iterable[tuple[Any, ...]]) -> None:
        with _errors_of(self._file):
            self._target.executemany(_insertion(table), rows)

    def _read(
        self,
        connection: Connection,
        table: sa.Table,
        condition: sa.ColumnElement[bool],
        parameters: Mapping[str, Any] | None = None,
    ) -> sa.CursorResult[Any]:
        columns = [_as_stored(column, self._database.is_sqlite) for column in table.columns]
        query = sa.select(*columns).where(condition)
        return connection.execute(query, parameters, execution_options={"yield_per": _ROWS_AT_ONCE})

    def _remember(self, table: sa.Table, rows: Sequence[sa.Row[Any]]) -> None:
        for position, column in enumerate(table.columns):
            if column.name in ("worker", "owner"):
                self._workers.update(row[position] for row in rows if row[position])
            elif column.name == "model_version":
                self._versions.update(row[position] for row in rows if row[position])
            elif column.name == "version_spans":
                self._remember_spans({row[position] for row in rows if row[position]})

    def _remember_spans(self, texts: set[str]) -> None:
        for span in chain.from_iterable(orjson.loads(text) for text in texts - self._seen_spans):
            self._versions.add(span["version"])
            if span["worker"]:
                self._workers.add(span["worker"])
        if len(self._seen_spans) > _REMEMBERED_SPANS:
            self._seen_spans.clear()
        self._seen_spans |= texts  # most answers have the same one


def _as_stored(column: sa.Column[Any], is_sqlite: bool) -> sa.ColumnElement[Any]:
    """The column as SQLite keeps it: text and numbers alone."""
    if isinstance(column.type, sa.JSON):
        return sa.cast(column, sa.Text)
    if isinstance(column.type, Instant):
        if is_sqlite:
            return sa.type_coerce(column, sa.Text)
        return sa.func.to_char(sa.func.timezone("UTC", column), 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    return column


def _insertion(table: sa.Table) -> str:
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    places = ", ".join("?" for _ in table.columns)
    return f"INSERT INTO {table.name} ({names}) VALUES ({places})"  # noqa: S608 - our own names
