"""``batchjobs db`` and ``batchjobs sql``."""

from __future__ import annotations

import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import complain, out, out_json, print_table, say
from batchjobs.cli.options import Text, as_json, open_client, settings_of
from batchjobs.errors import UsageError
from batchjobs.folders import own_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchjobs.settings import Settings

_TABLE_ROWS = 1000


@click.group("db", invoke_without_command=False)
def db_command() -> None:
    """Create and check the database's tables.

    An empty database and any SQLite file are brought up to date by themselves; `upgrade` is for PostgreSQL servers.
    """


@db_command.command("upgrade", short_help="Bring the tables to the newest revision.")
@click.pass_context
def upgrade_command(ctx: click.Context) -> None:
    """Bring the tables to the newest revision; safe to run again, and at the same time."""
    from batchjobs import schema

    settings = _prepared(ctx)
    before = schema.current(settings.store_url)
    schema.upgrade(settings.store_url)
    after = schema.current(settings.store_url)
    say(f"the database is at revision {after}" + ("" if before == after else f" (was {before or 'empty'})"))


@db_command.command("current")
@as_json
@click.pass_context
def current_command(ctx: click.Context, as_json: bool) -> None:
    """Print the database's revision and the newest one."""
    from batchjobs import schema

    found, newest = schema.current(_prepared(ctx).store_url), schema.head()
    if as_json:
        out_json({"current": found, "head": newest})
    else:
        out(found or "none")
        if found != newest:
            say(f"the newest revision is {newest}; run `batchjobs db upgrade`")


@db_command.command("check", short_help="Compare the tables with what this version expects.")
@as_json
@click.pass_context
def check_command(ctx: click.Context, as_json: bool) -> int:
    """Compare the database with what this version expects; exit code 1 when they differ."""
    from batchjobs import schema

    differences = schema.check(_prepared(ctx).store_url)
    if as_json:
        out_json({"ok": not differences, "differences": differences})
    else:
        for difference in differences:
            out(difference)
        if not differences:
            say("the database is as it should be")
    if differences:
        complain("the database differs; `batchjobs db upgrade` brings it up to date")
    return 1 if differences else 0


def _prepared(ctx: click.Context) -> Settings:
    """The settings, with the folder of an embedded database in place."""
    settings = settings_of(ctx)
    if settings.database_url is None:
        own_folder(settings.home)
    return settings


@click.command("sql")
@click.argument("query", type=Text())
@click.option("--limit", type=click.IntRange(1), help=f"Rows at most; default: {_TABLE_ROWS:,} in a table, else all.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV on stdout, with a line of names.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 10**6),
    default=60.0,
    help="Seconds the database may take until the next rows; default: 60.",
)
@as_json
@click.pass_context
def sql_command(ctx: click.Context, query: str, limit: int | None, as_csv: bool, timeout: float, as_json: bool) -> None:
    """Run QUERY against the database, which cannot change anything.

    QUERY is a statement, @FILE for one in a file, or - for one on standard input. For instance:

    batchjobs sql "select status, count(*) from completions group by status"
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other; choose one")
    query = _statement(query)
    in_a_table = not as_csv and not as_json
    # One row more than is shown tells whether there are more.
    shown = limit or (_TABLE_ROWS if in_a_table else None)
    with open_client(ctx) as client:
        columns, rows = client.store.select(query, shown + 1 if shown else None, timeout_seconds=timeout)
        if in_a_table:
            print_table(columns, list(islice(rows, shown)))
        else:
            (_write_csv if as_csv else _write_json)(columns, islice(rows, shown))
        is_cut = next(rows, None) is not None
    if is_cut and in_a_table:
        say(f"only the first {shown:,} rows; --limit shows more")


def _statement(given: str) -> str:
    """The query itself, or what the file or standard input holds."""
    if given != "-" and not given.startswith("@"):
        return given
    try:
        return sys.stdin.buffer.read().decode() if given == "-" else Path(given[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{given.removeprefix('@')}: the query is not valid UTF-8") from None
    except OSError as error:
        raise UsageError(f"{given[1:]}: {error.strerror}; name a file that holds one query") from None


def _write_json(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from batchjobs.results import json_line

    names = _distinct(columns)
    for row in rows:
        sys.stdout.buffer.write(json_line(dict(zip(names, row, strict=True))) + b"\n")
    sys.stdout.buffer.flush()


def _write_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from batchjobs.cli.csv_rows import CsvRows

    written = CsvRows(sys.stdout.buffer)
    for row in chain([columns], rows):
        written.write(row)
    sys.stdout.buffer.flush()


def _distinct(names: Sequence[str]) -> list[str]:
    """Two columns of one name would be one key."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    if len(seen) == len(names):
        return list(names)
    return [f"{name}_{number}" if seen[name] > 1 else name for number, name in enumerate(names, 1)]
