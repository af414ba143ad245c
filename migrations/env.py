"""Runs migrations, on the connection that `batchjobs.schema` hands over or on the database of BATCHJOBS_DATABASE_URL.

Either way they run inside one transaction, on SQLite too: a migration that fails leaves nothing behind.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from alembic import context
from alembic.ddl.base import AddColumn
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn, CreateTable

from batchjobs.database import Database
from batchjobs.errors import UsageError
from batchjobs.tables import metadata

if TYPE_CHECKING:
    from sqlalchemy import Connection

# SQLite has no COMMENT, but it keeps the text of CREATE TABLE: `.schema requests` then shows the comments.


@compiles(CreateColumn, "sqlite")
def _column_with_comment(create: CreateColumn, compiler: Any, **kw: Any) -> Any:
    column = compiler.visit_create_column(create, **kw)
    return f"{column} /* {create.element.comment} */" if column and create.element.comment else column


@compiles(AddColumn, "sqlite")
def _added_column_with_comment(add: AddColumn, compiler: Any, **kw: Any) -> str:
    specification = compiler.get_column_specification(add.column)
    return f"ALTER TABLE {add.table_name} ADD COLUMN {specification} /* {add.column.comment} */"


@compiles(CreateTable, "sqlite")
def _table_with_comment(create: CreateTable, compiler: Any, **kw: Any) -> str:
    statement: str = compiler.visit_create_table(create, **kw)
    return statement.replace("(", f"( /* {create.element.comment} */", 1) if create.element.comment else statement


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise UsageError("migrations need a database to look at; leave --sql out")

given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
elif "BATCHJOBS_DATABASE_URL" in os.environ:
    with Database(os.environ["BATCHJOBS_DATABASE_URL"]).writing() as own:
        _run(own)
else:
    raise UsageError("set BATCHJOBS_DATABASE_URL to the database to migrate")
