"""What commands say, and where: data on stdout, messages on stderr. Nothing from outside is obeyed by a terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from batchjobs.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from batchjobs.errors import LineError

PRINTED_ERRORS = 20
"""More errors than this are counted, not printed."""

_WIDTH_OF_A_FILE = 200


def say(message: str) -> None:
    """A message for people, on stderr."""
    print(visible(message, keep_newlines=True), file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Why the command failed, on stderr."""
    say(f"batchjobs: {message}")


def out(text: str) -> None:
    """A line of data for people or scripts, on stdout."""
    print(visible(text, keep_newlines=True), flush=True)


def out_json(value: Mapping[str, Any]) -> None:
    """One JSON object as a line on stdout, always UTF-8."""
    from batchjobs.results import json_line

    sys.stdout.flush()
    sys.stdout.buffer.write(json_line(value) + b"\n")
    sys.stdout.buffer.flush()


def is_live(stream: IO[str]) -> bool:
    """Whether bars and colours may be drawn there: a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def rich_console(stream: IO[str] | None = None) -> Console:
    """A console that draws on terminals and writes plain wide lines elsewhere; markup in data means nothing to it."""
    from rich.console import Console

    stream = stream or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
    """A table on stdout. Cells are one line each, with control characters shown; ``right`` names numeric columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(visible(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else visible(str(cell)) for cell in row))
    rich_console().print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """``name  value`` lines on stdout; fields without a value are left out."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if value is not None:
            print(f"{name:<{width}}  {visible(str(value))}")
    sys.stdout.flush()


def print_line_errors(errors: Sequence[LineError]) -> None:
    """The first errors on stderr, and how many more there are."""
    for error in errors[:PRINTED_ERRORS]:
        say(visible(str(error)))
    if len(errors) > PRINTED_ERRORS:
        say(f"... and {len(errors) - PRINTED_ERRORS:,} more; --json prints all of them")


def out_line_errors(errors: Iterable[LineError]) -> None:
    """Every error as a JSON line on stdout."""
    for error in errors:
        out_json(asdict(error))
