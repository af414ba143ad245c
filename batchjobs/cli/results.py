"""``batchjobs results``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import say
from batchjobs.cli.files import check_target, output
from batchjobs.cli.options import open_client, output_options
from batchjobs.text import plural

if TYPE_CHECKING:
    from pathlib import Path

    from batchjobs.client import Client


@click.command("results")
@click.argument("batch")
@output_options
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@click.pass_context
def results_command(
    ctx: click.Context, batch: str, form: str, target: Path | None, errors: Path | None, force: bool, as_json: bool
) -> None:
    """Write the answers of BATCH, in input order; while it runs, those of the requests that have ended.

    Output files are written whole or not at all. Failed requests are lines like the others, except in the openai form,
    where they go into the file named by --errors.
    """
    form = "jsonl" if as_json else form
    check_output(form, target, errors, force=force)
    with open_client(ctx) as client:
        info = client.store.batch(batch)
        write_results(client, batch, form, target, errors)
    if not info.status.is_final:
        say(
            f"note: the batch is {info.status}; {plural(info.counts.total - info.counts.done, 'request')} had not ended"
        )


def check_output(
    form: str, target: Path | None, errors: Path | None, *, force: bool, inputs: tuple[Path, ...] = ()
) -> None:
    """Raises UsageError when the output options do not fit each other or the files that exist."""
    from batchjobs.errors import UsageError

    if form == "table" and target is not None:
        raise UsageError("--format table is for the screen; write jsonl or csv to a file")
    if errors is not None and form != "openai":
        raise UsageError("--errors goes with --format openai; the other forms keep failures among the answers")
    if errors is not None and target is not None and errors.absolute() == target.absolute():
        raise UsageError("--errors and --output name the same file")
    for path in (target, errors):
        if path is not None:
            check_target(path, force=force, inputs=inputs)


def write_results(
    client: Client, batch_id: str, form: str, target: Path | None, errors: Path | None, *, keep_equal: bool = False
) -> None:
    """Streams the finished requests of a batch to where they shall go."""
    from batchjobs.cli.formats import write

    with contextlib.ExitStack() as files:
        stream = files.enter_context(output(target, keep_equal=keep_equal))
        failures = files.enter_context(output(errors, keep_equal=keep_equal)) if errors is not None else None
        written = write(client.store.results(batch_id), form, stream, failures)
    if written.left_out:
        say(f"note: {plural(written.left_out, 'request')} without an answer left out; --errors FILE writes them")
