"""A worker of our own for ``batchjobs run``: a child process that ends with us, its messages in a log file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchjobs.cli.console import say
from batchjobs.errors import BatchjobsError
from batchjobs.folders import make_private_file, own_folder
from batchjobs.text import visible

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from batchjobs.settings import Settings

STOP_SECONDS = 60.0
"""A worker that does not end on SIGTERM within this time is killed; its lease then expires by itself."""

_SHOWN_LINES = 20


class LocalWorker:
    """``batchjobs worker`` as a child process for the length of a ``with`` block.

    It gets the settings in its environment, so passwords never stand on a command line. It lives in a session of its
    own: Ctrl-C reaches us alone, and we stop it in order.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.log = _log_path(settings.home)

    def __enter__(self) -> LocalWorker:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                worker_command(),
                env={**os.environ, **self._settings.as_environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def check(self) -> None:
        """Raises BatchjobsError, with the last lines of its log, when the worker has ended."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return
        say("\n".join(visible(line) for line in self._last_lines()))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise BatchjobsError(f"the worker {how} before the batch did; its log is {self.log}. Nothing finished is lost")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            process.wait(STOP_SECONDS)
        except BaseException as interruption:  # a second Ctrl-C, or it does not end: no more patience
            process.kill()
            process.wait()
            if not isinstance(interruption, subprocess.TimeoutExpired):
                raise

    def _last_lines(self) -> list[str]:
        with self.log.open(errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, _SHOWN_LINES)]


def worker_command() -> list[str]:
    """The command line of the child, which ends when this process does."""
    return [sys.executable, "-m", "batchjobs", "worker", "--parent", str(os.getpid())]


def _log_path(home: Path) -> Path:
    folder = own_folder(own_folder(home) / "logs")
    log = folder / f"worker-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.log"
    make_private_file(log)
    return log
