"""What commands say, and where: data on stdout, messages on stderr. Nothing from outside is obeyed by a terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, Literal

from batchjobs.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from batchjobs.errors import LineError

PRINTED_ERRORS = 20
"""More different errors than this are counted, not printed."""

_WIDTH_OF_A_FILE = 200
_GAP = 2
"""Characters between two columns of a table."""


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

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leaves the closed pipe to whoever runs the command; rich would end the process with its own code."""
            raise BrokenPipeError

    stream = stream or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    return PipedConsole(file=stream, width=width, markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """A table on stdout. Cells are one line each, with control characters shown; ``right`` names numeric columns.

    Headings, numbers and the columns in ``whole``, which people copy, are never cut: on a narrow terminal the others
    give way. They are shortened in a table that has ``whole`` columns, and folded otherwise. A terminal too narrow
    even for that wraps the lines itself.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    cells = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    needed = _GAP * (len(columns) - 1)
    for i, name in enumerate(columns):
        kept = cell_len(visible(name))
        if name in whole or name in right:
            kept = max(kept, *(cell_len(row[i]) for row in cells), 0)
        needed += kept
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(
            visible(name), justify=justify, overflow="fold", min_width=kept, no_wrap=name in whole or name in right
        )
    for row in cells:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") if whole else text for text in row))
    console = rich_console()
    console.width = max(console.width, needed)
    console.print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """``name  value`` lines on stdout; fields without a value are left out."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if value is not None:
            print(f"{name:<{width}}  {visible(str(value))}")
    sys.stdout.flush()


def print_line_errors(errors: Sequence[LineError]) -> None:
    """On stderr: lines with the same error together, the first errors only, and how many more lines there are."""
    from batchjobs.cli.line_errors import grouped

    groups = grouped(errors)
    for group in groups[:PRINTED_ERRORS]:
        say(visible(str(group)))
    rest = sum(group.count for group in groups[PRINTED_ERRORS:])
    if rest:
        say(f"... and {rest:,} more; --json prints all of them")


def out_line_errors(errors: Iterable[LineError]) -> None:
    """Every error as a JSON line on stdout."""
    for error in errors:
        out_json(asdict(error))
