"""A real worker process around the stub engine, for commands that start one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from batchjobs.settings import load_settings
from tests.support.stub_engine import StubLoop
from workers.daemon import run_worker
from workers.logs import log_to_stderr

ROOT = Path(__file__).parents[2]


def command(step_seconds: float = 0.0005) -> list[str]:
    """Its command line; settings come from the environment, as those of any worker."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.stub_worker import main
main({step_seconds})
"""
    return [sys.executable, "-c", code]


def main(step_seconds: float) -> None:
    log_to_stderr()
    parent = os.getppid()
    loop: Any = StubLoop(step_seconds=step_seconds)
    sys.exit(run_worker(load_settings(), loop, until=lambda: os.getppid() != parent))
