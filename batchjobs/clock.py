"""The clock of the database, in SQL. Leases compare with it alone, so that hosts whose clocks differ agree on them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from batchjobs.tables import Instant


class database_seconds(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it stands for
    """Seconds since 1970 at this moment, not at the begin of the transaction, which may have waited for a lock."""

    type = Double()
    inherit_cache = True


class database_instant(FunctionElement[datetime]):  # noqa: N801
    """The same moment as an instant."""

    type = Instant()
    inherit_cache = True


@compiles(database_seconds, "postgresql")
def _seconds_postgresql(element: database_seconds, compiler: Any, **kw: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


# unixepoch('subsec') is NULL before SQLite 3.42; julianday is right to about 40 microseconds.
@compiles(database_seconds, "sqlite")
def _seconds_sqlite(element: database_seconds, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_instant, "postgresql")
def _instant_postgresql(element: database_instant, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


# SQLite knows milliseconds; the zeros keep all texts at one length, which their order needs.
@compiles(database_instant, "sqlite")
def _instant_sqlite(element: database_instant, compiler: Any, **kw: Any) -> str:
    return "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')"
