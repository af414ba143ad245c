"""Everything but the engine: prompts submitted, queued, claimed, read, and their answers recorded in SQL.

    python -m benchmarks.throughput [--requests 100000] [--database postgresql] [--workers 2] [--json]

A private home with a Redis of its own, a SQLite file or a PostgreSQL server with its default settings, `batchjobs
submit` on a file of prompts of about 100 bytes, and worker processes as `batchjobs worker` runs them, around
:mod:`benchmarks.instant_engine`, which answers with 8 tokens at once. At the end every request must have exactly one
answer, and it must be its own. All of it is deleted again.

The clock runs from the start of the command to the last row. On a machine that others use too, look at the processor
seconds: they are of everybody who takes part, servers included. On two cores, 10,000 requests a second are 200
microseconds of processor time for each, if both are never idle.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import sqlalchemy as sa
from redis import Redis

from batchjobs import schema
from batchjobs.database import Database
from batchjobs.embedded import socket_path_for
from benchmarks.million_lines import TOKENS, database_url, measure, stop_redis, write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER = "from benchmarks.throughput import work; work()"
POLL_SECONDS = 0.1
START_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 2**20
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # looks at a child without taking its exit code from whoever waits


@dataclass(kw_only=True)
class Figures:
    """Seconds by the clock and of processor time, and memory in MB. ``workers_mb`` is what each had when a quarter was
    done, and at its highest."""

    database: str
    requests: int
    workers: int
    submit_seconds: float = 0.0
    total_seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    submit_mb: float = 0.0
    workers_mb: list[tuple[float, float]] = field(default_factory=list)
    redis_mb: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.requests / self.total_seconds

    @property
    def cpu_microseconds(self) -> float:
        """Of a request, all processes together."""
        return 1e6 * sum(self.cpu_seconds.values()) / self.requests


# ---------------------------------------------------------------------------------------------------- a worker


def work() -> None:
    """What a worker process runs; settings come from the environment."""
    from batchjobs.settings import load_settings
    from benchmarks.instant_engine import InstantLoop
    from workers.daemon import run_worker
    from workers.logs import log_to_stderr

    log_to_stderr()
    loop: Any = InstantLoop()
    sys.exit(run_worker(load_settings(), loop))


@contextmanager
def worker(environment: dict[str, str], log: Path) -> Iterator[int]:
    """Its process id."""
    command = [sys.executable, "-c", os.environ.get("THROUGHPUT_WORKER", WORKER)]
    with log.open("wb") as stream:
        child = subprocess.Popen(command, env=environment, stderr=stream, cwd=Path(__file__).parents[1])
    try:
        yield child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


# -------------------------------------------------------------------------------------------------- the figures


def cpu_seconds(pid: int, *, with_ended_children: bool = False) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_ended_children else 13])) / _TICKS


def family_cpu_seconds(pid: int) -> float:
    """Of a server, the processes that it has started, and those that have ended."""
    total = cpu_seconds(pid, with_ended_children=True)
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(FileNotFoundError):
                total += family_cpu_seconds(int(child))
    return total


def memory_mb(pid: int, name: str) -> float:
    """``VmRSS`` now, or ``VmHWM`` at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


class Site:
    """The database and the Redis of one measurement."""

    def __init__(self, url: str, home: Path) -> None:
        self.database = Database(url)
        self.home = home

    def one(self, statement: str) -> Any:
        with self.database.reading() as connection:
            return connection.execute(sa.text(statement)).one()

    def servers(self) -> dict[str, int]:
        found = {"redis": int(next(self.home.rglob("redis.pid")).read_text())}
        if not self.database.is_sqlite:
            folder = self.one("SHOW data_directory")[0]
            found["postgresql"] = int((Path(folder) / "postmaster.pid").read_text().split()[0])
        return found

    def workers(self) -> int:
        return int(self.one("SELECT count(*) FROM workers WHERE heartbeat_at > 0")[0])

    def is_done(self) -> bool:
        opened = "SELECT count(*) FROM batches WHERE submitted_at IS NOT NULL"
        left = "SELECT EXISTS (SELECT 1 FROM shards WHERE state <> 'done')"
        return self.one(opened)[0] == 1 and not self.one(left)[0]

    def left(self) -> int:
        return int(self.one("SELECT count(*) FROM shards WHERE state <> 'done'")[0])

    def redis_mb(self) -> float:
        with Redis(unix_socket_path=str(socket_path_for(self.home / "redis"))) as client:
            return int(client.info("memory")["used_memory_peak"]) / _MIB  # type: ignore[index]

    def problems(self, requests: int) -> list[str]:
        counts = 'count(*) AS rows, count(DISTINCT "index") AS each, min("index") AS first, max("index") AS last'
        found = self.one(f"SELECT {counts} FROM completions")  # noqa: S608 - our own words
        states = self.one("SELECT sum(completed) AS completed, sum(requests) AS requests FROM shards")
        tokens = self.one("SELECT sum(completion_tokens) AS made, min(completion_tokens) AS least FROM completions")
        foreign = self.one("SELECT count(*) FROM results WHERE prompt_tokens <> length(prompt) OR state <> 'completed'")
        expected = [
            ("rows", found.rows, requests),
            ("requests with a row", found.each, requests),
            ("first index", found.first, 0),
            ("last index", found.last, requests - 1),
            ("requests of the shards", int(states.requests), requests),
            ("completed ones by the shards", int(states.completed), requests),
            ("tokens", int(tokens.made), requests * TOKENS),
            ("tokens of the shortest answer", tokens.least, TOKENS),
            ("answers that are not their prompt's", foreign[0], 0),
        ]
        return [f"{what}: {is_} instead of {wanted}" for what, is_, wanted in expected if is_ != wanted]


