"""A fleet of whole workers on the servers that every home has, started by the command itself.

The devices are a stand-in, and so are the engines: the workers, their leases and the parent are what they always are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from batchjobs import Client, load_settings
from batchjobs.store import Store
from tests.support.running import completions, is_complete, open_long
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
FLEET = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from workers import fleet
fleet.visible_devices = lambda: ["cpu", "cpu"]
fleet.FIRST_REST_SECONDS = 0.1
fleet.worker_command = lambda name, device, port, burst: [sys.executable, "-m", "tests.support.workers", name]
from batchjobs.cli import main
sys.exit(main(["worker", "--device", "cuda:all", "--name", "f", "--model", "stub"]))
"""
PATIENCE = 60.0


def processes(store: Store) -> dict[str, int]:
    """Of the workers that hold something, by name."""
    return {worker.name: worker.pid for worker in store.workers() if worker.is_alive and worker.running}


def both(store: Store) -> dict[str, int]:
    """As :func:`processes`, once both hold something."""
    found = processes(store)
    return found if found.keys() == {"f-0", "f-1"} else {}


def test_a_fleet_outlives_one_of_its_workers_and_ends_in_good_order(home: Path) -> None:
    settings = load_settings(home=home, lease_seconds=2, heartbeat_seconds=0.3, max_requests_per_batch=8)
    environment = {**os.environ, **settings.as_environment(), "PYTHONPATH": str(ROOT)}
    with Client(settings) as client:
        store = client.store
        batch = open_long(store, client.queue, 64, max_tokens=150)
        parent = subprocess.Popen([sys.executable, "-c", FLEET], env=environment, stderr=subprocess.PIPE, text=True)
        try:
            killed = eventually(lambda: both(store), "both workers work", PATIENCE)["f-0"]
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: is_complete(store, batch), "the batch is answered", PATIENCE)
            assert len(completions(store, batch)) == 64

            unfinished = open_long(store, client.queue, 32)
            again = eventually(lambda: both(store), "both workers work again", PATIENCE)
            assert again["f-0"] != killed
        finally:
            parent.send_signal(signal.SIGINT)
            _, log = parent.communicate(timeout=PATIENCE)
        assert parent.returncode == 0, log
        assert "worker f-0 was killed by signal 9 (SIGKILL); it is started again in" in log
        assert log.count("worker f-0 on cpu is process") == 2
        assert log.count("worker f-1 on cpu is process") == 1
        for name in ("f-0", "f-1"):
            assert log.count(f"worker {name} ends: got SIGINT") == 1
        assert {worker.name: worker.state for worker in store.workers()} == {"f-0": "stopped", "f-1": "stopped"}
        assert len(list(store.claimable(100))) == 8, f"every shard of {unfinished} was given back"
