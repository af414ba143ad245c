"""The command line in this process, on a home of its own, with a stand-in for the queue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from batchjobs.cli import main
from batchjobs.errors import ConnectionFailed
from batchjobs.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result


class StandInQueue:
    """Counts what is put in; ``broken`` makes it unreachable."""

    def __init__(self) -> None:
        self.broken = False
        self.queued = 0
        self.woken = 0

    def connect(self, settings: object) -> StandInQueue:
        if self.broken:
            raise ConnectionFailed("the Redis at h cannot be reached")
        return self

    def enqueue(self, shards: Any) -> int:
        self.queued += len(list(shards))
        return self.queued

    def drop_batch(self, batch_id: str) -> int:
        return 0

    def worker_notes(self) -> dict[str, str]:
        return {}

    def wake(self) -> None:
        self.woken += 1

    def close(self) -> None:
        pass


@dataclass
class CommandLine:
    home: Path
    queue: StandInQueue

    def run(self, *arguments: object, stdin: bytes | None = None) -> Result:
        """Runs a command; ``stdout``, ``stderr`` and ``exit_code`` are in what it returns."""
        return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)

    def out(self, *arguments: object, stdin: bytes | None = None) -> str:
        """What a command that must succeed prints on stdout."""
        done = self.run(*arguments, stdin=stdin)
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *arguments: object) -> Any:
        return json.loads(self.out(*arguments, "--json"))

    def json_lines(self, *arguments: object) -> list[Any]:
        return [json.loads(line) for line in self.out(*arguments, "--json").splitlines()]

    def submit(self, *lines: dict[str, Any], options: tuple[object, ...] = ()) -> str:
        """Submits these lines on standard input and returns the batch's id."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        return self.out("submit", "-", *options, stdin=content).strip()

    def store(self) -> Store:
        """The store of this home; close it."""
        store = Store(f"sqlite:///{self.home / 'batchjobs.sqlite3'}")
        self.home.mkdir(exist_ok=True)
        store.prepare()
        return store


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    queue = StandInQueue()
    for name in ("REDIS_URL", "DATABASE_URL", "MODEL", "QUEUE", "DEBUG"):
        monkeypatch.delenv(f"BATCHJOBS_{name}", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # a test runner may set it for its workers
    monkeypatch.setenv("BATCHJOBS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("batchjobs.client.connect_queue", queue.connect)
    return CommandLine(tmp_path / "home", queue)
