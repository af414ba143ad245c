"""Statements below SQLAlchemy, and inserts: many rows at once by executemany on SQLite and COPY on PostgreSQL, and
single ones that may be there."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Delete, Dialect, Select, Table
    from sqlalchemy.engine import Connection


class ConflictError(Exception):
    """A row of that key is there already. The transaction is of no more use."""


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Inserts rows that are not there yet, with a value for every column, JSON and instants as text.

    Nothing is skipped on a conflict: callers look first what is there, under a lock that keeps it so.

    Raises:
        ConflictError: A row meets a unique constraint.
    """
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        _insert_many(connection, table, rows)
    else:
        _copy(connection, table, rows)


def _insert_many(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    try:
        connection.exec_driver_sql(_insert_statement(table), list(rows))
    except IntegrityError as error:
        raise ConflictError from error


def _copy(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    from psycopg.errors import UniqueViolation

    driver = connection.connection.driver_connection
    assert driver is not None
    try:
        with driver.cursor() as cursor, cursor.copy(_copy_statement(table)) as copy:
            for row in rows:
                copy.write_row(row)
    except UniqueViolation as error:
        raise ConflictError from error


def insert_if_new(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """INSERT … ON CONFLICT DO NOTHING."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return postgresql.insert(table).on_conflict_do_nothing()


def upsert(connection: Connection, table: Table, row: dict[str, Any]) -> postgresql.Insert | sqlite.Insert:
    """INSERT … ON CONFLICT of the primary key DO UPDATE: the row as given, whatever was there."""
    key = [column.name for column in table.primary_key]
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).values(row).on_conflict_do_update(index_elements=key, set_=row)
    return postgresql.insert(table).values(row).on_conflict_do_update(index_elements=key, set_=row)


def run_each(connection: Connection, statement: Delete, parameters: Sequence[dict[str, Any]]) -> None:
    """Runs a statement with each of these parameters, texts and numbers alone, on the driver itself.

    For statements that take less time than SQLAlchemy's part of them.
    """
    driver = connection.connection.driver_connection
    assert driver is not None
    sql, names = _compiled(statement, connection.dialect)
    given = [tuple(each[name] for name in names) for each in parameters] if names else parameters
    with closing(driver.cursor()) as cursor:
        if len(given) == 1:
            cursor.execute(sql, given[0])
        else:
            cursor.executemany(sql, given)


def fetch_all(connection: Connection, statement: Select[Any], parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of a statement as the driver has them, likewise: parameters and columns are texts and numbers alone."""
    driver = connection.connection.driver_connection
    assert driver is not None
    sql, names = _compiled(statement, connection.dialect)
    with closing(driver.cursor()) as cursor:
        cursor.execute(sql, tuple(parameters[name] for name in names) if names else parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


@lru_cache
def _compiled(statement: Delete | Select[Any], dialect: Dialect) -> tuple[str, Sequence[str]]:
    """Its text, and the names of its parameters where they have places instead."""
    compiled = statement.compile(dialect=dialect)
    return str(compiled), compiled.positiontup or ()


@lru_cache
def _insert_statement(table: Table) -> str:
    columns, places = _columns(table), ", ".join("?" for _ in table.columns)
    return f"INSERT INTO {table.name} ({columns}) VALUES ({places})"  # noqa: S608 - our own names


@lru_cache
def _copy_statement(table: Table) -> str:
    return f"COPY {table.name} ({_columns(table)}) FROM STDIN"


def _columns(table: Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)
