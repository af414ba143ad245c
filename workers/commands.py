"""Carries out commands in a thread of its own, one at a time, the oldest first: an update may take minutes, and cancels
and pauses must be heard meanwhile.

Each is noted in SQL as begun and as ended. One that this process does not come to end is settled by the next worker of
its name.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from batchjobs.errors import BatchjobsError, ConnectionFailed
from batchjobs.text import shortened
from workers.command_words import report, wish
from workers.engine.outbox import EngineStopped
from workers.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchjobs.store import Store
    from batchjobs.types import Command, CommandKind

log = logging.getLogger("batchjobs.worker")

STOP_SECONDS = 2.0
"""How long the end of a worker waits for a command that cannot be interrupted: a model is being read, say."""

T = TypeVar("T")
Result = dict[str, Any]


class Interrupted(Exception):
    """The worker is to end, and so does what it was told to do."""


class Stopping:
    """Whether the worker is to end, for what takes its time and must end then."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._outage = Outage("carrying out a command")

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Raises Interrupted when the worker is to end."""
        if self._event.wait(seconds):
            raise Interrupted

    def insist(self, action: Callable[[], T]) -> T:
        """Calls it again while the database is away.

        Raises:
            Interrupted: The worker is to end, and the database was away still.
        """
        while True:
            try:
                done = action()
            except ConnectionFailed as error:
                self.wait(self._outage.failed(error))
            else:
                self._outage.over()
                return done


class Commands(threading.Thread):
    """``ways`` carry out one kind each: they return the result, and raise BatchjobsError with the reason when they
    refuse. ``on_end`` is called after each, when SQL knows."""

    def __init__(
        self,
        store: Store,
        stopping: Stopping,
        ways: Mapping[CommandKind, Callable[[Command], Result]],
        on_end: Callable[[Command], None],
    ) -> None:
        super().__init__(name="commands", daemon=True)
        self.failure: BaseException | None = None
        self._store = store
        self._stopping = stopping
        self._ways = ways
        self._on_end = on_end
        self._open: list[Command] = []
        self._current: Command | None = None
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return self._current is not None or bool(self._open)

    def offer(self, commands: Sequence[Command]) -> None:
        """What is open, the oldest first, as somebody saw it in SQL a moment ago."""
        with self._changed:
            current = None if self._current is None else self._current.id
            self._open = [each for each in commands if each.id not in self._ended and each.id != current]
            self._changed.notify_all()

    def stop(self, timeout: float | None = None) -> None:
        """Begins no more. What goes on is interrupted where it waits; what it does not come to say in time, the main
        thread says here."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self.is_alive():
            self.join(STOP_SECONDS if timeout is None else min(timeout, STOP_SECONDS))
        if self.is_alive() and (current := self._current) is not None:
            try:
                self._store.end_command(current.id, error=_cut_off(current))
            except BatchjobsError as error:
                log.warning("that command %s was cut off could not be stored: %s", current.id, error)

    def run(self) -> None:
        try:
            while (command := self._next()) is not None:
                self._carry_out(command)
        except Interrupted:  # and SQL does not know: the next worker of this name tells it
            pass
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self.failure = error

    def _next(self) -> Command | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set or self._open)
            self._current = None if self._stopping.is_set else self._open.pop(0)
            return self._current

    def _carry_out(self, command: Command) -> None:
        if self._begins(command):
            log.info("%s", wish(command))
            result, error = self._outcome(command)
            if error is not None:
                log.error("command %s was not carried out: %s", command.kind, error)
            else:
                log.info("%s", report(command, result or {}))
            self._end(command, result, error)
        with self._changed:
            self._ended.add(command.id)
            self._open = [each for each in self._open if each.id != command.id]
            self._current = None

    def _begins(self, command: Command) -> bool:
        """False: it has ended, by somebody's hand, since it was seen."""
        tries = 0

        def begin() -> bool:
            nonlocal tries
            tries += 1
            return self._store.begin_command(command.id)

        # Nobody else begins it. So a second try that is refused was preceded by one whose answer was lost.
        return self._stopping.insist(begin) or tries > 1

    def _outcome(self, command: Command) -> tuple[Result | None, str | None]:
        try:
            return self._ways[command.kind](command), None
        except (Interrupted, EngineStopped):
            return None, _cut_off(command)
        except BatchjobsError as error:
            return None, str(error)
        except Exception as error:
            log.exception("command %s failed", command.kind)
            return None, shortened(f"{type(error).__name__}: {error}", 500)

    def _end(self, command: Command, result: Result | None, error: str | None) -> None:
        try:
            self._store.end_command(command.id, result=result, error=error)
        except ConnectionFailed:
            self._stopping.insist(lambda: self._store.end_command(command.id, result=result, error=error))
        self._on_end(command)


def _cut_off(command: Command) -> str:
    return f"the worker ended before {command.kind} was carried out; give the command again when it is back"
