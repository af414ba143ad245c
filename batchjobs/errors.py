"""Errors for people. Each says what happened and what to do next, and carries the exit code of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class BatchjobsError(Exception):
    """An error that the command line prints as one message, without a traceback, and exits with ``exit_code``."""

    exit_code = 1


class UsageError(BatchjobsError):
    """The command, a setting or the input was wrong; nothing was done."""

    exit_code = 2


class ConnectionFailed(BatchjobsError):
    """Redis or the database cannot be reached."""

    exit_code = 3


class NotFound(BatchjobsError):
    """No such batch, request or worker."""

    exit_code = 4


class WaitTimeout(BatchjobsError):
    """The time given to wait ran out before the batch ended."""

    exit_code = 124


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with one input line.

    ``line`` counts from 1, blank lines included, as an editor does. ``field`` names the offending field, dotted for
    nested ones (``body.temperature``), or is None when the line as a whole is wrong. ``source`` names the file when
    several make one batch.
    """

    line: int
    message: str
    field: str | None = None
    custom_id: str | None = None
    code: str = "invalid_request"
    source: str | None = None

    def __str__(self) -> str:
        place = f"{self.source}, line" if self.source is not None else "line"
        return f"{place} {self.line}: {self.message}"


class InvalidInput(UsageError):
    """Input lines were refused and nothing was stored. ``errors`` holds every one of them, in line order."""

    def __init__(self, source: str, errors: Sequence[LineError]) -> None:
        self.source = source
        self.errors = list(errors)
        count = len(self.errors)
        super().__init__(f"{source}: {count} invalid line{'s' if count != 1 else ''}; nothing was stored")


class KeyConflict(UsageError):
    """The submission key was used before, for other content."""


class InvalidParameter(ValueError):
    """A sampling parameter has a value that cannot be used. ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)
