"""``batchjobs results``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import say
from batchjobs.cli.files import (
    check_target,
    is_replaced,
    output,
    refuse_existing,
    refuse_inputs,
    refuse_open_database,
    refuse_twice,
    replacing,
)
from batchjobs.cli.options import NamedFile, open_client, output_options
from batchjobs.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    from batchjobs.cli.formats import Written
    from batchjobs.client import Client


@click.command("results")
@click.argument("batch")
@output_options
@click.option("--follow", is_flag=True, help="Go on until the batch has ended; each line comes as soon as it can.")
@click.option(
    "--sqlite",
    "database",
    type=NamedFile("a database needs a file of its own"),
    help="Copy the batch into this SQLite file, for tools that read such files.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.pass_context
def results_command(
    ctx: click.Context,
    batch: str,
    form: str,
    target: Path | None,
    errors: Path | None,
    force: bool,
    follow: bool,
    database: Path | None,
    as_json: bool,
) -> int:
    """Write the answers of BATCH, in input order; while it runs, those of the requests that have ended.

    Output files are written whole or not at all. Requests that did not complete are lines like the others, or go into
    the file named by --errors.

    With --follow, lines come until the batch has ended, in input order all the same; a file named by -o is there at the
    end. Exit codes are then those of `wait`.
    """
    form = "jsonl" if as_json else form
    if database is not None:
        _check_database(ctx, database)
    check_output(form, target, errors, follow=follow)
    with open_client(ctx) as client:
        info = client.store.batch(batch)
        for path in filter(None, (target, errors, database)):
            _check_owners(client, batch, path)
            if not force:
                refuse_existing(path)
        if follow:
            return _follow(client, batch, form, target, errors, new=not force)
        if database is not None:
            with replacing(database, new=not force) as part:
                client.store.extract_batch(batch, part)
        else:
            write_results(client, batch, form, target, errors, new=not force)
    if not info.status.is_final:
        left = info.counts.total - info.counts.done
        say(f"note: the batch is {info.status}; {plural(left, 'request')} had not ended")
    return 0


def _check_database(ctx: click.Context, database: Path) -> None:
    from batchjobs.errors import UsageError

    default = click.core.ParameterSource.DEFAULT
    for name, option in (
        ("form", "--format"),
        ("as_json", "--json"),
        ("target", "--output"),
        ("errors", "--errors"),
        ("follow", "--follow"),
    ):
        if ctx.get_parameter_source(name) is not default:
            raise UsageError(f"--sqlite writes all of the batch into its own file; leave out {option}")
    check_target(database, force=True)
    if not is_replaced(database):
        raise UsageError(f"{database} is no plain file; a database needs one")
    refuse_open_database(database)


def check_output(
    form: str,
    target: Path | None,
    errors: Path | None,
    *,
    inputs: Iterable[Path] = (),
    follow: bool = False,
) -> None:
    """Raises UsageError when the output options do not fit each other, or nothing can be written there. Files may
    exist: whether they may be replaced is looked at when it is known what they are."""
    from batchjobs.errors import UsageError

    if form == "table":
        if target is not None:
            raise UsageError("--format table is for the screen; write jsonl, csv or parquet to a file")
        if errors is not None:
            raise UsageError("--format table is for the screen and shows failures too; leave out --errors")
        if follow:
            raise UsageError("--format table needs all rows to fit its columns; use --follow with jsonl, openai or csv")
    if form == "parquet":
        _check_parquet(target)
    if errors is not None:
        refuse_twice(target, errors)
    for path in (target, errors):
        if path is not None:
            check_target(path, force=True, inputs=inputs)


def _check_parquet(target: Path | None) -> None:
    from batchjobs.cli.parquet import require_pyarrow
    from batchjobs.errors import UsageError

    require_pyarrow()
    if target is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("--format parquet is not for the screen; name a file with --output, or send it to a pipe")


def _check_owners(client: Client, batch_id: str, path: Path) -> None:
    """Raises UsageError where it would be written over what the batch was made from, or over the database."""
    refuse_inputs(path, [Path(name) for name in client.store.batch_source_files(batch_id)])
    refuse_database(client, path)


def refuse_database(client: Client, path: Path) -> None:
    """Raises UsageError where it would be written over the database."""
    refuse_inputs(path, [Path(name) for name in client.store.own_files()], "the database of batchjobs")


def write_results(
    client: Client,
    batch_id: str,
    form: str,
    target: Path | None,
    errors: Path | None,
    *,
    keep_equal: bool = False,
    new: bool = False,
) -> None:
    """Streams the finished requests of a batch to where they shall go; options as for
    :func:`batchjobs.cli.files.output`."""
    from batchjobs.cli.formats import write

    with _outputs(target, errors, keep_equal=keep_equal, new=new) as (stream, failures):
        written = write(client.store.results(batch_id), form, stream, failures)
    _note_left_out(written)


def _follow(client: Client, batch_id: str, form: str, target: Path | None, errors: Path | None, *, new: bool) -> int:
    """The same until the batch has ended. Returns its exit code."""
    from batchjobs.cli.formats import write
    from batchjobs.cli.live_results import Watch
    from batchjobs.cli.status import judge
    from batchjobs.following import follow_results

    with _outputs(target, errors, new=new) as (stream, failures):
        watch = Watch(client, stream)
        written = write(follow_results(client.store, batch_id, seen=watch), form, stream, failures, flush=True)
    _note_left_out(written)
    return judge(client, watch.info)


@contextlib.contextmanager
def _outputs(target: Path | None, errors: Path | None, **options: bool) -> Iterator[tuple[BinaryIO, BinaryIO | None]]:
    """Where answers go, and where failures do if that is elsewhere."""
    with contextlib.ExitStack() as files:
        stream = files.enter_context(output(target, **options))
        failures = files.enter_context(output(errors, **options)) if errors is not None else None
        yield stream, failures


def _note_left_out(written: Written) -> None:
    if written.left_out:
        say(f"note: {plural(written.left_out, 'request')} without an answer left out; --errors FILE writes them")
