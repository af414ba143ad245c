"""``batchjobs model``: change what workers serve, and list what was ever served."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.asking import confirm, yes
from batchjobs.cli.console import complain, out_json, print_table, say
from batchjobs.cli.moments import moment
from batchjobs.cli.options import as_json, open_client
from batchjobs.fields import listed
from batchjobs.text import plural, visible
from batchjobs.types import Inflight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchjobs.client import Client
    from batchjobs.types import Command


@click.group("model")
def model_command() -> None:
    """Change the model that workers serve, and list the versions there were."""


@model_command.command("update", short_help="Change the model of living workers.")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a model from a hub.")
@click.option("--worker", "workers", multiple=True, help="Only this worker; may be given several times.")
@click.option(
    "--inflight",
    type=click.Choice([str(each) for each in Inflight]),
    default=str(Inflight.RECOMPUTE),
    help="What becomes of unfinished answers. recompute (default): they go on under the new weights. keep: they go on "
    "with what the old ones computed. finish: the old ones finish them first. restart: they begin anew.",
)
@click.option("--dry-run", is_flag=True, help="Load and check only; say what would happen.")
@yes
@click.option("--no-wait", is_flag=True, help="Give the order and return at once.")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most; then exit code 124.")
@as_json
@click.pass_context
def update_command(ctx: click.Context, /, model: str, workers: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Change all living workers, or those named, to MODEL: a folder, hub id or .gguf file as their machines see it.

    Each worker checks all of it first and then changes, or says why not and goes on as before. Exit code 1 when one
    did not change, 4 when there is no such worker. On a terminal the command asks first.
    """
    wait, sure = not options.pop("no_wait"), options.pop("yes")
    if not wait and options["timeout"] is not None:
        raise click.UsageError("--timeout cannot go with --no-wait")

    def tell(command: Command) -> None:
        if as_json:
            out_json(asdict(command))
        _tell(command)

    with open_client(ctx) as client:
        names = client.living_workers(workers or None)
        if not options["dry_run"]:
            confirm(f"Change {plural(len(names), 'worker')} ({listed(names)}) to {model}?", sure)
        try:
            done = client.update_model(model, workers=names, wait=wait, seen=tell, **options)
        except KeyboardInterrupt:
            say("the order stands; `batchjobs workers` shows the versions that are served")
            raise
        if wait and not options["dry_run"]:
            _tell_of_stranded(client)
    if not wait:
        for command in done if as_json else ():
            out_json(asdict(command))
        say(f"{plural(len(done), 'worker')} told: {listed(names)}; `batchjobs workers` shows their versions")
    return int(any(command.error is not None for command in done))


def _tell_of_stranded(client: Client) -> None:
    """Batches that nobody can go on with, now that workers serve something else."""
    from batchjobs.cli.waiting_note import why_stranded

    workers = client.workers()
    for info in client.batches():
        note = None if info.status.is_final else why_stranded(client.store, info, workers)
        if note is not None:
            say(f"note: batch {info.id}: {note}")


def _tell(command: Command) -> None:
    who = f"worker {visible(command.worker)}"
    if command.error is not None:
        complain(f"{who}: {command.error}")
    else:
        say(f"{who}: {update_sentence(command.result or {})}")


def update_sentence(result: Mapping[str, Any]) -> str:
    """What an update that was carried out did to a worker."""
    old, new = result.get("old_version"), result.get("new_version")
    how = "by a full reload" if result.get("is_reload") else "in place"
    if result.get("dry_run"):
        same = "; it serves that version already" if old == new else ""
        return f"would change {old} -> {new} {how}{same}; nothing was changed"
    changed = f"{old} -> {new} {how}" if old != new else f"served {new} before; it was loaded again"
    parts = [f"{changed}, paused for {result.get('paused_seconds') or 0:.2f} s"]
    parts += [f"{count:,} {became}" for name, became in _BECAME.items() if (count := result.get(name))]
    return "; ".join(parts)


_BECAME = {
    "finished": "unfinished answers were finished by the old model",
    "recomputed": "unfinished answers go on under the new weights",
    "kept": "unfinished answers go on with what the old weights computed",
    "restarted": "unfinished answers begin anew",
    "given_back": "requests were given back to the queue",
}


@model_command.command("list", short_help="List the versions that workers have served.")
@as_json
@click.pass_context
def list_command(ctx: click.Context, as_json: bool) -> None:
    """List the versions of models that workers have served, the newest first, and who serves them now."""
    with open_client(ctx) as client:
        known = client.model_versions()
        workers = [row for row in client.store.workers() if row.is_alive]
    serving: dict[str, list[str]] = {}
    for row in workers:
        serving.setdefault(row.model_version, []).append(row.name)
    if as_json:
        for each in known:
            out_json({**asdict(each), "workers": serving.get(each.version, [])})
        return
    if not known:
        say("no worker has served a model yet; `batchjobs worker --model MODEL` starts one")
        return
    rows = (
        (each.version, each.name, each.source, each.dtype, moment(each.created_at), _served_by(serving, each.version))
        for each in known
    )
    print_table(("version", "name", "source", "dtype", "first served", "served now by"), rows, whole=("version",))


def _served_by(serving: Mapping[str, Sequence[str]], version: str) -> str:
    return listed(serving.get(version, ()), 4)
