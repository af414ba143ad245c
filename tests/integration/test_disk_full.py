"""Disks that are full: of the database, of Redis, and of the file that somebody writes.

A process that may write files of a certain size only stands for a full disk, because every system offers that to
everybody. Some tests let the database itself say that it is full.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import RedisError
from sqlalchemy import event

from batchjobs.client import Client
from batchjobs.queue import JobQueue
from batchjobs.store import Store
from batchjobs.types import Priority, RequestStatus
from tests.support.batches import answer, claim, request, submit
from tests.support.cases import case
from tests.support.redis import RedisServer
from tests.support.running import (
    completions,
    enqueue,
    is_complete,
    open_batch,
    postgresql,
    queue,
    settings,
    sqlite,
    start,
)
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.settings import Settings
    from tests.support.workers import ThreadWorker

__all__ = ["queue", "settings", "start"]

ROOT = Path(__file__).parents[2]
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def batchjobs(
    settings: Settings, *arguments: object, file_bytes: int | None = None, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command in a process of its own, which may write files of ``file_bytes`` at most."""

    def limit() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))

    return subprocess.run(
        [sys.executable, "-m", "batchjobs", *map(str, arguments)],
        cwd=ROOT,
        env=settings.as_environment(),
        capture_output=True,
        input=stdin,
        timeout=60,
        preexec_fn=limit,
    )


def long_requests(count: int, tokens: int = 150) -> list[Any]:
    """Each answer takes several kilobytes."""
    return [request(index, prompt=f"p{index}", max_tokens=tokens) for index in range(count)]


def warnings_in(log: str | list[logging.LogRecord]) -> list[str]:
    lines = log.splitlines() if isinstance(log, str) else [r.getMessage() for r in log if r.levelno >= logging.WARNING]
    return [line for line in lines if "recording outcomes failed" in line]


# ---------------------------------------------------------------------------------------------------------- the worker


class FullDatabase:
    """A SQLite file that may not grow, for the connections of one store."""

    def __init__(self, store: Store) -> None:
        self._engine = store._database.engine
        self._pages = 0
        event.listen(self._engine, "checkout", self._limit)

    def fill(self) -> None:
        with self._engine.connect() as connection:
            self._pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    def empty(self) -> None:
        self._pages = 0

    def _limit(self, connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {self._pages or 2**30}")


@sqlite
def test_a_worker_waits_for_space_and_loses_nothing(
    start: Callable[..., ThreadWorker],
    store: Store,
    queue: JobQueue,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.intake.MAX_BACKLOG", 8)
    batch_id = open_batch(store, *long_requests(60), shard_size=4)
    enqueue(store, queue)
    disk = FullDatabase(store)
    worker = start()
    worker.loop.hold()
    eventually(lambda: worker.loop.stats().running + worker.loop.stats().waiting >= 16, "it holds some")
    disk.fill()
    worker.loop.release()
    eventually(lambda: warnings_in(caplog.records), "it gives an alarm")
    [alarm] = warnings_in(caplog.records)
    assert "database or disk is full; free some space on that disk; nothing was written" in alarm
    eventually(lambda: worker.loop.stats().running + worker.loop.stats().waiting == 0, "what it holds is generated")
    stored = store.batch(batch_id).counts.completed
    done = queue.queues[Priority.DEFAULT].finished_job_registry
    assert stored < 60
    assert done.count <= stored // 4, "nothing is acknowledged that is not stored"
    assert worker.daemon._recorder.backlog > 8
    assert store.batch(batch_id).counts.queued > 0, "and nothing more is begun"
    disk.empty()
    eventually(lambda: is_complete(store, batch_id), "it goes on by itself", 30)
    found = completions(store, batch_id)
    assert [c.text for c in found] == [expected_text(f"p{index}", 150) for index in range(60)]
    assert {c.status for c in found} == {RequestStatus.COMPLETED}
    assert len(warnings_in(caplog.records)) <= 3, "an outage is said once"
    assert worker.stop() == 0


@sqlite
def test_a_worker_process_on_a_full_disk(settings: Settings, store: Store, queue: JobQueue) -> None:
    """Its process may not make the database's log any longer, and later it may."""
    batch_id = open_batch(store, *long_requests(40), shard_size=4)
    enqueue(store, queue)
    worker = ProcessWorker(settings, "w1", step_seconds=0.002)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it stores", 30)
    log = Path(settings.database_url.removeprefix("sqlite:///") + "-wal")
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY))
    assert worker.process.stderr is not None
    said = ""
    while "recording outcomes failed" not in said:
        line = worker.process.stderr.readline()
        assert line, said
        said += line
    assert "check that disk; nothing was written" in said or "free some space on that disk" in said
    before = store.batch(batch_id).counts
    assert before.completed < 40
    assert worker.process.poll() is None
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, UNLIMITED)
    eventually(lambda: is_complete(store, batch_id), "it goes on", 30)
    worker.signal(signal.SIGTERM)
    assert worker.join()[0] == 0
    assert [c.text for c in completions(store, batch_id)] == [expected_text(f"p{index}", 150) for index in range(40)]
    with store._database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]


