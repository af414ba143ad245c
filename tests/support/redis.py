"""A real redis-server for a test: started in 20 ms, on a unix socket of its own, gone with the test."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from batchjobs.redis_binary import find_server
from batchjobs.redis_client import connect
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


class RedisServer:
    """A server that can be killed, stopped, flushed and started again. It keeps every write in its append-only file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> redis.Redis:
        return connect(self.url)

    def start(self) -> None:
        fixed = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
        }
        arguments = [part for name, value in fixed.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [str(find_server()), *arguments, *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            restore_signals=False,  # a limit on the size of files is an error to it then, and not its death
        )
        eventually(self.answers, "the test's redis-server answers")

    def answers(self) -> bool:
        client = self.client()
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def kill(self) -> None:
        """As `kill -9` does; the socket file stays behind."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signal_number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait(timeout=10)
            self._process = None

    def freeze(self) -> None:
        """It accepts connections and answers nothing, like a server behind a dead network."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def flush(self) -> None:
        client = self.client()
        client.flushall()
        client.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A fresh, empty server."""
    folder = Path(tempfile.mkdtemp(prefix="bj-redis-"))  # short: a socket's path may have 107 bytes
    server = RedisServer(folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
