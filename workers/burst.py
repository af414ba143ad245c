"""When a worker that ends with the work (``--burst``) has come to the end of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchjobs.errors import BatchjobsError
from batchjobs.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from workers.commands import Commands
    from workers.holdings import Holdings
    from workers.intake import Intake
    from workers.mode import Mode
    from workers.recorder import Recorder
    from workers.serving import Serving

log = logging.getLogger("batchjobs.worker")


class Burst:
    """``look_again`` makes the intake and the reconciliation look at once: there is something in SQL."""

    def __init__(
        self,
        store: Store,
        serving: Serving,
        holdings: Holdings,
        recorder: Recorder,
        intake: Intake,
        commands: Commands,
        mode: Mode,
        look_again: Callable[[], None],
    ) -> None:
        self._store = store
        self._serving = serving
        self._holdings = holdings
        self._recorder = recorder
        self._intake = intake
        self._commands = commands
        self._mode = mode
        self._look_again = look_again
        self._first_ends: dict[str, float] = {}  # of others' leases, as they were seen first
        self._waits = False

    def is_over(self) -> bool:
        """Nothing can be claimed, all that can go on is stored, and whoever holds other shards lives. What is left of
        paused batches is not waited for: the end gives it back. A paused worker waits until it is resumed."""
        if self._holdings.active or self._recorder.backlog or self._mode.pause is not None or self._commands.is_busy:
            return False
        if self._intake.is_suspended:
            return True
        try:
            left = self._store.claimable_count(*self._served) or self._silent_holders()
        except BatchjobsError:  # the threads that need the database say so
            return False
        if left:
            self._look_again()  # it is in SQL, and may be missing in Redis
        is_over = not left and not self._holdings.active
        if is_over and (paused := self._holdings.suspended):
            log.info("what is left is paused: %s of it here, given back", plural(len(paused), "shard"))
        return is_over

    @property
    def _served(self) -> tuple[frozenset[str], str]:
        return self._serving.names, self._serving.version

    def _silent_holders(self) -> list[str]:
        """Workers that hold shards and were not seen to prolong their leases since we look: they may be dead."""
        holders = self._store.holders(*self._served)
        self._first_ends = {name: self._first_ends.get(name, end) for name, end in holders.items()}
        silent = [name for name, end in holders.items() if end <= self._first_ends[name]]
        if silent and not self._waits:
            log.info("waiting for the leases of %s: it works on them, or they run out", ", ".join(silent))
        self._waits = bool(silent)
        return silent
