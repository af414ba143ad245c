"""A run under faults, and its audit.

python -m tests.chaos.run --database postgresql --engine stub --seconds 120 --requests 50000 --faults 100 --seed 7

It prints what it saw. Exit code 1: something was lost, doubled, wrong or left behind, and the sentences say what. The
folder with all logs is then kept.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchjobs.database import Database
from batchjobs.errors import BatchjobsError
from batchjobs.store import Store
from tests.chaos import figures
from tests.chaos.audit import Audit
from tests.chaos.books import known_workers, left_in_redis, unfinished_shards
from tests.chaos.cluster import Cluster, Command, real_worker, stub_worker
from tests.chaos.faults import Faults
from tests.chaos.notes import keep_notes
from tests.chaos.producers import Producers
from tests.chaos.schedule import Fault, Kind, draw
from tests.chaos.workload import Job, real_jobs, stub_jobs

FAST: dict[str, Any] = {
    "lease_seconds": 3.0,
    "heartbeat_seconds": 1.0,
    "checkpoint_seconds": 1.0,
    "max_requests_per_batch": 32,
}
"""Settings of a run: everything that takes a while, taken sooner."""

_REAL = {"checkpoint_seconds": 0.5, "max_requests_per_batch": 8, "num_blocks": 600, "device": "cpu", "dtype": "float32"}
"""A model this small would be done at once, so it answers few requests at a time."""

LONGEST_SECONDS = 4.0
"""Outages last from half of this to all of it: some outlive the leases."""

_LOOK_SECONDS = 0.05
_REDIS_SECONDS = 80.0
"""Workers clear RQ's books of what dead ones left once a minute."""

_SUBMITTING = 0.8
"""The share of the time over which batches are submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is asked of a run.

    ``limit_seconds`` is how long it may take altogether, ``longest_gap`` how many seconds may pass without an outcome:
    recovery that comes at last, but too late, is a failure.
    """

    database: str
    engine: str = "stub"
    seconds: float = 120.0
    requests: int = 50_000
    faults: int = 100
    workers: int = 3
    seed: int = 7
    tokens: int = 16
    limit_seconds: float = 600.0
    longest_gap: float = 30.0
    allow_crashed: bool = False


@dataclass(slots=True)
class Result:
    """``violations`` are sentences; none of them means that the run passed."""

    violations: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    done: dict[Kind, int] = field(default_factory=dict)


def run(options: Options, folder: Path) -> Result:
    """One run in an empty folder, whose path must be short: there will be sockets in it."""
    schedule = draw(options.seed, options.faults, options.seconds, options.database, LONGEST_SECONDS)
    jobs, command, settings = _work(options, folder, schedule)
    began = time.monotonic()
    with (
        (folder / "events.log").open("w") as log,
        warnings.catch_warnings(),
        Cluster(folder, options.database, options.workers, command, settings, log) as cluster,
    ):
        warnings.simplefilter("ignore", UserWarning)  # a submission without Redis says so
        database, store = Database(cluster.sql.url), Store(cluster.sql.url)
        try:
            keep_notes(database)
            result = Result()
            reserved = sum(fault.kind in (Kind.SUBMIT_TWICE, Kind.KILL_SUBMIT) for fault in schedule)
            producers = Producers(cluster, jobs[reserved:], jobs[:reserved])
            faults = Faults(cluster, producers, database)
            cluster.start_workers()
            finished = _Play(options, cluster, producers, faults, store).play(schedule)
            busy = time.monotonic() - began
            result.violations += faults.errors
            if not finished:
                result.violations.append(f"the batches were not finished after {options.limit_seconds:.0f} s")
            result.violations += left_in_redis(cluster, _REDIS_SECONDS) if finished else []
            stopped = cluster.stop_workers()
            result.violations += [*unfinished_shards(cluster), *known_workers(cluster, stopped)] if finished else []
            result.violations += cluster.problems
            audit = Audit(database, store, jobs, allow_crashed=options.allow_crashed)
            result.violations += audit.run()
            if (gap := figures.longest_gap(database)) > options.longest_gap:
                result.violations.append(
                    f"for {gap:.1f} s no outcome was stored, {options.longest_gap:.0f} s are allowed"
                )
            if result.violations:
                cluster.sql.dump()
            result.done = dict(faults.done)
            result.lines = _figures(options, cluster, faults, audit, database, busy)
        finally:
            database.close()
            store.close()
    return result


def _work(options: Options, folder: Path, schedule: Sequence[Fault]) -> tuple[list[Job], Command, dict[str, Any]]:
    """The batches, how a worker is started, and the settings."""
    reserved = sum(fault.kind in (Kind.SUBMIT_TWICE, Kind.KILL_SUBMIT) for fault in schedule)
    batches = reserved + max(4, int(options.seconds / 10))
    if options.engine == "stub":
        jobs = stub_jobs(options.requests, batches, options.seed, options.tokens)
        return jobs, stub_worker(_step_seconds(options)), dict(FAST)
    from tests.support.models import save_chat_model

    model = save_chat_model(folder / "model", seed=options.seed)
    jobs = real_jobs(model, options.requests, batches, options.seed, options.tokens)
    return jobs, real_worker(model), {**FAST, **_REAL}


