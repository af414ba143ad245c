"""Where the engine keeps what it makes once and uses again: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``BATCHJOBS_CACHE``, or ``batchjobs`` in the user's cache folder; made private when it is new."""
    chosen = os.environ.get("BATCHJOBS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchjobs"
    folder = Path(chosen).expanduser() if chosen else base
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
