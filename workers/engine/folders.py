"""Where the engine keeps what it makes once and uses again: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path

from batchjobs.errors import UsageError


def cache_folder() -> Path:
    """``BATCHJOBS_CACHE``, else ``~/.cache/batchjobs``; it may not exist yet. Raises UsageError without a home."""
    chosen = os.environ.get("BATCHJOBS_CACHE")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "batchjobs"
    except RuntimeError:
        raise UsageError("there is no home folder; set BATCHJOBS_CACHE to a folder of your own") from None
