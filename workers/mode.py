"""What a worker was told to do, as its threads see it, and the one word that lists show of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.types import Pause


@dataclass(slots=True)
class Mode:
    """Each field is written by one thread: ``pause`` by that of the orders, ``stands_still`` by that of the standstill,
    the others by that of the commands. Who changes the state calls ``on_change``, so that it is told at once and not
    with the next heartbeat.

    While ``is_finishing`` everything that runs is waited for, so paused batches may not keep their place in the engine.
    """

    on_change: Callable[[], None]

    pause: Pause | None = None
    stands_still: bool = False  # the step that was in progress when the pause came is over
    is_updating: bool = False
    is_draining: bool = False
    is_finishing: bool = False
    loading: str | None = None  # the model that is read and checked, while the old one goes on

    def state(self, *, is_busy: bool, is_suspended: bool) -> str:
        """updating, draining, paused, busy, suspended (by `rq suspend`) or idle."""
        if self.is_updating:
            return "updating"
        if self.is_draining:
            return "draining"
        if self.pause is not None and (self.stands_still or not is_busy):
            return "paused"
        return "busy" if is_busy else "suspended" if is_suspended else "idle"
