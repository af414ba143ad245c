"""Those who submit and cancel: as users do, they try again until it worked."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from batchjobs.client import Client
from batchjobs.errors import ConnectionFailed
from tests.chaos.cluster import ROOT, Cluster
from tests.chaos.workload import Job

PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.2

T = TypeVar("T")


class Producers:
    """Submits jobs at their time; ``reserved`` ones are kept for the faults that a submission may meet.

    Raises whatever is not an outage: a submission that is refused fails the run.
    """

    def __init__(self, cluster: Cluster, jobs: Iterable[Job], reserved: Iterable[Job]) -> None:
        self.jobs = list(jobs)
        self._reserved = list(reserved)
        self.all_jobs = [*self.jobs, *self._reserved]
        self._cluster = cluster
        folder = cluster.folder / "files"
        folder.mkdir()
        self._files = {job.key: job.write(folder) for job in self.all_jobs}
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Submits until it is known to have worked."""
        path = self._files[job.key]
        with self._cluster.client() as client:
            made = self._again(lambda: client.submit(path, key=job.key, shard_size=job.shard_size))
        with self._lock:
            job.submitted_as.add(made.id)
            job.batch_id = made.id
        self._cluster.say(f"submitted {job.key}: {made.id}, {len(job.lines)} requests")

    def submit_twice(self) -> str | None:
        """The same file by two producers at the same time."""
        job = self._next()
        if job is None:
            return None
        with ThreadPoolExecutor(2) as both:
            for done in [both.submit(self.submit, job), both.submit(self.submit, job)]:
                done.result()
        return job.key

    def kill_submit(self) -> str | None:
        """A submission is killed half-way, and made again."""
        job = self._next()
        if job is None:
            return None
        chunk = str(max(1, len(job.lines) // 3))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.chaos.submitter", str(self._files[job.key])),
                *(job.key, str(job.shard_size), chunk),
            ],
            cwd=ROOT,
            env=self._cluster.client_slot.settings.as_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            said = _first_line(process)
            process.kill()
        self.submit(job)
        return f"{job.key} ({said or 'it met an outage before'})"

    def submit_rest(self) -> None:
        """The reserved ones for which no fault has come."""
        while (job := self._next()) is not None:
            self.submit(job)

    def _next(self) -> Job | None:
        with self._lock:
            return self._reserved.pop(0) if self._reserved else None

    # Cancelling

    def cancel_batch(self, lot: float) -> str | None:
        job = self._unfinished(lot)
        if job is None or job.batch_id is None:
            return None
        batch_id, job.cancelled = job.batch_id, True
        with self._cluster.client() as client:
            self._again(lambda: client.cancel_batch(batch_id))
        return job.key

    def cancel_requests(self, lot: float) -> str | None:
        """Some of a batch, wherever they are."""
        job = self._unfinished(lot)
        if job is None or job.batch_id is None:
            return None
        batch_id = job.batch_id
        chosen = sorted(random.Random(lot).sample(range(len(job.lines)), min(8, len(job.lines))))
        job.cancelled_requests.update(chosen)
        with self._cluster.client() as client:
            for index in chosen:
                self._again(partial(client.cancel_request, batch_id, index))
        return f"{job.key} {chosen}"

    def _unfinished(self, lot: float) -> Job | None:
        with self._cluster.client() as client:
            submitted = [(job, job.batch_id) for job in self.all_jobs if job.batch_id is not None]
            candidates = [job for job, batch_id in submitted if not self._again(partial(_is_final, client, batch_id))]
        return candidates[int(lot * len(candidates))] if candidates else None

    def _again(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(ConnectionFailed):
                return attempt()
            if time.monotonic() > deadline:
                return attempt()
            time.sleep(_PAUSE_SECONDS)


def _is_final(client: Client, batch_id: str) -> bool:
    return client.batch(batch_id).status.is_final


def _first_line(process: subprocess.Popen[str]) -> str:
    """Empty when the process ended without a word."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
