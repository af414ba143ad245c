"""Runs the migrations and compares a database with the tables that this version expects.

Revisions are numbered (0001, 0002, …), and the file of a revision begins with its number: so the newest one is known
without loading alembic, which would cost every start of every command.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.database import Database
from batchjobs.errors import BatchjobsError
from batchjobs.tables import VIEWS, metadata

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_UPGRADE_LOCK = 0x62617463  # any number, the same in all processes
_one_at_a_time = threading.Lock()  # alembic keeps its context in globals


def head() -> str:
    """The newest revision that this version knows."""
    return max(_revisions())


def current(store_url: str) -> str | None:
    """The revision of the database, None for one without batchjobs."""
    database = Database(store_url)
    try:
        return revision_of(database)
    finally:
        database.close()


def upgrade(store_url: str) -> None:
    """Brings the database to :func:`head`. Several processes may do so at once; one works, the others wait."""
    database = Database(store_url)
    try:
        upgrade_database(database)
    finally:
        database.close()


def check(store_url: str) -> list[str]:
    """What differs between the database and the tables of this version, as sentences; empty when nothing does."""
    database = Database(store_url)
    try:
        found = revision_of(database)
        stale = [] if found == head() else [f"revision {found or 'none'} instead of {head()}"]
        with database.reading() as connection:
            return stale + _differences(connection)
    finally:
        database.close()


def prepare(database: Database) -> None:
    """Makes the tables in an empty database, and upgrades any SQLite file; a server's owner is asked to do so.

    Raises:
        BatchjobsError: The database is older than this version and not ours to change, or newer.
    """
    if revision_of(database) == head():
        return
    # In this order: another process may make the tables in between, and then has made them with their revision.
    is_empty = _is_empty(database)
    found = revision_of(database)
    if found == head():
        return
    if found is not None and found not in _revisions():
        raise BatchjobsError(
            f"{database.place} was made by a newer version of batchjobs (revision {found}, known here up to {head()});"
            " upgrade batchjobs"
        )
    if not database.is_sqlite and not is_empty:
        raise BatchjobsError(
            f"{database.place} is at revision {found or 'none'} and this version needs {head()};"
            " run `batchjobs db upgrade`"
        )
    upgrade_database(database)


def revision_of(database: Database) -> str | None:
    with database.reading() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return revision


def upgrade_database(database: Database) -> None:
    from alembic import command

    # The first to come upgrades; the others find nothing left to do once they hold the lock.
    with _one_at_a_time, database.writing() as connection:
        if not database.is_sqlite:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
        config = _alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _is_empty(database: Database) -> bool:
    with database.reading() as connection:
        return not sa.inspect(connection).get_table_names()


def _migrations() -> Path:
    packaged = Path(__file__).parent / "_migrations"
    checkout = Path(__file__).parent.parent / "migrations"
    for folder in (packaged, checkout):
        if (folder / "versions").is_dir():
            return folder
    raise BatchjobsError("the migrations of batchjobs are missing; install batchjobs again")


def _revisions() -> list[str]:
    return [file.name.split("_")[0] for file in (_migrations() / "versions").glob("[0-9]*_*.py")]


def _alembic_config() -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    return config


def _differences(connection: Connection) -> list[str]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts={"compare_type": True})
    found = [_sentence(difference) for difference in compare_metadata(context, metadata)]
    inspector = sa.inspect(connection)
    present = set(inspector.get_view_names())
    for view in VIEWS:
        if view.name not in present:
            found.append(f"missing view {view.name}")
            continue
        columns = {column["name"] for column in inspector.get_columns(view.name)}
        expected = {column.name for column in view.columns}
        found.extend(f"missing column {view.name}.{name}" for name in sorted(expected - columns))
        found.extend(f"unknown column {view.name}.{name}" for name in sorted(columns - expected))
    return found


def _sentence(difference: Any) -> str:
    if isinstance(difference, list):  # several changes of one column
        return "; ".join(_sentence(each) for each in difference)
    action, *subjects = difference
    return f"{action.replace('_', ' ')}: {', '.join(str(subject) for subject in subjects if subject is not None)}"
