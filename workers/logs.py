"""A worker's log on stderr: one line an event, with its time in UTC, and no control character that a terminal obeys."""

from __future__ import annotations

import logging
import sys
import time

from batchjobs.text import visible


class LineFormatter(logging.Formatter):
    """``2026-03-01T12:00:00Z INFO claimed shard …``. Only a traceback, which is a bug of ours, takes more lines."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return visible(super().formatMessage(record))

    def formatException(self, *args: object) -> str:  # noqa: N802
        return visible(super().formatException(*args), keep_newlines=True)  # type: ignore[arg-type]


def log_to_stderr(level: int = logging.INFO) -> None:
    """What this program says, and warnings of its libraries. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("batchjobs", "workers"):
        logging.getLogger(name).setLevel(level)
    for name in ("rq.worker", "rq.job", "rq.queue", "rq.registry"):
        logging.getLogger(name).setLevel(logging.WARNING)
