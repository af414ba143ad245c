"""A batch and the workers as they are drawn on a terminal, once by ``status`` and again and again by ``follow``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from batchjobs.cli.console import rich_console
from batchjobs.cli.moments import pause_text, short_version
from batchjobs.models import short_name
from batchjobs.text import shortened, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from batchjobs.store import WorkerRow
    from batchjobs.types import BatchInfo

_BAR_WIDTH = 40
_SHOWN_WORKERS = 12
_STATES = {"running": "green", "completed": "green", "cancelled": "red", "cancelling": "yellow"}
_WORKER_STATES = {"busy": "green", "paused": "yellow", "updating": "cyan", "draining": "cyan", "dead": "red"}


def print_view(info: BatchInfo, fields: Mapping[str, object], workers: Sequence[WorkerRow]) -> None:
    rich_console(sys.stdout).print(batch_view(info, fields, workers))


def batch_view(
    info: BatchInfo, fields: Mapping[str, object], workers: Sequence[WorkerRow], note: str | None = None
) -> RenderableType:
    """The fields that ``status`` prints, with a bar, and below them the workers that live."""
    from rich.console import Group
    from rich.text import Text

    alive = [worker for worker in workers if worker.is_alive]
    parts: list[RenderableType] = [_fields(info, fields)]
    if note is not None:
        parts.append(Text(f"note: {visible(note)}", style="yellow"))
    if alive and not info.status.is_final:
        parts += [Text(""), _workers(alive[:_SHOWN_WORKERS])]
        if len(alive) > _SHOWN_WORKERS:
            parts.append(Text(f"and {len(alive) - _SHOWN_WORKERS:,} more workers; `batchjobs workers` lists them"))
    return Group(*parts)


def _fields(info: BatchInfo, fields: Mapping[str, object]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        if value is None:
            continue
        style = "yellow" if name == "paused" or info.paused else _STATES.get(info.status, "")
        grid.add_row(name, Text(visible(str(value)), style=style if name in ("status", "paused") else ""))
        if name == "requests" and info.counts.total:
            bar = ProgressBar(info.counts.total, info.counts.done, width=_BAR_WIDTH)
            grid.add_row("progress", bar)
    return grid


def _workers(rows: Sequence[WorkerRow]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("worker", no_wrap=True)
    for name in ("state", "model", "version"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "kv", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    has_pauses = any(row.pause is not None for row in rows)
    if has_pauses:
        table.add_column("paused", no_wrap=True, overflow="ellipsis")
    for row in rows:
        state = Text(visible(row.state), style=_WORKER_STATES.get(row.state, ""))
        figures = _texts(model_of(row), short_version(row.model_version), *load_of(row))
        table.add_row(*_texts(row.name), state, *figures, *(_texts(pause_text(row.pause)) if has_pauses else []))
    return table


def _texts(*values: object) -> list[Any]:
    from rich.text import Text

    return [Text(visible(str(value))) for value in values]


def model_of(row: WorkerRow) -> str:
    """What the worker's model is called, short enough for a table."""
    return shortened(short_name(row.model).rpartition("/")[2], 40)


def load_of(row: WorkerRow) -> tuple[str, str, str, str]:
    """Running, waiting, use of the KV cache and tokens per second, as tables show them."""
    return (
        f"{row.running:,}",
        f"{row.waiting:,}",
        f"{row.kv_usage_ratio:.0%}",
        f"{row.tokens_per_second:,.1f}",
    )
