"""``batchjobs validate``: a dry run of ``submit``, and what the prompts would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import complain, out_json, print_line_errors, say
from batchjobs.cli.options import (
    as_json,
    defaults_from,
    engine_options,
    model,
    model_version,
    sampling_defaults,
    settings_of,
)
from batchjobs.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.errors import LineError
    from batchjobs.inputs import Input
    from batchjobs.settings import Settings
    from batchjobs.submission import Loader, Plan
    from batchjobs.validation import Inspection, Listener
    from workers.speed import Sample, Speed
    from workers.token_count import TokenCount

MEASURED_SECONDS = 30.0
_SHOWN_CUTS = 10


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@model
@model_version
@click.option("--lines-only", is_flag=True, help="Check the lines alone; load no tokenizer.")
@click.option(
    "--throughput",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Generated tokens per second of all workers together, to tell the time that it takes.",
)
@click.option(
    "--measure", is_flag=True, help="Answer a sample of the requests here, for 30 s at most, to tell the time."
)
@sampling_defaults
@engine_options
@as_json
@click.pass_context
def validate_command(
    ctx: click.Context,
    /,
    files: tuple[str, ...],
    lines_only: bool,
    throughput: float | None,
    measure: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Check the prompts of FILE... (or - for standard input) as `submit` would, without storing anything.

    Errors are those that `submit` would give, with its exit code 2. With a model, of which only the tokenizer and the
    configuration are loaded, the prompts' tokens are counted exactly, and requests that a worker would refuse are named
    too. Neither Redis nor the database is needed. The engine options are those of the workers.
    """
    from batchjobs.cli.submit import open_inputs
    from batchjobs.models import asked_for
    from batchjobs.submission import Plan

    _refuse_contradictions(lines_only, throughput, measure)
    defaults = defaults_from(options)
    settings = settings_of(ctx, **options)
    inputs = open_inputs(files)
    _check_readable(files)
    run = _DryRun(settings, lines_only, measure)
    found = run.inspect(inputs, Plan(model=asked_for(settings.model), defaults=defaults))
    speed = run.measured(found)
    report = run.report(found, [source.name for source in inputs], throughput, speed)
    refused = run.refused_lines(found.loader)
    if as_json:
        out_json({**report, "refused": [_as_object(error) for error in refused]})
    return _judge(found, run.counted, report, refused, as_json)


