"""Workers, their clocks, and model versions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchjobs.store import WorkerFigures, WorkerInfo

if TYPE_CHECKING:
    from batchjobs.store import Store

INFO = WorkerInfo(
    name="w1",
    host="node1",
    pid=42,
    device="cpu",
    dtype="float32",
    model="tiny",
    model_version="v1",
    state="loading",
    serves=("tiny", "/models/tiny"),
)
FIGURES = WorkerFigures(
    state="busy",
    running=3,
    waiting=5,
    kv_usage_ratio=0.25,
    tokens_per_second=120.5,
    prompt_tokens=10_000_000_000,
    generated_tokens=7,
    preemptions=1,
)


def test_a_worker_from_start_to_end(store: Store) -> None:
    store.register_worker(INFO)
    [fresh] = store.workers()
    assert (fresh.name, fresh.host, fresh.pid, fresh.device, fresh.dtype) == ("w1", "node1", 42, "cpu", "float32")
    assert (fresh.model, fresh.model_version, fresh.state) == ("tiny", "v1", "loading")
    assert (fresh.serves, fresh.pause) == (("tiny", "/models/tiny"), None)
    assert (fresh.running, fresh.tokens_per_second, fresh.stopped_at) == (0, 0.0, None)
    assert 0 <= fresh.heartbeat_age_seconds < 60

    assert store.beat("w1", FIGURES)
    [busy] = store.workers()
    assert (busy.state, busy.running, busy.waiting, busy.kv_usage_ratio) == ("busy", 3, 5, 0.25)
    assert (busy.prompt_tokens, busy.generated_tokens, busy.preemptions) == (10_000_000_000, 7, 1)
    assert busy.tokens_per_second == 120.5

    assert store.change_model("w1", model="other", model_version="v2", dtype="bfloat16", serves=["tiny", "other"])
    assert store.retire_worker("w1", "stopped")
    [gone] = store.workers()
    assert (gone.model, gone.model_version, gone.dtype) == ("other", "v2", "bfloat16")
    assert gone.serves == ("tiny", "other")
    assert (gone.state, gone.running, gone.waiting, gone.kv_usage_ratio) == ("stopped", 0, 0, 0.0)
    assert gone.stopped_at is not None
    assert gone.stopped_at >= gone.started_at


def test_a_worker_that_starts_again_starts_afresh(store: Store) -> None:
    store.register_worker(INFO)
    store.beat("w1", FIGURES)
    store.retire_worker("w1", "failed")
    store.register_worker(replace(INFO, pid=43))
    [worker] = store.workers()
    assert (worker.pid, worker.state, worker.stopped_at, worker.generated_tokens) == (43, "loading", None, 0)


def test_living_workers_come_first(store: Store) -> None:
    for name in ("b", "c", "a"):
        store.register_worker(replace(INFO, name=name))
    store.retire_worker("a", "stopped")
    assert [worker.name for worker in store.workers()] == ["b", "c", "a"]


def fall_silent(store: Store, name: str, seconds: float) -> None:
    """Moves the worker's last sign of life, its end included, into the past."""
    with store._database.writing() as connection:
        connection.exec_driver_sql(f"UPDATE workers SET heartbeat_at = heartbeat_at - {seconds} WHERE name = '{name}'")


@pytest.mark.parametrize(("silent", "state", "running"), [(20, "busy", 3), (31, "dead", 0)])
def test_a_worker_that_fell_silent_is_dead(store: Store, silent: float, state: str, running: int) -> None:
    store.register_worker(INFO)
    store.beat("w1", FIGURES)
    fall_silent(store, "w1", silent)
    [worker] = store.workers()
    assert (worker.state, worker.running) == (state, running)
    load = (worker.waiting, worker.kv_usage_ratio, worker.tokens_per_second)
    assert load == ((0, 0.0, 0.0) if state == "dead" else (5, 0.25, 120.5))
    assert (worker.generated_tokens, worker.stopped_at) == (7, None)
    assert store.beat("w1", FIGURES), "it was only suspended"
    assert [worker.state for worker in store.workers()] == ["busy"]


def test_the_stopped_and_dead_of_the_last_day_follow_the_newest_first(store: Store) -> None:
    for name in ("dead", "forgotten", "b", "stopped", "long-dead", "a", "failed"):
        store.register_worker(replace(INFO, name=name))
    for name, state in (("stopped", "stopped"), ("forgotten", "stopped"), ("failed", "failed")):
        store.retire_worker(name, state)
    for name, seconds in (("stopped", 5), ("dead", 100), ("failed", 86_000), ("forgotten", 86_401), ("long-dead", 1e6)):
        fall_silent(store, name, seconds)
    found = [(worker.name, worker.state) for worker in store.workers()]
    assert found == [
        ("a", "loading"), ("b", "loading"), ("stopped", "stopped"), ("dead", "dead"), ("failed", "failed"),
    ]  # fmt: skip


def test_the_end_of_a_worker_is_a_sign_of_life(store: Store) -> None:
    store.register_worker(INFO)
    fall_silent(store, "w1", 1e6)
    store.retire_worker("w1", "failed")
    [worker] = store.workers()
    assert 0 <= worker.heartbeat_age_seconds < 60


def test_the_age_of_a_heartbeat_is_by_the_clock_of_the_database(store: Store) -> None:
    store.register_worker(INFO)
    with store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE workers SET heartbeat_at = heartbeat_at - 1000")
    [worker] = store.workers()
    assert 1000 <= worker.heartbeat_age_seconds < 1060


def test_a_worker_that_is_not_registered(store: Store) -> None:
    assert not store.beat("nobody", FIGURES)
    assert not store.retire_worker("nobody", "stopped")
    assert not store.change_model("nobody", model="m", model_version="v", dtype="float32", serves=["m"])
    assert store.workers() == []


def test_the_first_entry_of_a_model_version_stays(store: Store) -> None:
    store.register_model_version("v1", "tiny", "/models/tiny", "float32", {"revision": "abc", "parameters": 135})
    store.register_model_version("v1", "renamed", "/elsewhere", "float32", {})
    store.register_model_version("v2", "tiny", "/models/newer", "bfloat16", {})
    newest, first = store.model_versions()
    assert (newest.version, newest.source, newest.details) == ("v2", "/models/newer", {})
    assert first.details == {"revision": "abc", "parameters": 135}
    assert newest.created_at >= first.created_at
    columns = "version, name, source, dtype, details"
    _, rows = store.select(f"SELECT {columns} FROM model_versions WHERE version = 'v1'")
    assert list(rows) == [("v1", "tiny", "/models/tiny", "float32", '{"revision":"abc","parameters":135}')]


def test_the_clock_of_this_host_against_the_databases(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(store.clock_skew_seconds()) < 1.0
    now = time.time
    for ahead in (90.0, -90.0):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: now() + ahead)
        assert store.clock_skew_seconds() == pytest.approx(ahead, abs=1.0)
