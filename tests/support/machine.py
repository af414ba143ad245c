"""An installation with a home of its own, on which tests run real commands.

What is killed, signalled or has to live beside the test is a process of its own (``start``). Other commands run in this
process, where everything is loaded: a process takes a second to begin, one with an engine ten.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from batchjobs import load_settings
from batchjobs.cli import main
from batchjobs.redis_client import connect
from batchjobs.store import Store


class Machine:
    """One installation: a home, and perhaps servers of its own. Starts commands, and ends what it started."""

    def __init__(self, home: Path, model: Path, **variables: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATCHJOBS_")}
        chosen = {
            "BATCHJOBS_HOME": str(home),
            "BATCHJOBS_MODEL": str(model),
            "BATCHJOBS_LEASE_SECONDS": "4",
            "BATCHJOBS_HEARTBEAT_SECONDS": "1",
            "BATCHJOBS_NUM_BLOCKS": "600",
            "OMP_NUM_THREADS": "1",
        }
        self.home = home
        self.environment = inherited | chosen | variables
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{len(self._started)}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "batchjobs", *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def call(self, *arguments: str, code: int = 0) -> str:
        """What a command prints, run in this process."""
        done = CliRunner().invoke(main, arguments, env=self.environment)
        assert done.exit_code == code, done.output
        return done.stdout

    def work(self, name: str, **settings: Any) -> None:
        """What `batchjobs worker --burst` does, in this process; ``settings`` in the place of its own."""
        from batchjobs.cli.worker import engine_config  # here, because most tests need no engine
        from workers.daemon import run_worker
        from workers.engine import Engine, EngineLoop

        with mock.patch.dict(os.environ, self.environment):
            chosen = load_settings(**settings)
        loop = EngineLoop(Engine(str(chosen.model), engine_config(chosen)))
        assert run_worker(chosen, loop, burst=True, name=name) == 0

    def complaint(self, *arguments: str, code: int) -> str:
        """What a command says on stderr, run in this process."""
        done = CliRunner().invoke(main, arguments, env=self.environment)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.stderr
        return done.stderr

    def store(self) -> Store:
        return Store(self.environment.get("BATCHJOBS_DATABASE_URL") or f"sqlite:///{self.home}/batchjobs.sqlite3")

    def counts(self, batch: str) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.call("status", batch, "--json"))["counts"]
        return counts

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bj-home-") as folder:  # short, for the socket in it
        yield Path(folder)


@pytest.fixture
def embedded(home: Path, model: Path) -> Iterator[Machine]:
    machine = Machine(home, model)
    yield machine
    machine.end()
    stop_private_redis(home)


def stop_private_redis(home: Path) -> None:
    """A test may leave work in the queue, for which the private server stays up."""
    for socket in home.rglob("*.sock"):
        with closing(connect(f"unix://{socket}")) as client:
            client.shutdown(nosave=True)
