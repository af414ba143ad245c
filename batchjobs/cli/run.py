"""``batchjobs run``: submit, work and collect in one command that can be interrupted and run again."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import say
from batchjobs.cli.options import (
    defaults_from,
    engine_options,
    model,
    model_version,
    open_client,
    output_options,
    sampling_defaults,
    settings_of,
)
from batchjobs.text import plural

if TYPE_CHECKING:
    from batchjobs.client import Client
    from batchjobs.inputs import RereadableInput
    from batchjobs.submission import Plan
    from batchjobs.types import BatchInfo


@click.command("run")
@click.argument("file", type=click.Path(allow_dash=True))
@model
@model_version
@output_options
@click.option("--redo", is_flag=True, help="Answer everything anew, as a fresh batch.")
@click.option(
    "--on-invalid",
    type=click.Choice(["reject", "skip"]),
    default="reject",
    help="reject (default): one bad line refuses all. skip: bad lines become failed requests.",
)
@sampling_defaults
@engine_options
@click.pass_context
def run_command(ctx: click.Context, /, file: str, redo: bool, on_invalid: str, **options: Any) -> int:
    """Answer every prompt in FILE (or - for standard input) with one worker on this machine, and write the results.

    The batch is known by the file's content, the model and the sampling options. Interrupt the command whenever you
    like: the same command goes on where it stopped, and prints the results at once when there is nothing left to do.
    Exit code 5 when some requests failed.
    """
    from batchjobs.cli.results import check_output, refuse_database, write_results

    form, target, errors, force = (options.pop(name) for name in ("form", "target", "errors", "force"))
    defaults = defaults_from(options)
    # Output that exists is compared at the end: it may be what this same command wrote before.
    check_output(form, target, errors, inputs=() if file == "-" else (Path(file),))
    name = _model_name(ctx, options)
    with open_client(ctx, **{**options, "model": name}) as client, closing(_opened(file)) as source:
        for path in filter(None, (target, errors)):
            refuse_database(client, path)
        plan = _plan(name, file, client, defaults, on_invalid)
        try:
            info = _submitted(client, source, plan, redo, () if force else (target, errors))
            info = _answered(client, info)
        except KeyboardInterrupt:
            again = "the same command without --redo" if redo else "the same command"
            say(f"interrupted; {again} goes on where this one stopped")
            raise
        write_results(client, info.id, form, target, errors, keep_equal=not force)
        return _judged(client, info)


def _opened(file: str) -> RereadableInput:
    from batchjobs.cli.submit import open_inputs

    (source,) = open_inputs([file])
    with closing(source):
        return source.rereadable()


def _model_name(ctx: click.Context, options: dict[str, Any]) -> str:
    from batchjobs.cli.worker import chosen_model

    return chosen_model(settings_of(ctx, model=options.pop("model")).model)


def _plan(name: str, file: str, client: Client, defaults: Any, on_invalid: str) -> Plan:
    from batchjobs.submission import Plan
    from batchjobs.types import Priority

    return Plan(
        model=name,
        name=None if file == "-" else Path(file).name,
        queue=Priority.HIGH,
        skip_invalid=on_invalid == "skip",
        shard_size=client.settings.shard_size,
        defaults=defaults,
    )


def _submitted(
    client: Client, source: RereadableInput, plan: Plan, redo: bool, refuse_existing: tuple[Path | None, ...]
) -> BatchInfo:
    """The batch that this content, model and sampling stand for: found, finished or made."""
    from batchjobs.cli.submit import store_and_queue
    from batchjobs.errors import UsageError
    from batchjobs.inputs import fingerprint

    digest = fingerprint([source], plan.model, plan.defaults)
    key, there = _newest_run(client, f"run-{digest}", redo)
    if there is None or not there.status.is_final:
        for path in refuse_existing:
            if path is not None and path.is_file():
                raise UsageError(f"{path} exists already; --force replaces it")
    if there is None or there.submitted_at is None:
        made = store_and_queue(client, [source], replace(plan, key=key))
        there = client.store.batch(made.batch_id)
        say(f"batch {there.id}: {plural(there.counts.total, 'request')}")
    elif there.status.is_final:
        say(f"batch {there.id} has ended already; these are its results (--redo answers everything anew)")
    else:
        say(f"batch {there.id} goes on: {there.counts.done:,} of {plural(there.counts.total, 'request')} done before")
    return there


def _newest_run(client: Client, stem: str, redo: bool) -> tuple[str, BatchInfo | None]:
    """The key and the batch of the last run of this content; with ``redo`` a key that is free."""
    key, found = stem, client.store.batch_by_key(stem)
    number = 2
    while found is not None:
        following = f"{stem}-{number}"
        newer = client.store.batch_by_key(following)
        if newer is None:
            return (following, None) if redo else (key, found)
        key, found, number = following, newer, number + 1
    return key, None


def _answered(client: Client, info: BatchInfo) -> BatchInfo:
    """Runs a worker until the batch has ended."""
    from batchjobs.cli.estimate import live_speed
    from batchjobs.cli.local_worker import LocalWorker
    from batchjobs.cli.progress import BatchProgress
    from batchjobs.waiting import wait_for_end

    if info.status.is_final:
        return info
    with (
        LocalWorker(client.settings) as worker,
        BatchProgress(live=lambda: live_speed(client.store.workers())) as progress,
    ):
        noted = ""

        def seen(now: BatchInfo) -> None:
            nonlocal noted
            progress.show(now)
            if not now.status.is_final:
                worker.check()
                if (note := why_idle(client, now)) and note != noted:
                    noted = note
                    say(f"note: {note}")

        return wait_for_end(client.store, info.id, None, seen)


def why_idle(client: Client, info: BatchInfo) -> str | None:
    """Why the workers that live leave the batch alone; our own one needs a while before it lives."""
    from batchjobs.cli.waiting_note import why_waiting

    if info.counts.running:
        return None
    workers = client.store.workers()
    return why_waiting(client.store, info, workers) if any(worker.is_alive for worker in workers) else None


def _judged(client: Client, info: BatchInfo) -> int:
    from batchjobs.cli.status import judge

    return judge(client, info)
