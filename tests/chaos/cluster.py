"""The installation under test: servers, proxies in front of them, and worker processes that are replaced when they end.

A worker has a slot, with proxies of its own to Redis and to PostgreSQL; each process in it has a name of its own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TextIO

from batchjobs.client import Client
from batchjobs.errors import ConnectionFailed
from batchjobs.settings import Settings, load_settings
from tests.chaos.proxy import Network, Proxy
from tests.chaos.servers import Postgres, Sqlite
from tests.support.redis import RedisServer

ROOT = Path(__file__).parents[2]
EXIT_SECONDS = 45.0
"""A worker that was told to end, and is still there after so long, is a failure."""

_RESTART_SECONDS = 0.5
_STARTED = "started: "
"""In the log of a worker that has come up."""

Command = Callable[[str], list[str]]
"""From a worker's name to its command line."""


def stub_worker(step_seconds: float) -> Command:
    return lambda name: [sys.executable, "-m", "tests.support.workers", name, f"--step-seconds={step_seconds}"]


def real_worker(model: Path) -> Command:
    return lambda name: [sys.executable, "-m", "batchjobs", "worker", "--name", name, "--model", str(model)]


@dataclass(slots=True)
class Worker:
    """One process. ``ended_at`` is the time of the day when it was told to end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ended_at: float = 0.0

    @property
    def has_started(self) -> bool:
        return _STARTED in self.log.read_text(errors="replace")

    @property
    def met_outage(self) -> bool:
        """It could not come up because a server was away."""
        is_told = self.process.returncode == ConnectionFailed.exit_code  # by the command line
        log = self.log.read_text(errors="replace")
        return _STARTED not in log and (is_told or "ConnectionFailed" in log)

    def send(self, number: Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self, number: Signals) -> None:
        """Sends a signal that is to end it."""
        self.ended_at = time.time()
        self.send(number)


@dataclass(slots=True)
class Slot:
    """The place of one worker after the other."""

    number: int
    settings: Settings
    redis: Proxy
    sql: Proxy | None
    worker: Worker | None = None
    next_start_at: float = 0.0
    leaving: list[Worker] = field(default_factory=list)

    @property
    def proxies(self) -> list[Proxy]:
        return [self.redis] if self.sql is None else [self.redis, self.sql]


class Cluster:
    """Everything that runs. Use it as a context manager; :meth:`look_after` is to be called often.

    ``problems`` collects what a worker did that it must not do: end by itself, end badly, or not end.
    """

    def __init__(
        self, folder: Path, database: str, workers: int, command: Command, settings: dict[str, object], log: TextIO
    ) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kills: list[tuple[str, float]] = []
        """(worker, time of the day) of each SIGKILL."""
        self.redis = RedisServer(folder)
        self.sql: Postgres | Sqlite = Postgres(folder) if database == "postgresql" else Sqlite(folder)
        self.slots: list[Slot] = []
        self._workers = workers
        self._command = command
        self._settings = settings
        self._network = Network()
        self._log = log
        self._lock = threading.RLock()
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:7.2f} {what}", file=self._log, flush=True)

    def __enter__(self) -> Cluster:
        try:
            (self.folder / "logs").mkdir()
            self.redis.start()
            self.sql.start()
            self.slots = [self._slot(number) for number in range(self._workers + 1)]
            self.client_slot = self.slots.pop()  # the producers' way
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (each for slot in self.slots for each in (slot.worker, *slot.leaving) if each is not None):
            worker.process.kill()
            worker.process.wait()
        self._network.close()
        self.redis.kill()
        self.sql.close()

    def _slot(self, number: int) -> Slot:
        net = self.folder / f"n{number}"
        redis = self._network.proxy(net / "redis.sock", self.redis.socket)
        url, sql = self.sql.url, None
        if isinstance(self.sql, Postgres):
            assert self.sql.socket is not None
            sql = self._network.proxy(net / self.sql.socket.name, self.sql.socket, sql=True)
            url = self.sql.url_through(net)
        values = {"home": self.folder, "redis_url": f"unix://{redis.listen}", "database_url": url}
        return Slot(number, load_settings(**{**values, **self._settings}), redis, sql)

    def client(self) -> Client:
        """A producer, behind proxies as the workers are."""
        return Client(self.client_slot.settings)

    @property
    def ways(self) -> list[Slot]:
        """All that have proxies: workers and producers."""
        return [*self.slots, self.client_slot]

    # Workers

    def start_workers(self) -> None:
        for slot in self.slots:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        self.counts["worker processes"] += 1
        name = f"w{slot.number}-{self.counts['worker processes']}"
        log = self.folder / "logs" / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self._command(name),
                cwd=ROOT,
                env={**slot.settings.as_environment(), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                stdout=stream,
                stderr=stream,
            )
        slot.worker = Worker(name, process, log)

    def look_after(self) -> None:
        """Replaces the workers that have ended, and notes those that had no reason to."""
        with self._lock:
            for slot in self.slots:
                self._look_at_leaving(slot)
                if slot.worker is None:
                    if time.monotonic() >= slot.next_start_at:
                        self._start(slot)
                elif slot.worker.process.poll() is not None:
                    self._ended_alone(slot.worker)
                    slot.worker, slot.next_start_at = None, time.monotonic() + _RESTART_SECONDS

    def _ended_alone(self, worker: Worker) -> None:
        code = worker.process.returncode
        if worker.met_outage:  # whoever keeps workers running starts it again
            self.counts["starts in an outage"] += 1
            self.say(f"{worker.name} did not come up (exit code {code})")
            return
        self.problems.append(f"worker {worker.name} ended by itself with exit code {code}; see {worker.log}")
        self.say(self.problems[-1])

    def _look_at_leaving(self, slot: Slot) -> None:
        for worker in list(slot.leaving):
            code = worker.process.poll()
            if code is None and time.time() - worker.ended_at < EXIT_SECONDS:
                continue
            slot.leaving.remove(worker)
            if code is None:
                worker.send(Signals.SIGABRT)  # it writes down where its threads are
                worker.process.wait()
                self.problems.append(
                    f"worker {worker.name} did not end within {EXIT_SECONDS:.0f} s of SIGTERM; see {worker.log}"
                )
            elif code != 0 and worker.has_started:
                self.problems.append(
                    f"worker {worker.name} ended with exit code {code} after SIGTERM; see {worker.log}"
                )
            else:
                self.say(f"{worker.name} ended {time.time() - worker.ended_at:.1f} s after SIGTERM")

    def kill(self, slot: Slot) -> str | None:
        """SIGKILL. Returns the worker's name, None where the slot is empty."""
        with self._lock:
            worker = slot.worker
            if worker is None:
                return None
            slot.worker, slot.next_start_at = None, time.monotonic() + _RESTART_SECONDS
            worker.end(Signals.SIGKILL)
            worker.process.wait()
            self.kills.append((worker.name, worker.ended_at))
            return worker.name

    def terminate(self, slot: Slot) -> str | None:
        """SIGTERM; another worker starts beside the one that ends."""
        with self._lock:
            worker = slot.worker
            if worker is None:
                return None
            slot.worker, slot.next_start_at = None, time.monotonic() + _RESTART_SECONDS
            slot.leaving.append(worker)
            worker.end(Signals.SIGTERM)
            return worker.name

    def stop_workers(self) -> list[str]:
        """SIGTERM for all, and their exit codes are looked at. Returns their names."""
        names = [name for slot in self.slots if (name := self.terminate(slot))]
        while any(slot.leaving for slot in self.slots):
            for slot in self.slots:
                self._look_at_leaving(slot)
            time.sleep(0.05)
        return names
