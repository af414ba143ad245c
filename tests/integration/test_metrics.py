"""The exporter of queue and store: on real servers with known content, and with each of them away."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from batchjobs.cli.metrics import PORT
from batchjobs.metrics import WORKER_STATES, Exporter, Probe
from batchjobs.queue import JobQueue
from batchjobs.settings import load_settings
from batchjobs.store import Store, WorkerFigures, WorkerInfo
from batchjobs.types import Priority, ShardId
from tests.support.batches import claim, create, finish, submit
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]

FAMILIES = {
    "batchjobs_up",
    "batchjobs_shards",
    "batchjobs_batches",
    "batchjobs_batches_paused",
    "batchjobs_oldest_ready_seconds",
    "batchjobs_workers",
    "batchjobs_queue_depth",
    "batchjobs_redis_memory_used_bytes",
    "batchjobs_redis_memory_max_bytes",
}
OF_REDIS = {name for name in FAMILIES if "redis" in name or "queue" in name}

Look = Callable[[], dict[str, dict[str, float]]]


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Of each family its samples by the value of their label, or by nothing."""
    families: list[Metric] = list(text_string_to_metric_families(text))
    assert {family.name for family in families} == FAMILIES  # each always, with samples or without
    assert {family.type for family in families} == {"gauge"}
    return {f.name: {",".join(s.labels.values()): s.value for s in f.samples} for f in families}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHJOBS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def exporters() -> Iterator[list[Exporter]]:
    made: list[Exporter] = []
    yield made
    for exporter in made:
        exporter.close()


@pytest.fixture
def exporter_of(exporters: list[Exporter]) -> Callable[..., Look]:
    """Makes an exporter that keeps no answer, so that each look asks."""

    def make(**settings: Any) -> Look:
        exporter = Exporter(load_settings(**settings), cache_seconds=0, patience_seconds=20)
        exporters.append(exporter)
        return lambda: parsed(exporter.text())

    return make


def worker(name: str) -> WorkerInfo:
    return WorkerInfo(
        name=name, host="h", pid=1, device="cpu", dtype="float32", model="tiny", model_version="v", state="idle"
    )


class TestKnownContent:
    def test_shards_and_batches_that_have_not_ended(
        self, store: Store, database_url: str, redis_url: str, exporter_of: Callable[..., Look]
    ) -> None:
        look = exporter_of(database_url=database_url, redis_url=redis_url)
        empty = look()
        assert empty["batchjobs_shards"] == {"ready": 0, "leased": 0, "done": 0}
        assert empty["batchjobs_batches"] == {"loading": 0, "queued": 0, "running": 0, "cancelling": 0}
        assert empty["batchjobs_oldest_ready_seconds"] == {"": 0}

        ended = submit(store, 3, shard_size=1)
        for shard_no in range(3):
            finish(store, claim(store, ended, shard_no))
        running = submit(store, 5, shard_size=1)
        finish(store, claim(store, running, 0))
        claim(store, running, 1)
        submit(store, 8)
        create(store)
        seen = look()
        assert seen["batchjobs_shards"] == {"ready": 3 + 2, "leased": 1, "done": 1}
        assert seen["batchjobs_batches"] == {"loading": 1, "queued": 1, "running": 1, "cancelling": 0}
        assert seen["batchjobs_batches_paused"] == {"": 0}
        assert seen["batchjobs_up"] == {"database": 1, "redis": 1}

    def test_work_that_waits_has_an_age_unless_it_is_paused(
        self, store: Store, database_url: str, redis_url: str, exporter_of: Callable[..., Look]
    ) -> None:
        look = exporter_of(database_url=database_url, redis_url=redis_url)
        begun = time.monotonic()
        batch = submit(store, 2)
        age = eventually(lambda: look()["batchjobs_oldest_ready_seconds"][""], "the batch has an age")
        assert age <= time.monotonic() - begun + 0.1
        older = eventually(lambda: (now := look()["batchjobs_oldest_ready_seconds"][""]) > age and now, "it grows")
        assert older <= time.monotonic() - begun + 0.1
        store.pause_batch(batch)
        paused = look()
        assert paused["batchjobs_oldest_ready_seconds"] == {"": 0}
        assert paused["batchjobs_batches_paused"] == {"": 1}
        assert paused["batchjobs_batches"]["queued"] == 1
        store.resume_batch(batch)
        claim(store, batch)
        assert look()["batchjobs_oldest_ready_seconds"] == {"": 0}

    def test_workers_by_state_with_all_states_always(
        self, store: Store, database_url: str, redis_url: str, exporter_of: Callable[..., Look]
    ) -> None:
        look = exporter_of(database_url=database_url, redis_url=redis_url)
        assert look()["batchjobs_workers"] == dict.fromkeys(WORKER_STATES, 0)
        for name in ("a", "b", "c", "d"):
            store.register_worker(worker(name))
        store.beat("b", WorkerFigures(state="busy"))
        store.beat("c", WorkerFigures(state="a state of tomorrow"))
        store.retire_worker("d", "stopped")
        known = dict.fromkeys(WORKER_STATES, 0) | {"idle": 1, "busy": 1, "stopped": 1}
        assert look()["batchjobs_workers"] == known | {"a state of tomorrow": 1}

    def test_redis_by_queue_and_memory(
        self, migrated_sqlite_file: Path, redis_server: RedisServer, exporter_of: Callable[..., Look]
    ) -> None:
        look = exporter_of(database_url=f"sqlite:///{migrated_sqlite_file}", redis_url=redis_server.url)
        with closing(JobQueue(redis_server.url)) as queue:
            queue.enqueue([(ShardId("B", number), Priority.HIGH if number else Priority.LOW) for number in range(4)])
        with closing(redis_server.client()) as client:
            client.config_set("maxmemory", 64 * 2**20)
        seen = look()
        assert seen["batchjobs_queue_depth"] == {"high": 3, "default": 0, "low": 1}
        assert seen["batchjobs_redis_memory_max_bytes"] == {"": 64 * 2**20}
        assert 100_000 < seen["batchjobs_redis_memory_used_bytes"][""] < 64 * 2**20


