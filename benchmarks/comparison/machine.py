"""The machine in words, for a report that is read elsewhere."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def described() -> dict[str, str]:
    flags = set(_line("flags").split())
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "processor": _line("model name") or platform.processor() or platform.machine(),
        "cores": str(usable_cores()),
        "instructions": ", ".join(flag for flag in known if flag in flags) or "unknown",
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def usable_cores() -> int:
    """Those that this process may run on: a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0))


def _line(name: str) -> str:
    """The first such line of the system's own description, empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
