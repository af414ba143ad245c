"""How soon the work of a killed worker goes on, with default settings.

python -m tests.chaos.recovery --rounds 3

Two workers share a batch, one of them gets SIGKILL, and nobody replaces it. Measured: until the other one holds all of
its shards, and until the first token of them that the killed worker had not made. More than 30 s is a failure.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from batchjobs.database import Database
from batchjobs.store import Store
from tests.chaos.audit import Audit, rows_of
from tests.chaos.cluster import Cluster, stub_worker
from tests.chaos.figures import recoveries
from tests.chaos.notes import keep_notes
from tests.chaos.producers import Producers
from tests.chaos.workload import Job, stub_jobs

LIMIT_SECONDS = 30.0
_STEP_SECONDS = 0.05
_TOKENS = 300
_REQUESTS = 48
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from SIGKILL to the last new lease, and to the first new token."""

    leased: float
    token: float

    @property
    def is_soon(self) -> bool:
        return max(self.leased, self.token) <= LIMIT_SECONDS


def measure(database: str, rounds: int, folder: Path) -> tuple[list[Recovery], list[str]]:
    """The rounds, and what the audit of all of them found."""
    jobs = stub_jobs(_REQUESTS * rounds, rounds, seed=1, tokens=_TOKENS)
    for job in jobs:
        job.shard_size = 4
    with (
        (folder / "events.log").open("w") as log,
        warnings.catch_warnings(),
        Cluster(folder, database, 2, stub_worker(_STEP_SECONDS), {}, log) as cluster,
    ):
        warnings.simplefilter("ignore", UserWarning)
        sql, store = Database(cluster.sql.url), Store(cluster.sql.url)
        try:
            keep_notes(sql)
            producers = Producers(cluster, jobs, ())
            found = [_round(cluster, producers, sql, store, job) for job in jobs]
            cluster.stop_workers()
            return found, [*cluster.problems, *Audit(sql, store, jobs).run()]
        finally:
            sql.close()
            store.close()


def _round(cluster: Cluster, producers: Producers, database: Database, store: Store, job: Job) -> Recovery:
    _wait(lambda: _all_started(cluster), "two workers have started")
    producers.submit(job)
    assert job.batch_id is not None
    query = "SELECT DISTINCT owner FROM shards WHERE state = 'leased'"
    _wait(lambda: len(rows_of(database, query)) == 2, "both workers hold shards")
    _wait(lambda: _checkpointed(database) >= _REQUESTS / 2, "checkpoints are stored")
    name = cluster.kill(cluster.slots[0])
    assert name is not None
    killed_at = cluster.kills[-1][1]
    held = rows_of(database, "SELECT * FROM shards WHERE state = 'leased' AND owner = :name", {"name": name})
    indexes = {index for shard in held for index in range(shard.first_index, shard.last_index + 1)}
    _wait(lambda: store.batch(job.batch_id or "").status.is_final, "the batch is finished")
    [leased] = recoveries(database, [(name, killed_at)])
    return Recovery(leased, _first_token(store, job, indexes, name, killed_at))


def _all_started(cluster: Cluster) -> bool:
    cluster.look_after()
    return all(slot.worker is not None and slot.worker.has_started for slot in cluster.slots)


def _checkpointed(database: Database) -> int:
    return int(rows_of(database, "SELECT count(*) AS requests FROM checkpoints")[0].requests)


def _first_token(store: Store, job: Job, indexes: set[int], killed: str, killed_at: float) -> float:
    """Seconds from the kill to the first later token of these requests."""
    assert job.batch_id is not None
    instants = [
        (row.started_at + timedelta(seconds=seconds)).timestamp()
        for result in store.results(job.batch_id)
        if result.request.index in indexes
        for row in result.choices
        if row.started_at is not None and row.worker != killed
        for seconds in row.token_times
    ]
    return min(instant for instant in instants if instant > killed_at) - killed_at


def _wait(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE_SECONDS:.0f} s in vain until {what}")
        time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.recovery", description=__doc__.split("\n")[0])
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="bj-chaos-"))
    found, violations = measure(chosen.database, chosen.rounds, folder)
    for number, each in enumerate(found, 1):
        print(
            f"{chosen.database}, round {number}: {each.leased:.1f} s from SIGKILL until another worker held all shards,"
            f" {each.token:.1f} s until their first new token"
        )
    for violation in violations:
        print(f"VIOLATION {violation}")
    failed = bool(violations) or not all(each.is_soon for each in found)
    print(f"FAILED: at most {LIMIT_SECONDS:.0f} s are allowed; logs are in {folder}" if failed else "passed")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
