"""Hosts whose clocks differ."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchjobs.queue import JobQueue
from batchjobs.settings import Settings, load_settings
from tests.support.batches import select, submit
from tests.support.cases import case
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from batchjobs.store import Store

ROOT = Path(__file__).parents[2]
AHEAD_SECONDS = 600
REQUESTS = 12

_SHIM = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {{
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += {AHEAD_SECONDS};
    return failed;
}}
int gettimeofday(struct timeval *at, void *zone) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}}
time_t time(time_t *at) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}}
"""


@pytest.fixture(scope="session")
def clock_ahead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process whose clock is ten minutes ahead of everybody else's."""
    compiler = shutil.which("cc")
    assert compiler is not None, "the tests need a C compiler"
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(_SHIM)
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@case("A-q-11")
def test_no_live_shard_is_taken_over(
    tmp_path: Path, database_url: str, redis_url: str, store: Store, clock_ahead: dict[str, str]
) -> None:
    settings = load_settings(
        home=tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        lease_seconds=1,
        heartbeat_seconds=0.3,
        max_requests_per_batch=4,
    )
    queue = JobQueue(redis_url)
    batch_id = submit(store, REQUESTS, shard_size=2)
    queue.enqueue(store.claimable(1000))
    workers = {
        "ahead": start(settings, "ahead", clock_ahead),
        "right": start(settings, "right", {}),
    }
    eventually(lambda: store.batch(batch_id).status.is_final, "both finish the batch", 60)
    logs = {}
    for name, worker in workers.items():
        worker.send_signal(signal.SIGTERM)
        _, logs[name] = worker.communicate(timeout=30)
        assert worker.returncode == 0, logs[name]
    rows = select(
        store, f"SELECT worker, attempt, text FROM completions WHERE batch_id = '{batch_id}' ORDER BY \"index\""
    )
    assert {row[0] for row in rows} == {"ahead", "right"}
    assert [(row[1], row[2]) for row in rows] == [(1, expected_text(f"prompt {i}", 8)) for i in range(REQUESTS)]
    attempts = select(store, f"SELECT max(attempts) FROM shards WHERE batch_id = '{batch_id}'")
    assert attempts == [(1,)], "nobody claimed what was held"
    assert "the clock of this host is 600 s ahead of that of the database" in logs["ahead"]
    assert "clock" not in logs["right"]
    queue.close()


def start(settings: Settings, name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Its requests take more than two leases each."""
    command = [sys.executable, "-m", "tests.support.workers", name, "--step-seconds=0.3"]
    return subprocess.Popen(
        command, cwd=ROOT, env=settings.as_environment() | environment, stderr=subprocess.PIPE, text=True
    )
