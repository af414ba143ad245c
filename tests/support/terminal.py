"""A command whose messages go to a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal

ROOT = Path(__file__).parents[2]
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class OnTerminal:
    """``batchjobs`` with stdin, stdout and stderr on a pseudo terminal. ``text`` is what it has written so far."""

    def __init__(self, *arguments: str, columns: int = 120, lines: int = 40, **environment: str) -> None:
        self._screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchjobs", *arguments],
            cwd=ROOT,
            env={**kept, "TERM": "xterm-256color", **environment},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        try:
            while piece := os.read(self._screen, 65536):
                self._read.append(piece)
        except OSError:  # Linux says so when the other end is closed
            return

    @property
    def raw(self) -> str:
        return b"".join(self._read).decode()

    @property
    def text(self) -> str:
        """Without colours and movements of the cursor, each gap one blank."""
        return " ".join(_CONTROL.sub("", self.raw).split())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30) -> int:
        """Waits for its end and returns the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._screen)