class _DryRun:
    """One run of the command: the inspection of the lines, and whoever listens to it."""

    def __init__(self, settings: Settings, lines_only: bool, measure: bool) -> None:
        self.settings = settings
        self.notes: list[str] = []
        self.counted: TokenCount | None = None if lines_only else self._token_count()
        self._sample: Sample | None = None
        if measure:
            from batchjobs.errors import UsageError

            if self.counted is None:
                raise UsageError(f"--measure needs a model: {self.notes[0]}")
            from workers.speed import Sample

            self._sample = Sample()

    def inspect(self, inputs: Sequence[Input], plan: Plan) -> Inspection:
        from batchjobs.cli.counting import counting
        from batchjobs.validation import inspect

        with counting("lines checked") as progress:
            return inspect(inputs, plan, progress, self._listeners)

    def measured(self, found: Inspection) -> Speed | None:
        """Loads the model and answers the sample, if that was asked for and the batch could run."""
        if self._sample is None or not self._sample.requests:
            return None
        if found.refusal is not None:
            self.notes.append("nothing was measured: mend the lines first")
            return None
        from batchjobs.cli.worker import engine_config
        from workers.engine import Engine
        from workers.speed import measure

        name = self._source()
        sample = plural(len(self._sample.requests), "request")
        say(f"loading the model and answering {sample} of the input for {MEASURED_SECONDS:.0f} s at most, to measure")
        engine = Engine(name, engine_config(self.settings), revision=self.settings.revision)
        try:
            speed = measure(engine, self._sample.requests, MEASURED_SECONDS)
        finally:
            engine.close()
        if speed is None:
            self.notes.append("no speed was measured: none of these requests makes a token")
        return speed

    def report(
        self, found: Inspection, names: Sequence[str | None], throughput: float | None, speed: Speed | None
    ) -> dict[str, Any]:
        from batchjobs.cli.validation_report import lines_report, measured_time, stated_time, tokens_report

        report = lines_report(found, names)
        counted = self.counted
        if counted is not None:
            report |= tokens_report(counted, found.loader)
        if throughput is not None:
            most = found.asked.max_tokens if counted is None else counted.answer_tokens
            report["time"] = stated_time(most, throughput)
        elif speed is not None and counted is not None:
            report["time"] = measured_time(counted, speed)
        return {**report, "notes": [*self.notes, *self._late_notes(found)]}

    def refused_lines(self, loader: Loader) -> list[LineError]:
        """Lines that `submit` takes and a worker would refuse."""
        from batchjobs.errors import LineError

        lines = []
        for refusal in self.counted.refusals if self.counted is not None else ():
            source, line = loader.place_of(refusal.index)
            lines.append(LineError(line, refusal.message, None, refusal.custom_id, refusal.code, source))
        return lines

    def _listeners(self, loader: Loader) -> Sequence[Listener]:
        return [listener.add for listener in (self.counted, self._sample) if listener is not None]

    def _token_count(self) -> TokenCount | None:
        from batchjobs.models import bundled_model

        settings = self.settings
        if settings.model is None and bundled_model() is None:
            self.notes.append("no model is named, so no tokens were counted; --model names one")
            return None
        try:
            from workers.model_outline import read_outline
            from workers.token_count import TokenCount
        except ModuleNotFoundError as error:
            self.notes.append(
                f"no tokens were counted: that needs the Python package {error.name}; "
                "install it with `pip install 'batchjobs[worker]'`"
            )
            return None
        outline = read_outline(self._source(), device=settings.device, dtype=settings.dtype, revision=settings.revision)
        return TokenCount(
            outline,
            page_size=settings.page_size,
            num_blocks=settings.num_blocks,
            together=settings.max_requests_per_batch,
            chunk=settings.max_batch_tokens or 2048,
        )

    def _source(self) -> str:
        from batchjobs.models import resolve_model

        return resolve_model(self.settings.model)

    def _late_notes(self, found: Inspection) -> list[str]:
        from batchjobs.models import short_name

        named, asked = found.loader.line_model, self.settings.model
        if named is None or named == asked:
            return []
        runs = f"the batch would run on {short_name(asked)}" if asked else "the batch would run on the worker's model"
        return [f'the lines name the model "{named}"; {runs}']


def _refuse_contradictions(lines_only: bool, throughput: float | None, measure: bool) -> None:
    if measure and throughput is not None:
        raise click.UsageError("--throughput states a speed and --measure finds it; give one of them")
    if measure and lines_only:
        raise click.UsageError("--measure needs the model, which --lines-only leaves alone")


def _check_readable(files: Sequence[str]) -> None:
    """Before the tokenizer is loaded, which takes seconds. Raises UsageError."""
    from pathlib import Path

    from batchjobs.jsonl import open_input

    for file in files:
        if file != "-" and (Path(file).is_file() or not Path(file).exists()):
            open_input(file).close()


def _as_object(error: LineError) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(error)


def _judge(
    found: Inspection, counted: TokenCount | None, report: dict[str, Any], refused: Sequence[LineError], as_json: bool
) -> int:
    """Says what the user should know, and returns the exit code."""
    if not as_json:
        _print(found, report, refused)
    code = 0
    if found.refusal is not None:
        complain(str(found.refusal))
        code = found.refusal.exit_code
    if counted is not None and counted.refused:
        requests = plural(counted.refused, "request")
        complain(f"{requests} would fail with {counted.outline.name}; mend the lines, or choose another model")
        code = code or 2
    return code


def _print(found: Inspection, report: dict[str, Any], refused: Sequence[LineError]) -> None:
    from batchjobs.cli.validation_report import cut_line, print_report

    if found.lines:
        print_report(report)
    for note in report["notes"]:
        say(f"note: {note}")
    cuts = report.get("cut_answers", {"count": 0, "at": []})
    for cut in cuts["at"][:_SHOWN_CUTS]:
        say(f"warning: {cut_line(cut)}")
    if cuts["count"] > _SHOWN_CUTS:
        say(f"... and {cuts['count'] - _SHOWN_CUTS:,} more; --json names them")
    if found.refusal is not None:
        print_line_errors(found.errors)
    print_line_errors(refused)
