"""How many threads a forward pass may use where a container has less than the machine.

A quota of processor time is not a number of processors: torch sees every core of the machine and starts a thread on
each, and the kernel then stops them all for the rest of each period, in the middle of a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from workers.engine.cgroups import cgroup_folders

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def threads_for(usual: int, environment: Mapping[str, str] = os.environ) -> int:
    """``usual`` is torch's own choice. It stays where the user made it, and where there is no smaller quota."""
    if any(name in environment for name in THREAD_VARIABLES):
        return usual
    quota = processor_quota()
    return usual if quota is None else min(usual, max(1, round(quota)))


def processor_quota() -> float | None:
    """The processors' worth of time that this process may use, by the tightest of its cgroups; None without a limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    for folder, is_unified in cgroup_folders("cpu"):
        with suppress(OSError, ValueError):
            quota, period = _unified(folder) if is_unified else _legacy(folder)
            if quota > 0 and period > 0:
                yield quota / period


def _unified(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)  # "max" is a ValueError: no limit


def _legacy(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
