"""``batchjobs db`` and ``batchjobs sql``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import complain, out, out_json, print_table, say
from batchjobs.cli.options import Text, as_json, open_client, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.settings import Settings

_TABLE_ROWS = 1000


@click.group("db", invoke_without_command=False)
def db_command() -> None:
    """Create and check the database's tables.

    An empty database and any SQLite file are brought up to date by themselves; `upgrade` is for PostgreSQL servers.
    """


@db_command.command("upgrade")
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


@db_command.command("check")
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
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return settings


@click.command("sql")
@click.argument("query", type=Text())
@click.option(
    "--limit", type=click.IntRange(1), help=f"Rows at most; default: {_TABLE_ROWS:,} in a table, all as JSON."
)
@as_json
@click.pass_context
def sql_command(ctx: click.Context, query: str, limit: int | None, as_json: bool) -> None:
    """Run QUERY against the database, which cannot change anything.

    For instance: batchjobs sql "select status, count(*) from completions group by status"
    """
    with open_client(ctx) as client:
        if as_json:
            columns, rows = client.store.select(query, limit)
            names = _distinct(columns)
            for row in rows:
                out_json(dict(zip(names, row, strict=True)))
            return
        # One row more than is shown tells whether there are more.
        shown = limit or _TABLE_ROWS
        columns, rows = client.store.select(query, shown + 1)
        found = list(rows)
    print_table(columns, found[:shown])
    if len(found) > shown:
        say(f"only the first {shown:,} rows; --limit shows more")


def _distinct(names: Sequence[str]) -> list[str]:
    """Two columns of one name would be one key."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    if len(seen) == len(names):
        return list(names)
    return [f"{name}_{number}" if seen[name] > 1 else name for number, name in enumerate(names, 1)]
