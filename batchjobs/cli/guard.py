"""Around every command: each way to end has its exit code, and no error leaves as a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import complain, print_line_errors, say
from batchjobs.errors import BatchjobsError, InvalidInput
from batchjobs.interrupts import terminated
from batchjobs.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BROKEN_PIPE = 141
INTERRUPTED = 130


class OutputClosed(Exception):
    """Whoever read our output has read enough."""


def guarded(command: Callable[[], Any], *, debug: bool = False, arguments: Sequence[str] = ()) -> int:
    """Runs ``command`` and returns the exit code: what it returns if that is a number, else 0, or that of its error.
    Passwords in the ``arguments`` or the environment are in no message and no traceback."""
    debug = debug or bool(os.environ.get("BATCHJOBS_DEBUG"))
    _replace_closed_streams()
    _escape_what_cannot_be_encoded()
    try:
        with _termination_as_exit():
            code = command()
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        vars(error)["message"] = visible(error.message, keep_newlines=True)  # it may repeat an argument
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (BrokenPipeError, OutputClosed):
        _drop_output()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the last resort: one message in place of a traceback
        return _report(error, debug, arguments)


def _report(error: Exception, debug: bool, arguments: Sequence[str]) -> int:
    from batchjobs.logs import Redactor  # here, because it is only needed where something went wrong

    hidden = Redactor(argument for argument in arguments if "://" in argument)
    is_output_broken = not _flush_output()
    if debug:
        say(hidden("".join(traceback.format_exception(error)).rstrip()))
    if isinstance(error, InvalidInput):
        print_line_errors(error.errors)
    if isinstance(error, BatchjobsError):
        complain(hidden(str(error)))
        return error.exit_code
    if isinstance(error, OSError):
        place = "standard output" if is_output_broken else error.filename
        complain(hidden(f"{place}: {error.strerror}" if place else str(error)))
        return 1
    complain(hidden(f"internal error: {type(error).__name__}: {error}"))
    if not debug:
        say("This is a mistake in batchjobs. `batchjobs --debug ...` shows where it happened.")
    return 1


def _replace_closed_streams() -> None:
    """Where the shell closed a stream (``>&-``) Python has None: every print would fail, and the next file that is
    opened would get its number. Writing to such a stdout stays an error, one to such a stderr goes nowhere."""
    for number, name, flags in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, flags)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _escape_what_cannot_be_encoded() -> None:
    """An ASCII terminal gets ``\\u3042`` for a character it does not have, not an error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _flush_output() -> bool:
    """False: what was printed cannot be written, because a disk is full for example."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return False
    return True


def _drop_output() -> None:
    """Nobody gets it any more. Python flushes once again when it ends, which must find an open descriptor."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that half-written files go and a worker of ours is stopped."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
