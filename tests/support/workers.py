"""Workers on the stub engine, in threads of the test or in processes of their own."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjobs.settings import Settings, load_settings
from tests.support.stub_engine import StubLoop
from workers.daemon import Daemon, run_worker
from workers.logs import log_to_stderr

if TYPE_CHECKING:
    from batchjobs.queue import JobQueue
    from batchjobs.store import Store

_ROOT = Path(__file__).parents[2]


class ThreadWorker:
    """A whole worker in a thread of this process. ``loop`` is its engine: the stub, unless another one is given."""

    def __init__(self, settings: Settings, store: Store, queue: JobQueue, name: str, **options: Any) -> None:
        self.loop = options.pop("loop", None) or StubLoop(
            step_seconds=options.pop("step_seconds", 0.0005),
            max_requests=settings.max_requests_per_batch,
            model_version=options.pop("model_version", "stub-1"),
            logprob=options.pop("logprob", -0.5),
        )
        self.daemon = Daemon(settings, store, queue, self.loop, name=name, **options)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.daemon.run()

    def join(self, seconds: float = 30) -> int:
        """Waits for its end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the worker did not end"
        assert self.exit_code is not None, "the worker raised"
        return self.exit_code

    def stop(self) -> int:
        if isinstance(self.loop, StubLoop):
            self.loop.release()
        self.daemon.stop()
        return self.join()


class ProcessWorker:
    """A whole worker in a process of its own."""

    def __init__(self, settings: Settings, name: str, *, step_seconds: float = 0.005, burst: bool = False) -> None:
        command = [sys.executable, "-m", "tests.support.workers", name, f"--step-seconds={step_seconds}"]
        self.process = subprocess.Popen(
            command + ["--burst"] * burst,
            cwd=_ROOT,
            env=settings.as_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def join(self, seconds: float = 30) -> tuple[int, str]:
        """Its exit code, and its log."""
        _, log = self.process.communicate(timeout=seconds)
        return self.process.returncode, log

    def kill(self) -> str:
        self.process.kill()
        return self.join()[1]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--step-seconds", type=float, default=0.005)
    parser.add_argument("--burst", action="store_true")
    options = parser.parse_args()
    log_to_stderr()
    settings = load_settings()
    loop = StubLoop(step_seconds=options.step_seconds, max_requests=settings.max_requests_per_batch)
    return run_worker(settings, loop, name=options.name, burst=options.burst)


if __name__ == "__main__":
    sys.exit(main())
