"""A peer in a process of its own, which is stopped whenever it has nothing to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

END_SECONDS = 20.0
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


class PeerProcess:
    """Started and loaded when this returns, or ``error`` says why it is not. Its messages go to a log file,
    which stays where it failed.

    ``start_seconds`` run from the start of the process until it has loaded its model and said so.
    """

    def __init__(self, name: str, python: str, script: Path, options: dict[str, Any]) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        begin = time.perf_counter()
        threads = str(options["threads"])
        self.log = Path(os.environ.get("TMPDIR", "/tmp")) / f"compare-{name}-{os.getpid()}.log"  # noqa: S108
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **QUIET, "OMP_NUM_THREADS": threads},
            )
        answer = self._ask(options)
        self.start_seconds = time.perf_counter() - begin
        self.error: str | None = answer.get("error")
        if self.error is None:
            self.versions, self.settings = answer["versions"], answer["settings"]
            self._signal(signal.SIGSTOP)
        else:
            self.error = f"{self.error} (its messages are in {self.log})"
            self.end()

    def run(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, list[int]]:
        """Seconds, and the tokens made for each request. Raises RuntimeError where the peer failed."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask({"work": work})
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            self.error = answer["error"]
            raise RuntimeError(f"{self.name} failed: {answer['error']} (its messages are in {self.log})")
        return float(answer["seconds"]), list(answer["made"])

    def end(self) -> None:
        """Ends the process and whatever it started."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            if self.error is None:
                self.log.unlink(missing_ok=True)

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"it ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, so that helper processes stop and go on with it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@contextmanager
def stopped(peers: list[PeerProcess]) -> Iterator[list[PeerProcess]]:
    """The peers, all of which end with the block. One that stands still would not notice the end of this process, so
    SIGTERM ends the block in good order too."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield peers
    finally:
        for peer in peers:
            peer.end()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
