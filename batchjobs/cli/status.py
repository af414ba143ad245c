"""``batchjobs status``, ``list`` and ``wait``: how far batches are."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import complain, is_live, out_json, print_fields, print_table, say
from batchjobs.cli.estimate import eta_seconds, live_speed, tokens_per_second, tokens_so_far
from batchjobs.cli.instants import InstantOrAge
from batchjobs.cli.moments import moment, pause_text, time_left
from batchjobs.cli.options import Text, as_json, open_client
from batchjobs.text import plural, shortened, visible
from batchjobs.types import BatchInfo, BatchStatus

if TYPE_CHECKING:
    from datetime import datetime

    from batchjobs.client import Client

FAILED_REQUESTS = 5
CANCELLED = 6


@click.command("status")
@click.argument("batch")
@as_json
@click.pass_context
def status_command(ctx: click.Context, batch: str, as_json: bool) -> None:
    """Show state, counts, tokens, speed and failures of BATCH, and who paused it."""
    from batchjobs.cli.waiting_note import why_waiting

    with open_client(ctx) as client:
        info = client.store.batch(batch)
        failures = client.store.failures(batch) if info.counts.failed else {}
        workers = client.store.workers()
        note = why_waiting(client.store, info, workers)
    live = live_speed(workers)
    if as_json:
        out_json({**status_object(info, failures, live), "note": note})
        return
    fields = status_fields(info, failures, live)
    if is_live(sys.stdout):
        from batchjobs.cli.view import print_view

        print_view(info, fields, workers)
    else:
        print_fields(fields)
    if note is not None:
        say(f"note: {note}")


@click.command("list")
@click.option("--limit", type=click.IntRange(1), default=50, help="How many; default: 50.")
@click.option("--name", type=Text(), help="Only batches with exactly this name.")
@click.option(
    "--since",
    type=InstantOrAge(),
    help="Created then or later: 2026-03-08T02:30-08:00 (no offset: UTC), or 2h, 3d ago.",
)
@click.option("--until", type=InstantOrAge(), help="Created before that, given like --since.")
@as_json
@click.pass_context
def list_command(
    ctx: click.Context, limit: int, name: str | None, since: datetime | None, until: datetime | None, as_json: bool
) -> None:
    """List the newest batches, the newest first."""
    with open_client(ctx) as client:
        batches = client.store.batches(limit, name=name, since=since, until=until)
        live = live_speed(client.store.workers()) if as_json else None
    if as_json:
        for info in batches:
            out_json(status_object(info, live=live))
        return
    if not batches:
        is_filtered = not (name is None and since is None and until is None)
        say("no such batches" if is_filtered else "no batches yet; `batchjobs submit FILE` makes one")
        return
    columns = ("id", "name", "status", "done", "total", "failed", "tokens", "created")
    rows = (
        (
            info.id,
            shortened(info.name or "", 40),
            _state(info),
            info.counts.done,
            info.counts.total,
            info.counts.failed,
            tokens_so_far(info),
            moment(info.created_at),
        )
        for info in batches
    )
    print_table(columns, rows, right=("done", "total", "failed", "tokens"), whole=("id",))


@click.command("wait")
@click.argument("batch")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most; then exit code 124.")
@as_json
@click.pass_context
def wait_command(ctx: click.Context, batch: str, timeout: float | None, as_json: bool) -> int:
    """Wait until BATCH has ended.

    Exit code 0 when every request has an answer, 5 when some failed, 6 when it was cancelled, 124 after --timeout.
    """
    with open_client(ctx) as client:
        code = wait_and_judge(client, batch, timeout, quiet=as_json)
        if as_json:
            out_json(status_object(client.store.batch(batch), client.store.failures(batch)))
    return code


def wait_and_judge(client: Client, batch_id: str, timeout: float | None, *, quiet: bool) -> int:
    """Waits, with progress unless ``quiet``, and returns the exit code; says why when it is not 0."""
    from batchjobs.cli.progress import BatchProgress
    from batchjobs.waiting import wait_for_end

    with BatchProgress(quiet, lambda: live_speed(client.store.workers())) as progress:
        info = wait_for_end(client.store, batch_id, timeout, progress.show)
    return judge(client, info)


def judge(client: Client, info: BatchInfo) -> int:
    """The exit code of an ended batch, with a sentence on stderr when it is not 0."""
    if info.status == BatchStatus.CANCELLED:
        complain(f"batch {info.id} was cancelled; {plural(info.counts.completed, 'request')} completed before")
        return CANCELLED
    bad = info.counts.failed + info.counts.expired
    if bad:
        reasons = ", ".join(f"{count:,} {code}" for code, count in client.store.failures(info.id).items())
        complain(f"{plural(bad, 'request')} of {info.counts.total:,} failed" + (f": {reasons}" if reasons else ""))
        return FAILED_REQUESTS
    return 0


def status_object(info: BatchInfo, failures: dict[str, int] | None = None, live: float | None = None) -> dict[str, Any]:
    """A batch as ``--json`` shows it. ``live`` is what :func:`live_speed` says."""
    made = asdict(info)
    first = {name: made.pop(name) for name in ("id", "status", "paused", "counts", "tokens")}
    speed = tokens_per_second(info, live)
    return {
        **first,
        "tokens_per_second": speed,
        "eta_seconds": eta_seconds(info, live),
        **({} if failures is None else {"failures": failures}),
        **made,
    }


def status_fields(info: BatchInfo, failures: dict[str, int], live: float | None) -> dict[str, object]:
    """A batch for people: what ``status`` and ``follow`` show, by name; None where there is nothing to say."""
    counts = info.counts
    states = {name: count for name, count in asdict(counts).items() if count and name != "total"}
    eta = eta_seconds(info, live)
    return {
        "batch": info.id,
        "name": info.name,
        "key": info.key,
        "status": _state(info),
        "paused": pause_text(info.pause) or None,
        "requests": f"{counts.total:,}" + (f": {_listed(states)}" if states else ""),
        "failures": _listed(failures) if failures else None,
        "tokens": _tokens(info),
        "speed": f"{speed:,} tokens/s" if (speed := tokens_per_second(info, live)) else None,
        "time left": None if eta is None else time_left(eta),
        "model": info.model,
        "queue": info.queue,
        "created": moment(info.created_at),
        "started": moment(info.started_at),
        "finished": moment(info.finished_at),
    }


def _state(info: BatchInfo) -> str:
    return f"{info.status} (paused)" if info.paused else str(info.status)


def _tokens(info: BatchInfo) -> str:
    unfinished = info.tokens.in_progress
    part = f", {unfinished:,} of them in unfinished answers" if unfinished else ""
    return f"{info.tokens.prompt:,} in prompts, {tokens_so_far(info):,} generated{part}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {visible(name)}" for name, count in counts.items())
