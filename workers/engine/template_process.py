"""The process that renders chat templates: a model's author wrote them, so they get little time and nothing to touch.

It is started as a script by :mod:`workers.engine.templates` and imports nothing of this project. Templates are rendered
by transformers itself, in its own sandbox. Around that sandbox: limits of processor time, memory and output for each
rendering, no descriptor beside the connection (so no file, no socket, no program), and none of the worker's
environment. The process imports once and then forks the one that renders, so that the next one is there at once where
native code that cannot be interrupted had to be killed.

Frames in both directions are a length of 8 bytes and so many bytes of UTF-8.

    in:   {"template": ..., "messages": [...], "variables": {...}}
    out:  a letter, and the text: R what was rendered, E why the template failed, L which limit it met
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from types import FrameType
from typing import Any

if __name__ == "__main__":  # where the worker finds its packages; behind the usual places, so that nothing is shadowed
    sys.path += [path for path in sys.argv[4].split(os.pathsep) if path not in sys.path]

# All of it now: nothing can be opened later.
import jinja2.constants
import jinja2.debug
import jinja2.exceptions
from transformers.utils.chat_template_utils import render_jinja_template

RENDERED, FAILED, LIMITED = b"R", b"E", b"L"
KILL_AFTER = 2  # times the limit: native code that runs on is ended by the kernel
TAKEN_AT_MOST = 2**30  # bytes of address space when it is ready, where that cannot be found out
PR_SET_PDEATHSIG = 1
ENCODING = ("utf-8", "surrogatepass")
_WARM_UP = (
    "{%- macro shown(m) -%}{{ m.role | trim }}{{ m | tojson }}{%- endmacro -%}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ shown(m) ~ strftime_now('%d %b %Y %A') }}{% endfor %}"
)


class TooExpensive(BaseException):
    """No exception that anything in a template could catch."""


def main(seconds: float, memory_bytes: int, output_characters: int) -> None:
    connection = socket.socket(fileno=0)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGVTALRM)
    )  # whoever started it may not hear them
    render({"template": _WARM_UP, "messages": [{"role": "user"}], "variables": {}})
    datetime.now().astimezone()  # the time zone's file is read once
    signal.signal(signal.SIGPROF, _interrupt)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    send(connection, RENDERED, "")  # ready
    while (code := _forked(lambda: serve(connection, seconds, memory_bytes, output_characters))) == -signal.SIGVTALRM:
        send(connection, LIMITED, "time")
    sys.exit(abs(code))  # it may have died within a frame: a new connection is the way out


def serve(connection: socket.socket, seconds: float, memory_bytes: int, output_characters: int) -> None:
    confine(memory_bytes)
    while (request := receive(connection)) is not None:
        send(connection, *answer(request, seconds, output_characters))


def _forked(work: Callable[[], None]) -> int:
    """Does it in a child. Returns the child's exit code, or, below zero, the signal that ended it."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def confine(memory_bytes: int) -> None:
    """From here on it can open nothing, write no file, start no program, and take so much more memory at most."""
    if sys.platform == "linux":  # elsewhere this cannot be limited
        try:
            with open("/proc/self/statm") as sizes:
                taken = int(sizes.read().split()[0]) * resource.getpagesize()
        except OSError:  # a container without /proc
            taken = TAKEN_AT_MOST
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes,) * 2)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(limit, (value, value))


def answer(request: bytes, seconds: float, output_characters: int) -> tuple[bytes, str]:
    """The kind of the answer, and its text."""
    try:
        try:
            _arm(seconds)
            return attempt(request, output_characters)
        finally:
            _arm(0)
    except TooExpensive:
        _arm(0)  # which it may have kept from happening
        return LIMITED, "time"
    except MemoryError:
        return LIMITED, "memory"
    except Exception as error:  # noqa: BLE001  an error that cannot even be told
        return FAILED, type(error).__name__


def attempt(request: bytes, output_characters: int) -> tuple[bytes, str]:
    """The same, within the limits: to put an error into words is work too, and its template has chosen how much."""
    try:
        text = render(json.loads(request))
    except MemoryError:
        raise
    except jinja2.exceptions.SecurityError as error:
        return FAILED, f"it does what its sandbox forbids (SecurityError): {_short(error)}"
    except jinja2.exceptions.TemplateError as error:
        return FAILED, _short(error)
    except Exception as error:  # noqa: BLE001  whatever a template does, it is this conversation's failure alone
        return FAILED, f"{type(error).__name__}: {_short(error)}"
    return (RENDERED, text) if len(text) <= output_characters else (LIMITED, "output")


def render(request: dict[str, Any]) -> str:
    # All names of its parameters are given, so that no variable can take the place of one.
    rendered, _ = render_jinja_template(
        conversations=[request["messages"]],
        tools=None,
        documents=None,
        chat_template=request["template"],
        return_assistant_tokens_mask=False,
        continue_final_message=False,
        add_generation_prompt=True,
        **request["variables"],
    )
    return str(rendered[0])


def _arm(seconds: float) -> None:
    """Of processor time, for this process alone: a busy machine fails no conversation. 0 stops the clocks."""
    signal.setitimer(signal.ITIMER_VIRTUAL, KILL_AFTER * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TooExpensive


def _short(error: BaseException) -> str:
    return str(error)[:1000]


def send(connection: socket.socket, kind: bytes, text: str) -> None:
    data = kind + text.encode(*ENCODING)
    connection.sendall(len(data).to_bytes(8) + data)


def receive(connection: socket.socket) -> bytes | None:
    """None when the other end is closed."""
    head = _exactly(connection, 8)
    return None if head is None else _exactly(connection, int.from_bytes(head))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(min(count - len(parts), 2**20))):
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