def assert_only(seen: dict[str, dict[str, float]], service: str) -> None:
    """One service answers, and of the other one nothing is claimed."""
    other = "redis" if service == "database" else "database"
    assert seen["batchjobs_up"] == {service: 1, other: 0}
    known = {name for name, samples in seen.items() if samples}
    assert known - {"batchjobs_up"} == (OF_REDIS if service == "redis" else FAMILIES - OF_REDIS - {"batchjobs_up"})


class TestAway:
    def test_redis_goes_and_comes_back(
        self,
        database_url: str,
        redis_server: RedisServer,
        exporter_of: Callable[..., Look],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO, "batchjobs.metrics")
        look = exporter_of(database_url=database_url, redis_url=redis_server.url)
        assert look()["batchjobs_up"] == {"database": 1, "redis": 1}
        redis_server.kill()
        assert_only(look(), "database")
        assert_only(look(), "database")
        redis_server.start()
        assert look()["batchjobs_up"] == {"database": 1, "redis": 1}
        away, back = caplog.messages  # once for an outage, however many scrapes
        assert away.startswith("Redis does not answer: the Redis at unix://")
        assert back == "Redis answers again"

    def test_a_redis_that_hangs_holds_no_scrape_up(
        self, migrated_sqlite_file: Path, redis_server: RedisServer, exporters: list[Exporter]
    ) -> None:
        settings = load_settings(database_url=f"sqlite:///{migrated_sqlite_file}", redis_url=redis_server.url)
        exporter = Exporter(settings, cache_seconds=0, patience_seconds=0.5)
        exporters.append(exporter)
        eventually(lambda: parsed(exporter.text())["batchjobs_up"] == {"database": 1, "redis": 1}, "both answer")
        redis_server.freeze()
        begun = time.monotonic()
        try:
            assert_only(parsed(exporter.text()), "database")
        finally:
            redis_server.thaw()
        assert time.monotonic() - begun < 5
        eventually(lambda: parsed(exporter.text())["batchjobs_up"]["redis"] == 1, "it answers again")

    @pytest.mark.parametrize("url", ["postgresql://anna:s3cr3t@/jobs?host=/nowhere", "sqlite:////nowhere/jobs.sqlite3"])
    def test_the_database_is_away(
        self, url: str, redis_url: str, exporter_of: Callable[..., Look], caplog: pytest.LogCaptureFixture
    ) -> None:
        look = exporter_of(database_url=url, redis_url=redis_url)
        assert_only(look(), "redis")
        (message,) = caplog.messages
        assert message.startswith("the database does not answer: ")
        assert "s3cr3t" not in caplog.text

    def test_connections_to_the_database_may_be_cut(
        self, postgres_server: Any, redis_url: str, exporter_of: Callable[..., Look]
    ) -> None:
        url = postgres_server.create_database(migrated=True)
        try:
            look = exporter_of(database_url=url, redis_url=redis_url)
            look()
            postgres_server.disconnect_all()
            eventually(lambda: look()["batchjobs_up"]["database"] == 1, "it is connected again")
        finally:
            postgres_server.drop_database(url)

    def test_a_database_without_tables_is_told_and_left_alone(
        self,
        empty_database_url: str,
        redis_url: str,
        exporter_of: Callable[..., Look],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        if empty_database_url.startswith("sqlite:///"):
            Path(empty_database_url.removeprefix("sqlite:///")).touch()
        look = exporter_of(database_url=empty_database_url, redis_url=redis_url)
        assert_only(look(), "redis")
        assert "batchjobs db upgrade" in caplog.text
        with closing(Store(empty_database_url)) as store:
            store.prepare()
        assert look()["batchjobs_up"]["database"] == 1

    def test_an_unused_home_stays_as_it_is(self, home: Path, exporter_of: Callable[..., Look]) -> None:
        assert exporter_of(home=home)()["batchjobs_up"] == {"database": 0, "redis": 0}
        assert list(home.iterdir()) == []


class StandIn:
    """A service that a test answers for."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.failure: Exception | None = None

    def ask(self) -> int:
        self.asked += 1
        assert self.may_answer.wait(30)
        if self.failure is not None:
            raise self.failure
        return self.asked

    def close(self) -> None:
        pass


class TestProbe:
    @staticmethod
    def look(probe: Probe[int], seconds: float = 20.0) -> int | None:
        probe.begin()
        return probe.look(time.monotonic() + seconds)

    def test_what_was_said_last_is_kept_for_a_while(self) -> None:
        service = StandIn()
        probe: Probe[int] = Probe("redis", "Redis", service, 3600)
        assert [self.look(probe) for _ in range(3)] == [1, 1, 1]

    def test_a_failure_is_kept_as_long_and_does_not_show_old_figures(self) -> None:
        service = StandIn()
        probe: Probe[int] = Probe("redis", "Redis", service, 0)
        assert self.look(probe) == 1
        service.failure = ZeroDivisionError("whatever it is")
        assert self.look(probe) is None
        service.failure = None
        assert self.look(probe) == 3

    def test_one_that_hangs_is_asked_once_however_many_look(self) -> None:
        service = StandIn()
        service.may_answer.clear()
        probe: Probe[int] = Probe("redis", "Redis", service, 3600)
        assert [self.look(probe, 0.01) for _ in range(3)] == [None] * 3
        service.may_answer.set()
        assert self.look(probe) == 1


class TestCommand:
    @pytest.fixture
    def environment(self, home: Path, migrated_sqlite_file: Path, redis_url: str) -> dict[str, str]:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("BATCHJOBS_")}
        servers = {"BATCHJOBS_DATABASE_URL": f"sqlite:///{migrated_sqlite_file}", "BATCHJOBS_REDIS_URL": redis_url}
        return inherited | servers | {"BATCHJOBS_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def test_it_serves_until_it_is_told_to_end(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "batchjobs", "metrics", "--port", "0"]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            found = re.search(r" INFO metrics at (http://127\.0\.0\.1:\d+/metrics)$", said)
            assert found, said
            with urllib.request.urlopen(found.group(1), timeout=20) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                seen = parsed(answer.read().decode())
            assert seen["batchjobs_up"] == {"database": 1, "redis": 1}
            port = found.group(1).split(":")[2].split("/")[0]
            taken = subprocess.run([*command[:-1], port], env=environment, capture_output=True, text=True, check=False)
            assert taken.returncode == 2
            assert f"metrics cannot be served on 127.0.0.1:{port}" in taken.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
            process.communicate()

    def test_once_prints_and_ends(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "batchjobs", "metrics", "--once"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert parsed(done.stdout)["batchjobs_up"] == {"database": 1, "redis": 1}


def test_each_metric_is_documented_and_nothing_else() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.split("## Of queue and database")[1].split("\n## ")[0]
    rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `batchjobs_")}
    assert {name.partition("{")[0] for name in rows} == FAMILIES
    assert [state for state in WORKER_STATES if f"`{state}`" not in rows["batchjobs_workers{state}"]] == []
    assert f"on port {PORT}" in page
