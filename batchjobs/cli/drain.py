"""``batchjobs drain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import complain, out_json, say
from batchjobs.cli.moments import pause_text
from batchjobs.cli.options import as_json, open_client
from batchjobs.text import plural, visible

if TYPE_CHECKING:
    from batchjobs.client import Client
    from batchjobs.types import Command


@click.command("drain")
@click.argument("worker")
@click.option("--release", is_flag=True, help="Give back what is running, instead of finishing it.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most; then exit code 124.")
@as_json
@click.pass_context
def drain_command(
    ctx: click.Context, worker: str, release: bool, no_wait: bool, timeout: float | None, as_json: bool
) -> int:
    """Let WORKER claim nothing more, finish what it has begun, and end.

    With --release it stores how far its answers are and gives them back; another worker goes on there. Exit code 1 when
    the worker died before it was done, 4 when there is no such worker.
    """
    if no_wait and timeout is not None:
        raise click.UsageError("--timeout cannot go with --no-wait")
    with open_client(ctx) as client:
        _warn_of_pause(client, worker, release)
        try:
            done = client.drain(worker, release=release, wait=not no_wait, timeout=timeout)
        except KeyboardInterrupt:
            say(f"the order stands: worker {worker} drains")
            raise
    if as_json:
        out_json(asdict(done))
    if done.error is not None:
        complain(f"worker {worker}: {done.error}")
        return 1
    say(f"worker {worker} drains; `batchjobs workers` shows when it has ended" if no_wait else _ended(done))
    return 0


def _warn_of_pause(client: Client, worker: str, release: bool) -> None:
    pause = next((row.pause for row in client.store.workers() if row.name == worker and row.is_alive), None)
    if pause is not None and not (release or pause.release):
        say(
            f"note: worker {visible(worker)} is paused, {pause_text(pause)}; it finishes nothing until it is resumed, "
            "and --release gives its work back"
        )


def _ended(done: Command) -> str:
    said = f"worker {visible(done.worker)} has ended"
    if done.result is None:
        return said
    finished, given_back = (int(done.result.get(name) or 0) for name in ("finished", "given_back"))
    return f"{said}: {plural(finished, 'request')} finished, {given_back:,} given back"
