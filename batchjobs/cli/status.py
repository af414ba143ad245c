"""``batchjobs status``, ``list`` and ``wait``: how far batches are."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import complain, out_json, print_fields, print_table, say
from batchjobs.cli.options import as_json, open_client
from batchjobs.text import plural, shortened, visible
from batchjobs.types import BatchInfo, BatchStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.client import Client
    from batchjobs.store import WorkerRow

FAILED_REQUESTS = 5
CANCELLED = 6


@click.command("status")
@click.argument("batch")
@as_json
@click.pass_context
def status_command(ctx: click.Context, batch: str, as_json: bool) -> None:
    """Show state, counts, tokens, speed and failures of BATCH."""
    with open_client(ctx) as client:
        info = client.store.batch(batch)
        failures = client.store.failures(batch) if info.counts.failed else {}
        workers = client.store.workers()
    live, note = live_speed(workers), why_waiting(info, workers)
    if as_json:
        out_json({**status_object(info, failures, live), "note": note})
    else:
        print_fields(_fields(info, failures, live))
        if note is not None:
            say(f"note: {note}")


@click.command("list")
@click.option("--limit", type=click.IntRange(1), default=50, help="How many; default: 50.")
@as_json
@click.pass_context
def list_command(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List the newest batches, the newest first."""
    with open_client(ctx) as client:
        batches = client.batches(limit)
        live = live_speed(client.store.workers()) if as_json else None
    if as_json:
        for info in batches:
            out_json(status_object(info, live=live))
        return
    if not batches:
        say("no batches yet; `batchjobs submit FILE` makes one")
        return
    columns = ("id", "name", "status", "done", "total", "failed", "tokens", "created")
    rows = (
        (
            info.id,
            shortened(info.name or "", 40),
            info.status,
            info.counts.done,
            info.counts.total,
            info.counts.failed,
            info.tokens.completion,
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
        "eta_seconds": eta_seconds(info),
        **({} if failures is None else {"failures": failures}),
        **made,
    }


def live_speed(workers: Sequence[WorkerRow]) -> float | None:
    """Tokens per second of the busy workers together, whichever batch they work on; None if none is busy."""
    busy = [worker.tokens_per_second for worker in workers if worker.state == "busy"]
    return sum(busy) if busy else None


def why_waiting(info: BatchInfo, workers: Sequence[WorkerRow]) -> str | None:
    """Why nobody works on a batch that has not ended, if that is so."""
    alive = [worker for worker in workers if worker.is_alive]
    if info.status.is_final:
        return None
    if not alive:
        return "no worker is running; `batchjobs worker` starts one"
    if info.model is None:
        return None
    names = {info.model, PurePath(info.model).name.removesuffix(".gguf")}
    if any(worker.model in names for worker in alive):
        return None
    return f"no living worker has the model that the batch asks for, {visible(info.model)}"


def tokens_per_second(info: BatchInfo, live: float | None = None) -> float | None:
    """The ``live`` speed while the batch runs. Without one, and at its end, the mean: tokens of finished requests by
    the time since the first was taken up."""
    if info.status == BatchStatus.RUNNING and live is not None:
        return round(live, 1)
    seconds = _running_seconds(info)
    return round(info.tokens.completion / seconds, 1) if seconds and info.tokens.completion else None


def eta_seconds(info: BatchInfo) -> float | None:
    """Seconds to the end if the rest goes on as the finished part went; None while that cannot be said."""
    seconds = _running_seconds(info)
    done = info.counts.done
    if info.status != BatchStatus.RUNNING or not seconds or not done:
        return None
    return round(seconds / done * (info.counts.total - done), 1)


def _running_seconds(info: BatchInfo) -> float | None:
    if info.started_at is None:
        return None
    return ((info.finished_at or datetime.now(UTC)) - info.started_at).total_seconds()


def _fields(info: BatchInfo, failures: dict[str, int], live: float | None) -> dict[str, object]:
    counts = info.counts
    states = {name: count for name, count in asdict(counts).items() if count and name != "total"}
    eta = eta_seconds(info)
    return {
        "batch": info.id,
        "name": info.name,
        "key": info.key,
        "status": f"{info.status} (paused)" if info.paused else info.status,
        "requests": f"{counts.total:,}" + (f": {_listed(states)}" if states else ""),
        "failures": _listed(failures) if failures else None,
        "tokens": f"{info.tokens.prompt:,} in prompts, {info.tokens.completion:,} generated",
        "speed": f"{speed:,} tokens/s" if (speed := tokens_per_second(info, live)) else None,
        "time left": None if eta is None else f"about {duration(eta)}",
        "model": info.model,
        "queue": info.queue,
        "created": moment(info.created_at),
        "started": moment(info.started_at),
        "finished": moment(info.finished_at),
    }


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {visible(name)}" for name, count in counts.items())


def moment(instant: datetime | None) -> str | None:
    """An instant for people, to the second, in UTC."""
    return None if instant is None else f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min``, ``2 h 10 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
