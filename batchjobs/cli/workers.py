"""``batchjobs workers``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import out_json, print_table, say
from batchjobs.cli.moments import pause_text, short_version
from batchjobs.cli.options import as_json, open_client
from batchjobs.errors import ConnectionFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import WorkerRow

_COLUMNS = (
    "name", "state", "host", "device", "model", "version", "running", "waiting", "kv", "tokens/s", "heartbeat",
)  # fmt: skip
_NUMBERS = ("running", "waiting", "kv", "tokens/s", "heartbeat")


@click.command("workers")
@as_json
@click.pass_context
def workers_command(ctx: click.Context, as_json: bool) -> None:
    """List living workers, and those that ended or fell silent (dead) within the last day, and who paused them."""
    with open_client(ctx) as client:
        try:
            rows = client.workers()
            pauses = client.store.worker_pauses()
        except ConnectionFailed:
            for name, note in client.worker_notes().items():
                say(f"worker {name}: {note}")
            raise
    if as_json:
        for row in rows:
            out_json(asdict(row))
        return
    if rows:
        _print(rows)
    else:
        say("no workers within the last day; `batchjobs worker` starts one")
    if "*" in pauses:
        say(f"note: all workers are paused, {pause_text(pauses['*'])}, those that start later included")


def _print(rows: Sequence[WorkerRow]) -> None:
    from batchjobs.cli.view import load_of, model_of

    has_pauses = any(row.pause is not None for row in rows)
    cells = (
        (
            row.name,
            row.state,
            row.host,
            row.device,
            model_of(row),
            short_version(row.model_version),
            *load_of(row),
            f"{row.heartbeat_age_seconds:.0f} s ago",
            *([pause_text(row.pause)] if has_pauses else []),
        )
        for row in rows
    )
    columns = (*_COLUMNS, *(["paused"] if has_pauses else []))
    print_table(columns, cells, whole=("name",), right=_NUMBERS)