def _step_seconds(options: Options) -> float:
    """So slow that undisturbed workers would be busy for two thirds of the time."""
    at_once = options.workers * int(FAST["max_requests_per_batch"])
    return 0.66 * options.seconds * at_once / (options.requests * options.tokens)


class _Play:
    """Batches and faults at their times, until everything has ended."""

    def __init__(self, options: Options, cluster: Cluster, producers: Producers, faults: Faults, store: Store) -> None:
        self._options = options
        self._cluster = cluster
        self._producers = producers
        self._faults = faults
        self._store = store
        self._futures: list[Future[None]] = []

    def play(self, schedule: Sequence[Fault]) -> bool:
        """Whether all batches were finished in time."""
        began = time.monotonic()
        jobs = self._producers.jobs
        pause = _SUBMITTING * self._options.seconds / max(1, len(jobs) - 1)
        due: list[tuple[float, Callable[[], None]]] = [
            *((number * pause, partial(self._producers.submit, job)) for number, job in enumerate(jobs)),
            *((fault.at_seconds, partial(self._faults.do, fault)) for fault in schedule),
        ]
        due.sort(key=lambda each: each[0])
        with ThreadPoolExecutor(32) as threads:
            for at_seconds, action in due:
                self._look_until(began + at_seconds)
                self._futures.append(threads.submit(action))
            while not all(future.done() for future in self._futures):
                self._look_until(time.monotonic() + _LOOK_SECONDS)
            rest = threads.submit(self._producers.submit_rest)
            while not rest.done():
                self._look_until(time.monotonic() + _LOOK_SECONDS)
        for future in [*self._futures, rest]:
            if (error := future.exception()) is not None:
                self._faults.errors.append(f"a submission failed: {type(error).__name__}: {error}")
        while not (finished := self._is_finished()) and time.monotonic() - began < self._options.limit_seconds:
            self._look_until(time.monotonic() + 0.3)
        return finished

    def _look_until(self, moment: float) -> None:
        """Keeps workers running meanwhile."""
        while True:
            self._cluster.look_after()
            left = moment - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_SECONDS))

    def _is_finished(self) -> bool:
        try:
            return all(
                job.batch_id is None or self._store.batch(job.batch_id).status.is_final
                for job in self._producers.all_jobs
            )
        except BatchjobsError:
            return False


def _figures(
    options: Options, cluster: Cluster, faults: Faults, audit: Audit, database: Database, busy: float
) -> list[str]:
    stored, generated = figures.tokens(database)
    recovered = figures.recoveries(database, cluster.kills)
    seen, counts = audit.figures, cluster.counts
    kinds = [f"{faults.done[kind]:4d}  {kind}" for kind in Kind if faults.done[kind]]
    missed = sum(faults.missed.values())
    return [
        f"{options.database}, {options.engine}, seed {options.seed}: {busy:.0f} s, {options.workers} workers at a time",
        f"{seen['requests']} requests, {seen['completed']} answers, {seen['cancelled']} cancelled, "
        f"{seen['failed']} failed, {seen['tokens']} tokens",
        f"{sum(faults.done.values())} faults ({missed} more found nothing to do):",
        *kinds,
        f"{len(cluster.kills)} workers killed, {counts['worker processes']} started, "
        f"{counts['starts in an outage']} of them in an outage, in vain",
        *([f"answers that differ by rounding alone: {seen['rounded']}"] if options.engine == "tiny" else []),
        f"tokens stored: {stored}; generated: at least {generated}, as far as workers that were killed had told",
        f"shards split because workers had died with them: {figures.splits(database)}",
        f"answers that went on from another worker's checkpoint: {figures.continued(database)}",
        f"longest time without an outcome: {figures.longest_gap(database):.1f} s",
        f"from SIGKILL to new leases: {figures.spread(recovered)}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.split("\n")[0])
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--engine", choices=["stub", "tiny"], default="stub", help="tiny: a small random model")
    parser.add_argument("--seconds", type=float, default=120.0, help="over how long batches and faults are spread")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7, help="of the schedule and of the batches")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, in the mean")
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="then it has failed")
    parser.add_argument("--longest-gap", type=float, default=30.0, help="seconds that may pass without an outcome")
    parser.add_argument("--allow-crashed", action="store_true", help="requests may fail with worker_crashed")
    parser.add_argument("--keep", action="store_true", help="keep the folder, whatever comes out")
    chosen = vars(parser.parse_args(arguments))
    keep = chosen.pop("keep")
    folder = Path(tempfile.mkdtemp(prefix="bj-chaos-"))
    result = run(Options(**chosen), folder)
    print(*result.lines, sep="\n")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    print("FAILED" if result.violations else "passed: every request has exactly one outcome, and it is the right one")
    if result.violations or keep:
        print(f"logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())
