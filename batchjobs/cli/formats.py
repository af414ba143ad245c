"""Results in the forms of ``--format``. Each writer takes requests one by one and keeps none of them, or few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from batchjobs.cli.csv_rows import CsvRows
from batchjobs.openai_format import is_success, openai_line
from batchjobs.results import Result, instant, json_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchjobs.store import StoredResult

CSV_COLUMNS = (
    "custom_id",
    "index",
    "status",
    "text",
    "finish_reason",
    "model",
    "model_version",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "created_at",
    "started_at",
    "first_token_at",
    "finished_at",
    "worker",
    "attempt",
    "error_code",
    "error_message",
    "choices",
    "version_spans",
)
_TABLE_TEXT = 100
_TABLE_BLOCK = 200
"""Rows of a table on the screen before its heading comes again."""


@dataclass(slots=True)
class Written:
    """How many requests were written, and how many failures had nowhere to go."""

    rows: int = 0
    left_out: int = 0


class Writer(Protocol):
    """One file in one form. It is whole once it was closed; after an error it is not closed."""

    def add(self, stored: StoredResult) -> None:
        """A request that has ended."""

    def close(self) -> None:
        """Writes what is left to write. The stream stays open for its owner."""


def write(
    rows: Iterable[StoredResult], form: str, out: BinaryIO, errors: BinaryIO | None = None, *, flush: bool = False
) -> Written:
    """Writes the requests that have ended, in their order.

    Requests that did not complete go to ``errors`` where that is given; else they stand among the others, except in
    the openai form, which has no place for them. With ``flush``, each line leaves at once.
    """
    answers = _writer(form, out)
    failures = None if errors is None else _writer(form, errors)
    elsewhere = failures if failures is not None or form == "openai" else answers
    written = Written()
    for row in rows:
        if row.completion is None:
            continue
        good = is_success(row)
        writer = answers if good else elsewhere
        if writer is None:
            written.left_out += 1
            continue
        writer.add(row)
        written.rows += 1
        if flush:
            (out if good or errors is None else errors).flush()
    answers.close()
    if failures is not None:
        failures.close()
    return written


def _writer(form: str, out: BinaryIO) -> Writer:
    if form == "parquet":
        from batchjobs.cli.parquet import ParquetWriter

        return ParquetWriter(out)
    if form == "jsonl":
        return _LineWriter(out, lambda row: Result.of(row).as_json())
    if form == "openai":
        return _LineWriter(out, openai_line)
    return _CsvWriter(out) if form == "csv" else _TableWriter()


class _LineWriter:
    def __init__(self, out: BinaryIO, line: Callable[[StoredResult], bytes]) -> None:
        self._out = out
        self._line = line

    def add(self, stored: StoredResult) -> None:
        self._out.write(self._line(stored) + b"\n")

    def close(self) -> None:
        pass


class _CsvWriter:
    def __init__(self, out: BinaryIO) -> None:
        self._rows = CsvRows(out)
        self._rows.write(CSV_COLUMNS)

    def add(self, stored: StoredResult) -> None:
        self._rows.write(_csv_row(Result.of(stored)))

    def close(self) -> None:
        pass


def _csv_row(result: Result) -> list[object]:
    values: dict[str, object] = {
        "error_code": result.error.code if result.error else None,
        "error_message": result.error.message if result.error else None,
        "choices": len(result.choices),
        "version_spans": json_text(result.version_spans),
    }
    for name in CSV_COLUMNS:
        if name.endswith("_at"):
            values[name] = instant(getattr(result, name))
        elif name not in values:
            values[name] = getattr(result, name)
    return [values[name] for name in CSV_COLUMNS]


class _TableWriter:
    """Tables on stdout, each of so many rows that its widths are known before it is printed."""

    _COLUMNS = ("index", "custom_id", "status", "finish", "tokens", "text or error")

    def __init__(self) -> None:
        self._block: list[tuple[object, ...]] = []
        self._printed = False

    def add(self, stored: StoredResult) -> None:
        self._block.append(_table_row(Result.of(stored)))
        if len(self._block) == _TABLE_BLOCK:
            self._print()

    def close(self) -> None:
        if self._block or not self._printed:
            self._print()

    def _print(self) -> None:
        from batchjobs.cli.console import print_table

        print_table(self._COLUMNS, self._block, right=("index", "tokens"), whole=("custom_id",))
        self._block.clear()
        self._printed = True


def _table_row(result: Result) -> tuple[object, ...]:
    from batchjobs.text import shortened

    said = result.error.message if result.error else result.text
    if result.n > 1 and not result.error:
        said = f"(1 of {len(result.choices)}) {said}"
    return (
        result.index,
        shortened(result.custom_id, 40),
        result.status,
        result.finish_reason,
        result.completion_tokens,
        shortened(said, _TABLE_TEXT),
    )
