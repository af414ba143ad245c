"""``batchjobs trace``: the running and drawing itself is in ``workers.trace``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from batchjobs.cli.console import complain, rich_console, say
from batchjobs.cli.options import OutputFile, defaults_from, engine_options, model, sampling_defaults, settings_of
from batchjobs.cli.worker import chosen_model, engine_config
from batchjobs.text import plural

if TYPE_CHECKING:
    from batchjobs.sampling_fields import Defaults
    from batchjobs.types import Request
    from workers.trace import Trace

SHOWN_FAILURES = 20
FAILED = 5


@click.command("trace")
@click.argument("file", required=False, type=click.Path(allow_dash=True))
@model
@click.option("--explain", is_flag=True, help="Draw the steps; done without -o anyway.")
@click.option("--steps", type=click.IntRange(1), default=12, help="Steps to draw at most; default: 12.")
@click.option("-o", "--output", "target", type=OutputFile(), help="Trace-event JSON to write, for ui.perfetto.dev.")
@click.option("--force", is_flag=True, help="Replace an existing output file.")
@sampling_defaults
@engine_options
@click.pass_context
def trace_command(
    ctx: click.Context, /, file: str | None, explain: bool, steps: int, target: Path | None, force: bool, **options: Any
) -> int:
    """Run the prompts of FILE, or a few built-in ones, and show what the engine does in each step.

    The picture shows the tokens of each packed step, which keys each of them sees, and who came and left. With -o, the
    same becomes a timeline. Nothing is queued or stored. Without FILE the engine is a very small one, so that there is
    something to see; engine options change it. Exit code 5 when some requests failed.
    """
    is_written = ctx.get_parameter_source("target") is not ParameterSource.DEFAULT
    explain = explain or not is_written
    _check_output(target, is_written, explain, force, file)
    defaults = defaults_from(options)
    settings = settings_of(ctx, **options)
    requests = None if file is None else read_requests(file, defaults)
    name = chosen_model(settings.model)
    try:
        from workers.trace import DEMO_SETTINGS, trace

        small = DEMO_SETTINGS if file is None else {}
        config = engine_config(settings, **{n: v for n, v in small.items() if settings.sources[n] == "default"})
        made = trace(name, config, requests, pictures=steps if explain else None, whole=is_written)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"tracing needs the Python package {error.name}; install it with `pip install 'batchjobs[worker]'`"
        ) from None
    if explain:
        _draw(made, steps)
    if is_written:
        _write(made, target, force)
    return _judged(made)


def _check_output(target: Path | None, is_written: bool, explain: bool, force: bool, file: str | None) -> None:
    from batchjobs.cli.files import check_target

    if is_written and target is None and explain:
        raise click.UsageError("the picture and the JSON cannot both go to standard output; name a file with -o")
    if target is not None:
        check_target(target, force=force, inputs=() if file in (None, "-") else (Path(str(file)),))


def read_requests(file: str, defaults: Defaults) -> list[Request]:
    """All requests of a file. Raises InvalidInput with every bad line."""
    from batchjobs.cli.submit import open_inputs
    from batchjobs.errors import InvalidInput, LineError, UsageError
    from batchjobs.inputs import numbered_lines
    from batchjobs.jsonl import InvalidLineError, parse_line

    requests: list[Request] = []
    errors: list[LineError] = []
    lines: dict[str, int] = {}  # custom_id -> line
    (source,) = open_inputs([file])
    with closing(source):
        for index, (_, line_no, raw) in enumerate(numbered_lines([source])):
            try:
                request = parse_line(raw, line_no, index, defaults)
            except InvalidLineError as problem:
                errors.append(problem.error)
                continue
            first = lines.setdefault(request.custom_id, line_no)
            if first != line_no:
                message = f'custom_id "{request.custom_id}" was used before, on line {first}'
                errors.append(LineError(line_no, message, "custom_id", request.custom_id, "duplicate_custom_id"))
            requests.append(request)
    if errors:
        raise InvalidInput(source.name or "the input", errors)
    if not requests:
        raise UsageError(f"no requests in {source.name}")
    return requests


def _draw(made: Trace, steps: int) -> None:
    from workers.explain import explain
    from workers.grid import MIN_WIDTH, WIDTH

    console = rich_console()
    view = made.view(console.encoding, max(MIN_WIDTH, min(WIDTH, console.width)))
    console.print(made.opening(), soft_wrap=True)
    for line in explain(made.log, view, pictures=steps):
        console.print(line, soft_wrap=True)
    console.print(f"\n{made.summary()}", soft_wrap=True)


def _write(made: Trace, target: Path | None, force: bool) -> None:
    from batchjobs.cli.files import output
    from workers.timeline import timeline

    with output(target, new=not force) as stream:
        for piece in timeline(made.log, process=made.engine.model_name):
            stream.write(piece)
    if target is not None:
        say(f"wrote {target}; open it at https://ui.perfetto.dev, which reads it in your browser")


def _judged(made: Trace) -> int:
    for custom_id, error in list(made.failures.items())[:SHOWN_FAILURES]:
        complain(f"request {custom_id} failed: {error.code}: {error.message}")
    if len(made.failures) > SHOWN_FAILURES:
        say(f"... and {plural(len(made.failures) - SHOWN_FAILURES, 'more failed request')}")
    return FAILED if made.failures else 0
