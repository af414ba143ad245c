"""Chat templates, rendered in a process of their own, because a model's author wrote them and can mean harm.

What holds: a rendering has :data:`MAX_SECONDS` of processor time, :data:`MAX_MEMORY_BYTES` and
:data:`MAX_RENDERED_CHARACTERS`; whatever it does, it costs its own conversation and nothing else. The process is
started with the first chat, serves every model of this process, and is started again when it has ended.
See docs/decisions/0007-chat-templates-in-their-own-process.md.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "MAX_MEMORY_BYTES",
    "MAX_RENDERED_CHARACTERS",
    "MAX_SECONDS",
    "RENDERER",
    "TemplateFailed",
    "TemplateRenderer",
]

MAX_SECONDS = 1.0
"""Of processor time a rendering."""
MAX_MEMORY_BYTES = 512 * 2**20
"""On top of what the process has taken when it is ready."""
MAX_RENDERED_CHARACTERS = 16 * 2**20

MAX_WAIT_SECONDS = 60.0  # by the clock, on a machine that is busy otherwise
_SCRIPT = Path(__file__).with_name("template_process.py")
_KEPT_VARIABLES = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ")
_ENCODING = ("utf-8", "surrogatepass")


class TemplateFailed(Exception):
    """The conversation could not be rendered; the message says why."""


class TemplateRenderer:
    """Renders conversations, one after the other, each within its limits. Safe to call from any thread."""

    def __init__(self, seconds: float = MAX_SECONDS, memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._end: Callable[[], object] = _nothing

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of the conversation, ready for the assistant's answer.

        Args:
            variables: What the template can use beside the messages: special tokens, chat_template_kwargs.

        Raises:
            TemplateFailed: The template refuses the conversation, is broken, breaks out, or is too expensive.
        """
        request = {"template": template, "messages": messages, "variables": variables}
        try:
            data = json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode(*_ENCODING)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(f"the messages are not JSON: {error}") from error
        with self._lock:
            answer = self._asked(data)
        kind, text = answer[:1], answer[1:].decode(*_ENCODING)
        if kind == b"L":
            raise TemplateFailed(f"the chat template is too expensive: it {self._limit(text)}")
        if kind == b"E":
            raise TemplateFailed(f"the model's chat template refused the messages: {text}")
        return text

    def _limit(self, name: str) -> str:
        return {
            "time": f"takes more than {self._seconds:g} s of processor time",
            "memory": f"takes more than {self._memory_bytes // 2**20} MiB of memory",
        }.get(name, f"writes more than {MAX_RENDERED_CHARACTERS:,} characters")

    def _asked(self, data: bytes) -> bytes:
        """What the process says to ``data``, or another one in its place: it may have been killed for the sake of
        others. A conversation that ends two of them has failed."""
        for _ in range(2):
            answer = self._said(data)
            if answer is not None:
                return answer
        code = None if self._process is None else self._process.returncode
        raise TemplateFailed(f"the process that renders chat templates ended twice, with code {code}")

    def _said(self, data: bytes) -> bytes | None:
        """What the process says; None where it has ended. It ends with whatever interrupts this, so that the next
        conversation gets its own."""
        connection, self._connection = self._connected(), None
        try:
            connection.sendall(len(data).to_bytes(8) + data)
            answer = _received(connection)
        except OSError:
            answer = None
        if answer is None:
            self._end()
        else:
            self._connection = connection
        return answer

    def _connected(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        if self._process is not None:
            self._end()
        ours, theirs = socket.socketpair()
        ours.settimeout(MAX_WAIT_SECONDS)
        limits = (self._seconds, self._memory_bytes, MAX_RENDERED_CHARACTERS)
        places = filter(os.path.isabs, sys.path)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}  # no passwords
        with theirs:
            try:  # in a session of its own: an interrupt from the keyboard is for the worker alone
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT), *map(str, limits), os.pathsep.join(places)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={**kept, "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise TemplateFailed(f"no process can be started to render the chat template: {error}") from error
        self._end = weakref.finalize(self, _close, self._process, ours)
        with suppress(OSError):
            if _received(ours) is not None:  # it is ready
                return ours
        self._end()
        raise TemplateFailed(
            f"the process that renders chat templates ended at its start with code {self._process.returncode}; "
            f"`{sys.executable} -P {_SCRIPT} 1 1 1 {os.pathsep}` shows why"
        )


def _received(connection: socket.socket) -> bytes | None:
    """The next frame; None where the process has ended."""
    head = _exactly(connection, 8)
    size = 0 if head is None else int.from_bytes(head)
    return _exactly(connection, size) if 0 < size <= 1 + 4 * MAX_RENDERED_CHARACTERS else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(min(count - len(parts), 2**20))):
            return None
        parts += part
    return bytes(parts)


def _nothing() -> None:
    """What ends no process."""


def _close(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)  # it may be ending just now, and its code says why
    process.kill()
    process.wait()


RENDERER = TemplateRenderer()
"""Of this process: its engines share it."""
