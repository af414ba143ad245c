"""``batchjobs pause`` and ``batchjobs resume``: of a batch, of workers, of all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import out_json, say
from batchjobs.cli.moments import pause_text
from batchjobs.cli.options import Text, as_json, open_client
from batchjobs.text import plural, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.client import Client
    from batchjobs.types import Pause

_workers = click.option("--worker", "workers", multiple=True, help="This worker; may be given several times.")
_all_workers = click.option("--all-workers", is_flag=True, help="Every worker, those that start later included.")


@click.command("pause")
@click.argument("batch", required=False)
@_workers
@_all_workers
@click.option("--reason", type=Text(), help="Why; shown by `status` and `workers`.")
@click.option("--release", is_flag=True, help="Give what is running back to the queue, instead of keeping its place.")
@as_json
@click.pass_context
def pause_command(
    ctx: click.Context,
    batch: str | None,
    workers: tuple[str, ...],
    all_workers: bool,
    reason: str | None,
    release: bool,
    as_json: bool,
) -> None:
    """Make no more tokens for BATCH, or by these workers, until they are resumed.

    It takes effect within seconds, and loses nothing: what was running keeps its place and its cache, or goes back to
    the queue as far as it is with --release. Pausing again is harmless: the first reason stays, --release is added.
    """
    _check_one_kind(batch, workers, all_workers)
    again = _again(reason, release)
    with open_client(ctx) as client:
        if batch is not None:
            new = client.pause_batch(batch, reason, release)
            _tell_of_batch(client, batch, _paused_batch(client, batch, new, again), as_json)
            return
        names = client.pause_workers(None if all_workers else workers, reason=reason, release=release)
        pauses = client.store.worker_pauses()
        for name in _asked(workers):
            if as_json:
                out_json(_of_worker(name, name in names, pauses.get(name)))
            say(_paused_worker(name, name in names, pauses.get(name), client, again))


@click.command("resume")
@click.argument("batch", required=False)
@_workers
@_all_workers
@as_json
@click.pass_context
def resume_command(
    ctx: click.Context, batch: str | None, workers: tuple[str, ...], all_workers: bool, as_json: bool
) -> None:
    """Let BATCH go on, or these workers. A worker that is paused by name and with all others needs both lifted.

    With --all-workers, every pause of workers is lifted, those of single ones too.
    """
    _check_one_kind(batch, workers, all_workers)
    with open_client(ctx) as client:
        if batch is not None:
            resumed = client.resume_batch(batch)
            sentence = f"batch {batch} goes on" if resumed else f"batch {batch} was not paused"
            _tell_of_batch(client, batch, sentence, as_json)
            return
        lifted = client.resume_workers(None if all_workers else workers)
        pauses = client.store.worker_pauses()
    if as_json:
        for name in lifted if all_workers else workers:
            out_json(_of_worker(name, name in lifted, pauses.get(name)))
    if all_workers:
        say(_all_resumed(lifted))
    for name in workers:
        say(_resumed_worker(name, name in lifted, pauses.get("*")))


def _check_one_kind(batch: str | None, workers: Sequence[str], all_workers: bool) -> None:
    if (batch is not None) + bool(workers) + all_workers != 1:
        raise click.UsageError("name a batch, or workers with --worker, or --all-workers")


def _asked(workers: Sequence[str]) -> Sequence[str]:
    return list(dict.fromkeys(workers)) or ["*"]


def _of_worker(name: str, changed: bool, pause: Pause | None) -> dict[str, Any]:
    return {"worker": name, "changed": changed, "pause": pause}


# ------------------------------------------------------------------------------------------------------ sentences


def _tell_of_batch(client: Client, batch: str, sentence: str, as_json: bool) -> None:
    from batchjobs.cli.status import status_object
    from batchjobs.cli.waiting_note import why_waiting

    info = client.store.batch(batch)
    note = why_waiting(client.store, info, client.store.workers())
    if as_json:
        out_json({**status_object(info), "note": note})
    say(sentence)
    if note is not None and not info.paused:
        say(f"note: {note}")


def _again(reason: str | None, release: bool) -> str:
    """What a second pause changed, and what not."""
    return ("; what runs goes back to the queue now" if release else "") + (
        "; the first reason is kept" if reason is not None else ""
    )


def _paused_batch(client: Client, batch: str, new: bool, again: str) -> str:
    info = client.store.batch(batch)
    if info.pause is None:
        return f"batch {batch} is {info.status}: there is nothing to pause"
    if not new:
        return f"batch {batch} was paused before, and stays so: {pause_text(info.pause)}{again}"
    return f"batch {batch} is paused until `batchjobs resume {batch}`"


def _paused_worker(name: str, new: bool, pause: Pause | None, client: Client, again: str) -> str:
    if name != "*":
        if not new:
            return f"worker {visible(name)} was paused before, and stays so: {pause_text(pause)}{again}"
        return f"worker {visible(name)} is paused until `batchjobs resume --worker {visible(name)}`"
    if not new:
        return f"all workers were paused before, and stay so: {pause_text(pause)}{again}"
    living = plural(sum(row.is_alive for row in client.store.workers()), "worker")
    return f"all workers are paused ({living} now, and any that starts) until `batchjobs resume --all-workers`"


def _resumed_worker(name: str, lifted: bool, of_all: Pause | None) -> str:
    if of_all is not None:
        still = f"is still paused with all workers, {pause_text(of_all)}; `batchjobs resume --all-workers` lifts that"
        return f"worker {visible(name)} {still}"
    return f"worker {visible(name)} " + ("goes on" if lifted else "was not paused")


def _all_resumed(lifted: Sequence[str]) -> str:
    if not lifted:
        return "no worker was paused"
    named = [visible(name) for name in lifted if name != "*"]
    return "all workers go on" + (f", also {', '.join(named)}, paused by name" if named else "")
