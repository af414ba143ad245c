"""Operators' orders, looked for every second: cancels, pauses, and the commands that another thread carries out.

Each look compares what is wanted with what is, so a look that fails, or comes late, loses nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchjobs.text import shortened

if TYPE_CHECKING:
    from batchjobs.store import Orders, Store
    from batchjobs.types import Lease, Pause
    from workers.commands import Commands
    from workers.gate import Gate
    from workers.holdings import Holdings
    from workers.intake import Intake
    from workers.mode import Mode
    from workers.returns import Returns
    from workers.rq_worker import RqWorker
    from workers.standstill import Standstill

log = logging.getLogger("batchjobs.worker")

ORDERS_SECONDS = 1.0


class Control:
    """For one thread at a time: the main one before the others start, then one of its own."""

    def __init__(
        self,
        store: Store,
        rq: RqWorker,
        holdings: Holdings,
        intake: Intake,
        gate: Gate,
        standstill: Standstill,
        returns: Returns,
        commands: Commands,
        mode: Mode,
    ) -> None:
        self._store = store
        self._rq = rq
        self._holdings = holdings
        self._intake = intake
        self._gate = gate
        self._standstill = standstill
        self._returns = returns
        self._commands = commands
        self._mode = mode
        self._paused_batches: frozenset[str] = frozenset()

    def look(self) -> Orders:
        """Raises ConnectionFailed: the database cannot be reached; what was ordered before holds on."""
        return self._store.orders(self._rq.name, self._holdings.leases)

    def obey(self) -> None:
        """Looks, and does what is wanted."""
        self.apply(self.look())

    def apply(self, orders: Orders) -> None:
        """Raises ConnectionFailed: what was to be given back could not be. The next look tries again."""
        self._holdings.cancel(set(orders.cancelled_batches), set(orders.cancelled_requests))
        self._pause(orders.pause)
        self._pause_batches(orders)
        self._commands.offer(orders.commands)
        self._returns.give_back(self._unwanted(orders))

    def _pause(self, pause: Pause | None) -> None:
        before, self._mode.pause = self._mode.pause, pause
        if (before is None) == (pause is None):
            return
        self._rq.is_paused = pause is not None
        if pause is not None:
            self._gate.shut()
            self._standstill.want(True)
            log.info("paused %s: no token is made and nothing is claimed", _told(pause))
        else:
            self._standstill.want(False)
            self._gate.open()
            self._intake.wake()
            log.info("resumed: work goes on")
        self._mode.on_change()

    def _pause_batches(self, orders: Orders) -> None:
        paused = frozenset(orders.paused_batches)
        self._holdings.pause(paused)
        for batch_id in sorted(paused - self._paused_batches):
            pause = orders.paused_batches[batch_id]
            log.info("batch %s is paused %s", batch_id, _told(pause), extra={"batch": batch_id})
        for batch_id in sorted(self._paused_batches - paused):
            log.info("batch %s is not paused any more", batch_id, extra={"batch": batch_id})
        self._paused_batches = paused

    def _unwanted(self, orders: Orders) -> list[Lease]:
        """What shall be given back: by the wish of whoever paused it, or because others would wait for what stands."""
        if orders.pause is not None and orders.pause.release:
            return self._holdings.leases
        stand_in_the_way = self._mode.is_finishing or self._intake.is_clearing
        return [
            lease
            for lease in self._holdings.suspended
            if stand_in_the_way or orders.paused_batches[lease.shard.batch_id].release
        ]


def _told(pause: Pause) -> str:
    """By whom and why, as words of a sentence."""
    reason = f" ({shortened(pause.reason, 200)})" if pause.reason else ""
    return f"by {pause.by or 'somebody'}{reason}"