@postgresql
def test_a_full_disk_of_postgresql_is_waited_for(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says SQLSTATE 53100 when it cannot extend a file; a trigger stands for the disk."""
    batch_id = submit(store, 16)
    enqueue(store, queue)
    with store._database.writing() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'could not extend file \"base/1/2\": No space left on device' USING ERRCODE = '53100'; "
            "END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER full_disk BEFORE INSERT ON completions FOR EACH STATEMENT EXECUTE FUNCTION no_space()"
        )
    worker = start()
    eventually(lambda: warnings_in(caplog.records), "it gives an alarm")
    assert "No space left on device" in warnings_in(caplog.records)[0]
    assert "nothing was written, try again" in warnings_in(caplog.records)[0]
    assert completions(store, batch_id) == []
    assert queue.queues[Priority.DEFAULT].finished_job_registry.count == 0
    with store._database.writing() as connection:
        connection.exec_driver_sql("DROP TRIGGER full_disk ON completions")
    eventually(lambda: is_complete(store, batch_id), "it goes on")
    assert {(c.status, c.attempt) for c in completions(store, batch_id)} == {(RequestStatus.COMPLETED, 1)}
    assert worker.stop() == 0


# ------------------------------------------------------------------------------------------------------------- commands


def prompts(count: int) -> bytes:
    lines = (json.dumps({"custom_id": f"q{number}", "prompt": f"{number} " + "x" * 500}) for number in range(count))
    return "\n".join(lines).encode()


@sqlite
def test_a_submission_on_a_full_disk_can_be_made_again(settings: Settings, store: Store, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompts(4000))
    for options in ((), ("--key", "k")):
        refused = batchjobs(settings, "submit", source, *options, file_bytes=700_000)
        said = refused.stderr.decode()
        assert (refused.returncode, refused.stdout) == (3, b""), said
        assert "check that disk; nothing was written" in said or "free some space on that disk" in said
        assert "Traceback" not in said
        assert [info for info in store.batches() if info.submitted_at] == [], "nothing of it can run"
    made = [batchjobs(settings, "submit", source, *options) for options in ((), ("--key", "k"))]
    assert [done.returncode for done in made] == [0, 0], made
    plain, keyed = (done.stdout.decode().strip() for done in made)
    for batch_id in (plain, keyed):
        assert store.batch(batch_id).counts.total == 4000
        assert [result.request.custom_id for result in store.results(batch_id)] == [f"q{n}" for n in range(4000)]


@sqlite
def test_a_keyed_submission_of_standard_input_says_what_is_full(settings: Settings, store: Store) -> None:
    """Standard input is kept in a temporary file, so that it can be read twice."""
    refused = batchjobs(settings, "submit", "-", "--key", "k", file_bytes=200_000, stdin=prompts(40_000))
    said = refused.stderr.decode()
    assert refused.returncode in (1, 3), said
    assert "File too large" in said or "disk" in said
    assert "Traceback" not in said
    assert [info for info in store.batches() if info.submitted_at] == []


@sqlite
@case("A-out-04")
def test_results_on_a_full_disk_leave_the_old_file(settings: Settings, store: Store, tmp_path: Path) -> None:
    batch_id = submit(store, 1000, shard_size=1000)
    lease = claim(store, batch_id)
    store.record([(lease, answer(index, tokens=50)) for index in range(1000)])
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "answers.jsonl"
    target.write_text("old\n")
    for form in ("jsonl", "csv"):
        failed = batchjobs(settings, "results", batch_id, "-o", target, "--force", "--format", form, file_bytes=60_000)
        said = failed.stderr.decode()
        assert failed.returncode == 1, said
        assert said == f"batchjobs: {target}: File too large\n"
        assert [path.name for path in folder.iterdir()] == ["answers.jsonl"]
        assert target.read_text() == "old\n"
    done = batchjobs(settings, "results", batch_id, "-o", target, "--force")
    assert done.returncode == 0
    assert len(target.read_text().splitlines()) == 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@sqlite
@case("A-out-04")
def test_results_to_a_standard_output_that_is_full(settings: Settings, store: Store) -> None:
    batch_id = submit(store, 4)
    lease = claim(store, batch_id)
    store.record([(lease, answer(index)) for index in range(4)])
    for arguments in (("results", batch_id), ("status", batch_id, "--json")):
        with open("/dev/full", "wb") as full:
            failed = subprocess.run(
                [sys.executable, "-m", "batchjobs", *arguments],
                cwd=ROOT,
                env=settings.as_environment(),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert (failed.returncode, failed.stderr) == (1, "batchjobs: standard output: No space left on device\n")


# --------------------------------------------------------------------------------------------------------------- Redis


class LimitedRedis(RedisServer):
    """A server whose append-only file can be made to grow no more: it then refuses to write (MISCONF)."""

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def fill(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def empty(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, UNLIMITED)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="bj-redis-"))
    server = LimitedRedis(folder, "--appendfsync", "everysec")
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


@sqlite
def test_a_redis_that_cannot_write_its_file_holds_no_worker_up(
    start: Callable[..., ThreadWorker],
    settings: Settings,
    store: Store,
    queue: JobQueue,
    redis_server: LimitedRedis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch_id = open_batch(store, *long_requests(40, tokens=20))
    enqueue(store, queue)
    worker = start(step_seconds=0.005)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    redis_server.fill()
    eventually(lambda: _refuses(queue), "Redis refuses to write")
    with Client(settings) as client, pytest.warns(UserWarning, match="the batch is stored, but not queued yet"):
        later = client.submit([{"prompt": f"p{number}", "max_tokens": 4} for number in range(8)], shard_size=4)
    eventually(lambda: is_complete(store, batch_id), "the worker goes on", 30)
    redis_server.empty()
    eventually(lambda: not _refuses(queue), "Redis writes again")
    eventually(lambda: is_complete(store, later.id), "what Redis had refused is done", 30)
    last = submit(store, 4)
    enqueue(store, queue)
    eventually(lambda: is_complete(store, last), "shards come through Redis again")
    assert [c.attempt for c in completions(store, batch_id)] == [1] * 40
    assert worker.stop() == 0
    assert "MISCONF" in caplog.text


def _refuses(queue: JobQueue) -> bool:
    try:
        queue.connection.set("probe", "x")
    except RedisError:
        return True
    return False
