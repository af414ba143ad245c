"""``batchjobs submit``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import complain, out, out_json, out_line_errors, print_line_errors, say
from batchjobs.cli.options import Text, as_json, defaults_from, model, model_version, open_client, sampling_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.client import Client
    from batchjobs.inputs import Input
    from batchjobs.submission import Plan, Submission


@click.command("submit")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@model
@model_version
@click.option("--name", type=Text(), help="Name shown in lists; default: the file's.")
@click.option("--queue", type=click.Choice(["high", "default", "low"]), help="Priority; default: the setting.")
@click.option("--key", type=Text(), help="The same key with the same content gives the same batch, not a second one.")
@click.option(
    "--on-invalid",
    type=click.Choice(["reject", "skip"]),
    default="reject",
    help="reject (default): one bad line refuses all. skip: bad lines become failed requests.",
)
@click.option("--shard-size", type=click.IntRange(1, 100_000), help="Requests in one entry of the queue.")
@sampling_defaults
@click.option("--wait", is_flag=True, help="Return when the batch has ended.")
@click.option("--follow", is_flag=True, help="Like --wait, showing on stderr what `follow` does.")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most; then exit code 124.")
@as_json
@click.pass_context
def submit_command(ctx: click.Context, /, files: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Store the prompts of FILE... (or - for standard input) as one batch, queue it, and print its id.

    Files hold one JSON object a line, plain or in OpenAI Batch form; gzip is unpacked. The options about sampling
    apply to lines that say nothing themselves.
    """
    from batchjobs.errors import InvalidInput, UsageError
    from batchjobs.models import asked_for
    from batchjobs.submission import Plan

    wait, follow, timeout = options.pop("wait"), options.pop("follow"), options.pop("timeout")
    if timeout is not None and not (wait or follow):
        raise click.UsageError("--timeout needs --wait or --follow")
    if options["key"] == "":
        raise UsageError("--key must not be empty; leave it out for a batch without a key")
    defaults = defaults_from(options)
    inputs = open_inputs(files)
    with open_client(ctx, model=options["model"], queue=options["queue"], shard_size=options["shard_size"]) as client:
        plan = Plan(
            model=asked_for(client.settings.model),
            name=options["name"] or _name_from(files),
            queue=client.settings.queue,
            key=options["key"],
            skip_invalid=options["on_invalid"] == "skip",
            shard_size=client.settings.shard_size,
            defaults=defaults,
        )
        try:
            made = store_and_queue(client, inputs, plan)
        except InvalidInput as error:
            if not as_json:
                raise
            out_line_errors(error.errors)
            complain(str(error))
            return error.exit_code
        _print(made, as_json)
        if follow:
            from batchjobs.cli.follow import follow_and_judge

            return follow_and_judge(client, made.batch_id, timeout)
        if wait:
            from batchjobs.cli.status import wait_and_judge

            return wait_and_judge(client, made.batch_id, timeout, quiet=True)
    return 0


def open_inputs(files: Sequence[str]) -> list[Input]:
    """The inputs behind the command's file names, each of which must be readable."""
    from batchjobs.errors import UsageError
    from batchjobs.inputs import StreamInput, open_source

    if files.count("-") > 1:
        raise UsageError("standard input (-) can be read only once")
    return [StreamInput(sys.stdin.buffer, "standard input") if file == "-" else open_source(file) for file in files]


def store_and_queue(client: Client, inputs: Sequence[Input], plan: Plan) -> Submission:
    """Submits, with progress for long inputs, and says on stderr what the user should know."""
    from batchjobs.cli.counting import counting
    from batchjobs.models import short_name
    from batchjobs.submission import submit

    with counting("requests stored") as progress:
        made = submit(client.store, lambda: client.queue, inputs, plan, progress)
    if made.warning is not None:
        say(f"warning: {made.warning}")
    if made.invalid:
        print_line_errors(made.errors)
        say(f"{made.invalid:,} of {made.requests:,} lines were invalid; they are failed requests of the batch")
    if made.line_model is not None and made.line_model != plan.model:
        runs = f"the batch runs on {short_name(plan.model)}" if plan.model else "the batch runs on the worker's model"
        say(f'note: the lines name the model "{made.line_model}"; {runs}')
    return made


def _name_from(files: Sequence[str]) -> str | None:
    from pathlib import Path

    return None if files[0] == "-" else Path(files[0]).name + ("" if len(files) == 1 else f" and {len(files) - 1} more")


def _print(made: Submission, as_json: bool) -> None:
    if not as_json:
        out(made.batch_id)
        return
    out_json(
        {
            "id": made.batch_id,
            "created": made.created,
            "requests": made.requests,
            "invalid": made.invalid,
            "queued": made.warning is None,
        }
    )
