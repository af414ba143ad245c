"""Results, one by one or as a stream of any length, and free queries.

A stream is read in pages of some megabytes, each found by the index of the last request before it and each a short
transaction of its own: it takes the same memory for a million rows as for a thousand, holds up nobody, and may run
while workers write.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from batchjobs.clock import database_seconds
from batchjobs.errors import NotFound
from batchjobs.store.conditions import in_range
from batchjobs.store.extract import extract
from batchjobs.store.free_query import run_free_query
from batchjobs.store.part import Part, known
from batchjobs.store.records import StoredResult
from batchjobs.store.rows import COMPLETION_COLUMNS, REQUEST_COLUMNS, completion_of, request_of
from batchjobs.tables import batches, completions, requests, shards
from batchjobs.types import MAX_CHOICES, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from sqlalchemy.engine import Connection, Row

PAGE_ROWS = 500
PAGE_BYTES = 8 * 2**20
_FIRST_PAGE_ROWS = 50
"""How long the rows are is only known after the first page."""
_WEIGHED_ROWS = 50
"""How many of the rows of a page are looked at for that."""


class ReadingPart(Part):
    def results(
        self, batch_id: str, *, after_index: int = -1, only: str | Collection[str] | None = None
    ) -> Iterator[StoredResult]:
        """The requests of a batch with what became of them, all choices of each, in input order.

        Args:
            after_index: Begins behind this request, to go on with an interrupted reading.
            only: A state or several: queued, running, completed, failed, cancelled, expired.

        Raises:
            NotFound: There is no such batch.
        """
        with self._database.reading() as connection:
            there = sa.select(batches.c.id).where(batches.c.id == known("batch", batch_id))
            if connection.execute(there).first() is None:
                raise NotFound(f"no batch {batch_id!r}")
        states = {only} if isinstance(only, str) else only
        if states is not None and set(states) == {RequestStatus.FAILED}:
            return self._failed(batch_id, after_index)
        return self._pages(batch_id, after_index, states)

    def _pages(self, batch_id: str, after_index: int, only: Collection[str] | None) -> Iterator[StoredResult]:
        limit = min(_FIRST_PAGE_ROWS, PAGE_ROWS)
        while True:
            with self._database.reading() as connection:
                page = _read_page(connection, batch_id, after_index, limit)
            if not page:
                return
            after_index = page[-1].request.index_
            limit = _rows_in_a_page(page)
            for found in page:
                if only is None or found.state in only:
                    yield found.result()
            del found, page  # before the next one comes

    def _failed(self, batch_id: str, after_index: int) -> Iterator[StoredResult]:
        """Few among many, mostly; they have an index of their own."""
        while True:
            with self._database.reading() as connection:
                parameters = {"batch": batch_id, "after": after_index, "limit": PAGE_ROWS}
                indexes = connection.execute(_FAILED_INDEXES, parameters).scalars().all()
            if not indexes:
                return
            for after_index in indexes:
                found = self._one(batch_id, after_index)
                if found is not None and found.state == RequestStatus.FAILED:  # else another choice was cancelled
                    yield found.result()

    def _one(self, batch_id: str, index: int) -> _Found | None:
        with self._database.reading() as connection:
            page = _read_page(connection, batch_id, index - 1, 1)
        return page[0] if page and page[0].request.index_ == index else None

    def result(self, batch_id: str, index: int) -> StoredResult:
        """One request."""
        found = self._one(known("batch", batch_id), index) if 0 <= index < 2**63 else None
        if found is None:
            raise NotFound(f"batch {batch_id!r} has no request {index}")
        return found.result()

    def result_by_custom_id(self, batch_id: str, custom_id: str) -> StoredResult:
        """The same by the user's id, which must match exactly; a refused line yields to the accepted one."""
        with self._database.reading() as connection:
            parameters = {"batch": known("batch", batch_id), "custom_id": known("request", custom_id)}
            index = connection.execute(_ACCEPTED, parameters).scalar()
            if index is None:
                index = connection.execute(_REFUSED, parameters).scalar()
        if index is None:
            raise NotFound(f"batch {batch_id!r} has no request {custom_id!r}")
        return self.result(batch_id, index)

    def batch_source_files(self, batch_id: str) -> list[str]:
        """The paths of the files that a batch was submitted from, as far as they are known; where line feeds may be
        part of a name, with each way to read them. Raises NotFound."""
        with self._database.reading() as connection:
            query = sa.select(batches.c.source).where(batches.c.id == known("batch", batch_id))
            found = connection.execute(query).first()
        if found is None:
            raise NotFound(f"no batch {batch_id!r}")
        return _paths_in(found.source) if found.source else []

    def own_files(self) -> list[str]:
        """The paths of the files that the database itself consists of; none of a server's."""
        if not self._database.is_sqlite:
            return []
        file = str(self._database.engine.url.database)
        return [file, f"{file}-wal", f"{file}-shm"]

    def extract_batch(self, batch_id: str, file: Path) -> int:
        """Fills an empty file with a SQLite database of this batch alone; see :mod:`batchjobs.store.extract`. Returns
        the number of its requests. Raises NotFound, or OSError where the file cannot be written."""
        return extract(self._database, known("batch", batch_id), file)

    def select(
        self, sql: str, limit: int | None = 1000, *, timeout_seconds: float = 60.0
    ) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Runs one SELECT of the user, which can read everything and change nothing.

        Returns:
            The names of the columns, and the rows: at most ``limit`` (None: all), streamed.

        Raises:
            UsageError: The statement is wrong, or would write.
            WaitTimeout: It takes longer than ``timeout_seconds``.
        """
        return run_free_query(self._database, sql, limit, timeout_seconds)


def _paths_in(source: str) -> list[str]:
    """The paths that lines of paths may mean: a line feed can be part of a name as well, if its folder exists."""
    lines = source.split("\n")
    found = list(lines)
    for first, path in enumerate(lines, 1):
        for line in lines[first:]:
            path = f"{path}\n{line}"
            if not os.path.isdir(os.path.dirname(path)):
                break
            found.append(path)
    return found


class _Found(NamedTuple):
    """A request with its completions, as rows whose JSON is text."""

    created_at: datetime
    request: Row[Any]
    state: str
    completions: list[Row[Any]]

    def result(self) -> StoredResult:
        return StoredResult(
            batch_id=self.request.batch_id,
            request=request_of(self.request),
            state=self.state,
            choices=tuple(map(completion_of, self.completions)),
            created_at=self.created_at,
        )


def _read_page(connection: Connection, batch_id: str, after_index: int, limit: int) -> list[_Found]:
    created_at = connection.execute(_CREATED_AT, {"batch": batch_id}).scalar()
    rows = connection.execute(_REQUESTS, {"batch": batch_id, "after": after_index, "limit": limit}).all()
    if not rows or created_at is None:
        return []
    # Shards before completions: where a request ends in between, its completion is seen.
    inside = {"batch": batch_id, "first": rows[0].index_, "last": rows[-1].index_}
    live = _live(connection, rows, inside)
    most = limit + MAX_CHOICES
    found = connection.execute(_COMPLETIONS, {**inside, "limit": most}).all()
    if len(found) == most:  # many choices: the page ends before the request that may have more of them
        rows = [row for row in rows if row.index_ < found[-1].index_]
    outcomes: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    for outcome in found:
        outcomes[outcome.index_].append(outcome)
    return [_Found(created_at, row, _state(row, outcomes[row.index_], live), outcomes[row.index_]) for row in rows]


def _live(connection: Connection, rows: Sequence[Row[Any]], inside: dict[str, Any]) -> set[int]:
    """Which of these requests are in a shard that a worker holds: the one that they were put into, or one that took
    its place for a single request."""
    numbers = [row.shard_no for row in rows]
    wanted = {**inside, "first_shard": min(numbers), "last_shard": max(numbers)}
    held = connection.execute(_HELD, wanted).all()
    shards_held = {row.shard_no for row in held}
    singles = {row.first_index for row in held if row.requests == 1}
    return {row.index_ for row in rows if row.shard_no in shards_held or row.index_ in singles}


def _state(request: Row[Any], choices: Sequence[Row[Any]], live: Collection[int]) -> str:
    if choices:
        return RequestStatus.of_choices(RequestStatus(choice.status) for choice in choices)
    return "running" if request.index_ in live else "queued"


def _rows_in_a_page(page: Sequence[_Found]) -> int:
    """How many rows of the same size as these make a page."""
    some = page[:: 1 + len(page) // _WEIGHED_ROWS]
    rows = [row for found in some for row in (found.request, *found.completions)]
    size = sum(len(value) for row in rows for value in row if isinstance(value, str))
    return max(1, min(PAGE_ROWS, PAGE_BYTES * len(some) // size))


_IN_BATCH = requests.c.batch_id == sa.bindparam("batch")
_REQUESTS = (
    sa.select(*REQUEST_COLUMNS)
    .where(_IN_BATCH, requests.c.index > sa.bindparam("after"))
    .order_by(requests.c.index)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_COMPLETIONS = (
    sa.select(*COMPLETION_COLUMNS)
    .where(in_range(completions))
    .order_by(completions.c.index, completions.c.choice)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_CREATED_AT = sa.select(batches.c.created_at).where(batches.c.id == sa.bindparam("batch"))
_LIVE = sa.select(shards.c.shard_no, shards.c.first_index, shards.c.requests).where(
    shards.c.batch_id == sa.bindparam("batch"), shards.c.state == "leased", shards.c.lease_until > database_seconds()
)
_HELD = sa.union_all(
    _LIVE.where(shards.c.shard_no.between(sa.bindparam("first_shard"), sa.bindparam("last_shard"))),
    # Written out, because the index on shards of one request is only used for these very words.
    _LIVE.where(
        sa.text("shards.requests = 1"), shards.c.first_index.between(sa.bindparam("first"), sa.bindparam("last"))
    ),
)
# Written out, because the indexes on failed and on accepted rows are only used for these very words.
_FAILED_INDEXES = (
    sa.select(completions.c.index)
    .distinct()
    .where(completions.c.batch_id == sa.bindparam("batch"), completions.c.index > sa.bindparam("after"))
    .where(sa.text("status = 'failed'"))
    .order_by(completions.c.index)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_HAS_ID = sa.and_(_IN_BATCH, requests.c.custom_id == sa.bindparam("custom_id"))
_ACCEPTED = sa.select(requests.c.index).where(_HAS_ID, sa.text("NOT rejected"))
_REFUSED = sa.select(requests.c.index).where(_HAS_ID).order_by(requests.c.index).limit(1)
