"""A database that cannot be reached for a while in the middle of the work."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchjobs import client as clients
from batchjobs.client import Client
from batchjobs.connections import connect_store
from batchjobs.queue import JobQueue
from batchjobs.settings import Settings, load_settings
from tests.chaos.proxy import Network, Proxy
from tests.support.batches import select, submit
from tests.support.cases import case
from tests.support.running import open_long
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ThreadWorker
from workers import intake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.store import Store

REQUESTS, BACKLOG = 400, 16

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture
def wire(network: Network, database_url: str) -> Iterator[tuple[Proxy, str]]:
    """The worker's connection to the database, and the address behind it."""
    base, _, host = database_url.partition("?host=")
    folder = Path(tempfile.mkdtemp(prefix="bj-wire-"))  # short: a socket's path may have 107 bytes
    name = ".s.PGSQL.5432"
    yield network.proxy(folder / name, Path(host) / name, sql=True), f"{base}?host={folder}"
    shutil.rmtree(folder)


@pytest.fixture
def settings(tmp_path: Path, wire: tuple[Proxy, str], redis_url: str) -> Settings:
    return load_settings(
        home=tmp_path,
        database_url=wire[1],
        redis_url=redis_url,
        lease_seconds=1,
        heartbeat_seconds=0.2,
        checkpoint_seconds=0.2,
        max_requests_per_batch=8,
    )


def outcomes(store: Store, batch_id: str) -> list[tuple[int, str, int]]:
    rows = select(
        store, f'SELECT "index", text, attempt FROM completions WHERE batch_id = \'{batch_id}\' ORDER BY "index"'
    )
    return [(row[0], row[1], row[2]) for row in rows]


@case("A-sql-05")
def test_a_database_that_is_away_holds_the_worker_up_and_nothing_is_lost(
    settings: Settings,
    store: Store,
    wire: tuple[Proxy, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "batchjobs.worker")
    monkeypatch.setattr(intake, "MAX_BACKLOG", BACKLOG)
    proxy, _ = wire
    batch_id = submit(store, REQUESTS)
    queue = JobQueue(settings.redis_url or "")
    queue.enqueue(store.claimable(1000))
    own = connect_store(settings)
    worker = ThreadWorker(settings, own, queue, "w1", step_seconds=0.002)
    recorder = worker.daemon._recorder

    def has_nothing_to_do() -> bool:
        stats = worker.loop.stats()
        return not stats.running and not stats.waiting

    eventually(lambda: store.batch(batch_id).counts.completed >= 20, "it works")
    worker.loop.hold()
    eventually(lambda: worker.loop.stats().waiting, "it stands still, with work at hand")
    proxy.refuse()
    worker.loop.release()
    eventually(lambda: has_nothing_to_do() and recorder.backlog, "it has finished what it held")
    held = recorder.backlog
    assert held <= BACKLOG + 8 + 16 + 4, "what it keeps in memory is bounded by what it may hold"
    made = worker.loop.stats().generated_tokens
    eventually(lambda: queue.worker_notes() == {"w1": "waiting for the database"}, "it says what it waits for")
    stored = len(outcomes(store, batch_id))
    eventually(lambda: "recording outcomes failed, trying again: cannot reach PostgreSQL" in caplog.text, "in the log")
    assert recorder.backlog == held
    assert worker.loop.stats().generated_tokens == made, "no token is made that could not be stored"
    assert len(outcomes(store, batch_id)) == stored
    assert has_nothing_to_do()
    proxy.restore()
    eventually(lambda: store.batch(batch_id).status.is_final, "it goes on by itself", 30)
    assert outcomes(store, batch_id) == [(i, expected_text(f"prompt {i}", 8), 1) for i in range(REQUESTS)]
    eventually(lambda: not queue.worker_notes(), "and waits for nothing more")
    assert "recording outcomes works again after" in caplog.text
    assert worker.stop() == 0
    own.close()
    queue.close()


def test_workers_shows_who_is_cut_off_from_the_database(
    settings: Settings, store: Store, wire: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    monkeypatch.setattr(clients, "SILENT_SECONDS", 0.5)
    queue = JobQueue(settings.redis_url or "")
    own = connect_store(settings)
    worker = ThreadWorker(settings, own, queue, "w1")
    eventually(lambda: [row.state for row in store.workers()] == ["idle"], "it is there")
    wire[0].refuse()
    direct = settings.model_copy(update={"database_url": database_url})
    with Client(direct) as client:
        eventually(lambda: [row.state for row in client.workers()] == ["waiting for the database"], "it says so")
    # Whoever cannot reach the database either hears it from Redis.
    command = [sys.executable, "-m", "batchjobs", "workers"]
    shown = subprocess.run(command, env=settings.as_environment(), capture_output=True, text=True, check=False)
    assert shown.returncode == 3
    assert "worker w1: waiting for the database" in shown.stderr
    assert "cannot reach PostgreSQL" in shown.stderr
    wire[0].restore()
    with Client(direct) as client:
        eventually(lambda: [row.state for row in client.workers()] == ["idle"], "it is back")
    assert worker.stop() == 0
    own.close()
    queue.close()


def test_a_database_that_is_away_lifts_no_pause(
    settings: Settings, store: Store, wire: tuple[Proxy, str], caplog: pytest.LogCaptureFixture
) -> None:
    proxy, _ = wire
    queue = JobQueue(settings.redis_url or "")
    batch_id = open_long(store, queue, 40, max_tokens=100)
    own = connect_store(settings)
    worker = ThreadWorker(settings, own, queue, "w1", step_seconds=0.005)
    eventually(lambda: store.batch(batch_id).counts.completed >= 4, "it works")
    store.pause_worker("w1", by="ann@host")
    queue.wake()
    eventually(lambda: worker.loop.is_standing, "it stands still")
    made = worker.loop.stats().generated_tokens
    proxy.refuse()
    eventually(lambda: "looking for orders failed, trying again" in caplog.text, "it looks in vain")
    assert worker.loop.is_standing
    proxy.restore()
    store.cancel_request(batch_id, 39)
    eventually(lambda: store.batch(batch_id).counts.cancelled == 1, "it hears again", 20)
    assert (worker.loop.is_standing, worker.loop.stats().generated_tokens) == (True, made)
    store.resume_worker("w1")
    eventually(lambda: store.batch(batch_id).status.is_final, "it goes on", 30)
    assert store.batch(batch_id).counts.completed == 39
    assert worker.stop() == 0
    own.close()
    queue.close()
