"""Results in the forms of ``--format``. Each writer takes rows one by one and keeps none of them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from batchjobs.openai_format import is_success, openai_line
from batchjobs.results import Result, instant, json_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchjobs.store import StoredResult

FORMATS = ("jsonl", "openai", "csv", "table")

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


@dataclass(slots=True)
class Written:
    """How many requests were written, and how many failures had nowhere to go."""

    rows: int = 0
    left_out: int = 0


def write(rows: Iterable[StoredResult], form: str, out: BinaryIO, errors: BinaryIO | None = None) -> Written:
    """Writes finished requests to ``out``, failures of the OpenAI form to ``errors``."""
    finished = (row for row in rows if row.completion is not None)
    writers: dict[str, Callable[[Iterator[StoredResult], BinaryIO, BinaryIO | None], Written]] = {
        "jsonl": _write_jsonl,
        "openai": _write_openai,
        "csv": _write_csv,
        "table": _write_table,
    }
    return writers[form](finished, out, errors)


def _write_jsonl(rows: Iterator[StoredResult], out: BinaryIO, errors: BinaryIO | None) -> Written:
    written = Written()
    for row in rows:
        out.write(Result.of(row).as_json() + b"\n")
        written.rows += 1
    return written


def _write_openai(rows: Iterator[StoredResult], out: BinaryIO, errors: BinaryIO | None) -> Written:
    written = Written()
    for row in rows:
        target = out if is_success(row) else errors
        if target is None:
            written.left_out += 1
        else:
            target.write(openai_line(row) + b"\n")
            written.rows += 1
    return written


def _write_csv(rows: Iterator[StoredResult], out: BinaryIO, errors: BinaryIO | None) -> Written:
    written = Written()
    stream = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for row in rows:
            writer.writerow(_csv_row(Result.of(row)))
            written.rows += 1
    finally:
        stream.detach()  # the file below stays open for its owner
    return written


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


def _write_table(rows: Iterator[StoredResult], out: BinaryIO, errors: BinaryIO | None) -> Written:
    from batchjobs.cli.console import print_table
    from batchjobs.text import shortened

    written = Written()

    def cells() -> Iterator[tuple[object, ...]]:
        for row in rows:
            result = Result.of(row)
            said = result.error.message if result.error else result.text
            if result.n > 1 and not result.error:
                said = f"(1 of {len(result.choices)}) {said}"
            written.rows += 1
            yield (
                result.index,
                shortened(result.custom_id, 40),
                result.status,
                result.finish_reason,
                result.completion_tokens,
                shortened(said, _TABLE_TEXT),
            )

    columns = ("index", "custom_id", "status", "finish", "tokens", "text or error")
    print_table(columns, cells(), right=("index", "tokens"), whole=("custom_id",))
    return written
