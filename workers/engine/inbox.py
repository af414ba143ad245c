"""What callers ask of an :class:`EngineLoop`, until its thread does it: adds, cancels, suspensions, looks, updates of
the model, pauses and a stop."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, get_args

from workers.engine.requests import EngineRequest

if TYPE_CHECKING:
    from batchjobs.types import Inflight, Progress
    from workers.engine.staging import StagedModel
    from workers.engine.update import UpdateReport

Unfinished = Literal["finish", "cancel", "drop"]
"""What becomes of unfinished requests when the loop stops, in growing order of haste."""

_HASTE = get_args(Unfinished)
_TICK_SECONDS = 0.5


class EngineFull(queue.Full):
    """``max_queue_size`` requests wait already; the message says how many."""


class Turn(Enum):
    """What the loop's thread does next."""

    APPLY = auto()
    LOOK = auto()
    UPDATE = auto()
    STEP = auto()
    STAND = auto()
    END = auto()


@dataclass(slots=True, eq=False)
class Look:
    """Somebody's wish to know how far the requests are, and the answer when it is there."""

    seen: dict[Hashable, tuple[Progress, ...]] | None = None


@dataclass(slots=True, eq=False)
class UpdateOrder:
    """Somebody's wish for another model, and what became of it. ``is_withdrawn``: nobody waits for it any more."""

    staged: StagedModel
    inflight: Inflight | str
    report: UpdateReport | None = None
    error: Exception | None = None
    is_withdrawn: bool = False
    is_dropped: bool = False

    @property
    def is_done(self) -> bool:
        return self.report is not None or self.error is not None or self.is_dropped


@dataclass(frozen=True, slots=True)
class Changes:
    """What was asked for since the last time. Suspensions (True) and resumptions are in their order."""

    added: list[EngineRequest]
    cancelled: list[Hashable]
    suspensions: list[tuple[bool, tuple[Hashable, ...]]]


class Inbox:
    """Thread-safe, by the re-entrant ``lock``.

    ``waiting`` is the number of requests that the engine has and has not begun, as the loop's thread counted last.
    ``holders`` are the threads that are in a pause or on their way into it, one entry a pause. ``updates`` stay until
    they have ended.
    """

    def __init__(self, lock: threading.RLock, max_queue_size: int) -> None:
        self.lock = lock
        self.max_queue_size = max_queue_size
        self.waiting = 0
        self.holders: list[int] = []
        self.is_standing = False
        self.stopping: Unfinished | None = None
        self.ticked_at = time.monotonic()
        self._asked = threading.Condition(lock)
        self._added: deque[EngineRequest] = deque()
        self._cancelled: deque[Hashable] = deque()
        self._suspensions: deque[tuple[bool, tuple[Hashable, ...]]] = deque()
        self._looks: list[Look] = []
        self.updates: deque[UpdateOrder] = deque()

    @property
    def has_room(self) -> bool:
        return not self.max_queue_size or len(self._added) + self.waiting < self.max_queue_size

    @property
    def is_paused(self) -> bool:
        return self.is_standing and bool(self.holders)

    def wait_for_room(self, seconds: float | None, news: threading.Condition, is_open: Callable[[], bool]) -> None:
        """Returns when there is room, or when the loop accepts nothing more. With the lock held.

        Raises:
            EngineFull: There is none after so many seconds.
        """
        news.wait_for(lambda: self.has_room or not is_open(), seconds)
        if is_open() and not self.has_room:
            limit = self.max_queue_size
            raise EngineFull(f"{limit} requests wait already (max_queue_size); add again when some have begun")

    def add(self, request: EngineRequest) -> None:
        with self.lock:
            self._added.append(request)
            self._asked.notify_all()

    def cancel(self, request_id: Hashable) -> None:
        with self.lock:
            self._cancelled.append(request_id)
            self._asked.notify_all()

    def suspend(self, request_ids: tuple[Hashable, ...], *, suspended: bool) -> None:
        with self.lock:
            self._suspensions.append((suspended, request_ids))
            self._asked.notify_all()

    def update(self, order: UpdateOrder) -> None:
        with self.lock:
            self.updates.append(order)
            self._asked.notify_all()

    def withdraw(self, order: UpdateOrder) -> None:
        with self.lock:
            order.is_withdrawn = True
            self._asked.notify_all()

    def look(self) -> Look:
        with self.lock:
            self._looks.append(look := Look())
            self._asked.notify_all()
            return look

    def hold(self) -> None:
        with self.lock:
            self.holders.append(threading.get_ident())
            self._asked.notify_all()

    def release(self) -> None:
        with self.lock:
            self.holders.remove(threading.get_ident())
            self._asked.notify_all()

    def stop(self, unfinished: Unfinished) -> None:
        """A stop is never slowed down by another one.

        Raises:
            ValueError: There is no such way to stop.
            RuntimeError: ``finish`` from within this thread's own pause.
        """
        if unfinished not in _HASTE:
            raise ValueError(f"unfinished must be one of {', '.join(_HASTE)}, not {unfinished!r}")
        with self.lock:
            if unfinished == "finish" and threading.get_ident() in self.holders:
                raise RuntimeError("nothing can be finished during a pause: leave it before this stop")
            self.stopping = max(self.stopping or unfinished, unfinished, key=_HASTE.index)
            self._asked.notify_all()

    def next_turn(self, has_work: Callable[[], bool], is_update_due: Callable[[UpdateOrder], bool]) -> Turn:
        """Waits until something is to be done. Only for the loop's thread, as are the methods after it."""
        with self.lock:
            while (turn := self._choose(has_work, is_update_due)) is None:
                self.ticked_at = time.monotonic()
                self._asked.wait(_TICK_SECONDS)
            self.ticked_at = time.monotonic()
            return turn

    def take_changes(self) -> Changes:
        with self.lock:
            changes = Changes(list(self._added), list(self._cancelled), list(self._suspensions))
            for taken in (self._added, self._cancelled, self._suspensions):
                taken.clear()
            self.waiting += len(changes.added)
            return changes

    def take_looks(self) -> list[Look]:
        with self.lock:
            looks, self._looks = self._looks, []
            return looks

    def _choose(self, has_work: Callable[[], bool], is_update_due: Callable[[UpdateOrder], bool]) -> Turn | None:
        if self.stopping in ("cancel", "drop"):
            return Turn.END
        if self.holders and not self.is_standing:
            return Turn.STAND
        if self._added or self._cancelled or self._suspensions:
            return Turn.APPLY
        if self._looks:
            return Turn.LOOK
        if self.updates and (self.stopping or is_update_due(self.updates[0])):
            return Turn.UPDATE
        if self.holders:
            return None
        self.is_standing = False
        if has_work():
            return Turn.STEP
        return Turn.END if self.stopping else None