# ----------------------------------------------------------------------------------------------------- the run


def run(requests: int, kind: str, workers: int) -> Figures:
    folder = Path(tempfile.mkdtemp(prefix="batchjobs-throughput-"))
    home = folder / "home"
    figures = Figures(database=kind, requests=requests, workers=workers)
    try:
        with ExitStack() as opened:
            url = opened.enter_context(database_url(kind, folder))
            settings = {"BATCHJOBS_HOME": str(home), "BATCHJOBS_DATABASE_URL": url, "BATCHJOBS_METRICS_PORT": ""}
            environment = {**os.environ, **settings}
            schema.upgrade(url)
            site = Site(url, home)
            opened.callback(site.database.close)
            write_lines(folder / "lines.jsonl", requests, openai=False)
            logs = [folder / f"worker-{number}.log" for number in range(workers)]
            pids = [opened.enter_context(worker(environment, log)) for log in logs]
            wait_until(lambda: site.workers() == workers, "the workers are there")
            measure_all(site, figures, pids, folder / "lines.jsonl", environment)
            figures.problems = [*site.problems(requests), *complaints(logs)]
        return figures
    finally:
        stop_redis(home)
        shutil.rmtree(folder, ignore_errors=True)


def complaints(logs: list[Path]) -> list[str]:
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return [line for line in lines if " WARN" in line or " ERROR" in line]


def measure_all(site: Site, figures: Figures, pids: list[int], source: Path, environment: dict[str, str]) -> None:
    servers = site.servers()
    names = [*(f"worker {number}" for number in range(len(pids))), *servers]

    def used() -> dict[str, float]:
        spent = [*map(cpu_seconds, pids), *map(family_cpu_seconds, servers.values())]
        return dict(zip(names, spent, strict=True))

    before, begun = used(), time.monotonic()
    defaults = ["--max-tokens", str(TOKENS), "--temperature", "0"]
    submitted: list[Any] = []

    def submit() -> None:
        submitted.append(measure("submit", ["submit", str(source), *defaults], figures.requests, environment))
        figures.submit_seconds = time.monotonic() - begun

    submission = threading.Thread(target=submit)
    submission.start()
    shards = -(-figures.requests // 64)
    early: list[float] = []
    while submission.is_alive() or not submitted or not site.is_done():
        check_living(submission, submitted, pids)
        if not early and figures.submit_seconds and site.left() <= 0.75 * shards:
            early = [memory_mb(pid, "VmRSS") for pid in pids]
        time.sleep(POLL_SECONDS)
    figures.total_seconds = time.monotonic() - begun
    spent = used()
    figures.cpu_seconds = {name: spent[name] - before[name] for name in names}
    figures.cpu_seconds["submit"] = figures.requests / submitted[0].rows_per_cpu_second
    figures.submit_mb = submitted[0].peak_mb
    early = early or [memory_mb(pid, "VmRSS") for pid in pids]
    figures.workers_mb = [(then, memory_mb(pid, "VmHWM")) for then, pid in zip(early, pids, strict=True)]
    figures.redis_mb = site.redis_mb()


def check_living(submission: threading.Thread, submitted: list[Any], pids: list[int]) -> None:
    """Raises ClickException where nothing is left to wait for: submit failed, or a worker has ended."""
    if not submission.is_alive() and not submitted:
        raise click.ClickException("submit could not be measured; the error is above")
    if submitted and submitted[0].note:
        raise click.ClickException(f"submit: {submitted[0].note}")
    ended = [number for number, pid in enumerate(pids) if os.waitid(os.P_PID, pid, ENDED) is not None]
    if ended:
        raise click.ClickException(f"worker {ended[0]} has ended before the work was done")


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException(f"waited in vain until {what}")
        time.sleep(POLL_SECONDS)


def shown(figures: Figures) -> str:
    each = ", ".join(
        f"{name} {1e6 * seconds / figures.requests:.1f}" for name, seconds in sorted(figures.cpu_seconds.items())
    )
    memory = ", ".join(f"{then:.0f} then {peak:.0f}" for then, peak in figures.workers_mb)
    lines = [
        f"{figures.requests:,} requests, {figures.workers} workers, {figures.database}:"
        f" {figures.per_second:,.0f} a second",
        f"  by the clock: {figures.total_seconds:.2f} s, of them submit {figures.submit_seconds:.2f} s",
        f"  processor time of a request: {figures.cpu_microseconds:.1f} us ({each})",
        f"  memory in MB: submit {figures.submit_mb:.0f}; workers at a quarter and at most {memory};"
        f" Redis {figures.redis_mb:.1f}",
        *(f"  WRONG: {problem}" for problem in figures.problems[:20]),
    ]
    return "\n".join(lines)


@click.command()
@click.option("--requests", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--database", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(requests: int, workers: int, database: str, as_json: bool) -> None:
    figures = run(requests, database, workers)
    rates = {"per_second": figures.per_second, "cpu_microseconds": figures.cpu_microseconds}
    click.echo(json.dumps({**asdict(figures), **rates}) if as_json else shown(figures))
    sys.exit(1 if figures.problems else 0)


if __name__ == "__main__":
    main()
