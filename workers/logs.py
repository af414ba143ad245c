"""A worker's log: that of :mod:`batchjobs.logs`."""

from __future__ import annotations

from batchjobs.logs import JsonFormatter, LineFormatter, log_to_stderr, name_worker

__all__ = ["JsonFormatter", "LineFormatter", "log_to_stderr", "name_worker"]
