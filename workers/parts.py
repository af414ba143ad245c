"""What a worker consists of, put together. The threads among it are started and ended by :mod:`workers.daemon`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.types import CommandKind
from workers.burst import Burst
from workers.checkpointer import Checkpointer
from workers.commands import Commands, Stopping
from workers.control import ORDERS_SECONDS, Control
from workers.drain import Drain
from workers.gate import Gate
from workers.holdings import Holdings
from workers.intake import Intake
from workers.mode import Mode
from workers.model_update import ModelUpdate
from workers.outcomes import Outcomes
from workers.periodic import Periodic
from workers.recorder import Recorder
from workers.returns import Returns
from workers.rq_worker import RqWorker
from workers.serving import Serving
from workers.standstill import Standstill
from workers.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings
    from batchjobs.store import Store
    from batchjobs.types import Command
    from workers.engine.loop import EngineLoop
    from workers.reader import Observer

RECONCILE_SECONDS = 5.0
RECONCILE_REST_SECONDS = 0.5
"""Messages may come often, and each look at all that waits costs the servers something."""

CHECKPOINT_WAIT_SECONDS = 10.0
"""How long a checkpoint waits for the engine's step in progress; else the next one comes round."""


class Parts:
    """Of one worker. ``on_drained`` is called when a command to drain was carried out and SQL knows."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        queue: JobQueue,
        loop: EngineLoop,
        name: str,
        on_drained: Callable[[], None],
        observers: Observer | None,
    ) -> None:
        lease, beat = settings.lease_seconds, settings.heartbeat_seconds
        self.mode, self.gate, self.stopping = Mode(self._on_change), Gate(), Stopping()
        # A batch may name the model as the worker was told it, or by its short name.
        self.serving = Serving(loop.engine, [settings.model] if settings.model else [])
        self.rq = RqWorker(queue.url, name, lease_seconds=lease)
        outcomes = Outcomes(name, self.serving)
        self.holdings = Holdings(loop, self.rq, unread_size=settings.shard_size)
        self.recorder = Recorder(store, self.holdings, outcomes)
        every = settings.checkpoint_seconds
        self.checkpoints = Checkpointer(store, loop, self.holdings) if every > 0 else None
        self.returns = Returns(store, self.rq, self.holdings, self.recorder, self.checkpoints)
        self.intake = Intake(
            store,
            self.rq,
            loop,
            self.holdings,
            self.recorder,
            outcomes,
            self.serving,
            self.gate,
            self.returns,
            lease_seconds=lease,
            shard_size=settings.shard_size,
            max_requests=settings.max_requests_per_batch,
            is_queue_broken=lambda: self.reconcile.is_failing,
            observers=observers,
        )
        held, ends = self.holdings, self.stopping
        update = ModelUpdate(
            *(store, name, loop, held, self.gate, self.returns, self.serving, self.mode, ends),
            checkpoints=self.checkpoints,
            observers=observers,
        )
        drain = Drain(held, self.intake, self.recorder, self.gate, self.returns, self.mode, ends)
        ways = {CommandKind.UPDATE_MODEL: update.carry_out, CommandKind.DRAIN: drain.carry_out}

        def on_end(command: Command) -> None:
            if command.kind is CommandKind.DRAIN:
                on_drained()

        self.commands = Commands(store, ends, ways, on_end)
        self.standstill = Standstill(loop, self.mode)
        self.control = Control(
            store, self.rq, held, self.intake, self.gate, self.standstill, self.returns, self.commands, self.mode
        )
        self.upkeep = Upkeep(store, queue, self.rq, loop, held, self.mode, lease_seconds=lease, heartbeat_seconds=beat)
        self.leases = Periodic("renewing leases", beat, self.upkeep.keep_leases)
        self.rq_beat = Periodic("telling Redis", beat, self.upkeep.keep_rq)
        self.orders = Periodic("looking for orders", ORDERS_SECONDS, self.control.obey)
        self.reconcile = Periodic(
            "reconciling", min(RECONCILE_SECONDS, lease / 2), self.upkeep.reconcile, rest=RECONCILE_REST_SECONDS
        )
        self.saving = Periodic("storing unfinished answers", every, self._save) if self.checkpoints else None
        self.burst = Burst(
            store, self.serving, held, self.recorder, self.intake, self.commands, self.mode, self.look_again
        )
        held.on_end = self._on_end

    @property
    def threads(self) -> list[Intake | Recorder | Periodic | Commands | Standstill]:
        """In the order in which they start."""
        periodic = [self.leases, self.rq_beat, self.orders, self.reconcile, *([self.saving] if self.saving else [])]
        return [self.standstill, self.commands, self.intake, self.recorder, *periodic]

    def look_again(self) -> None:
        """There is work in SQL, perhaps not in Redis."""
        self.reconcile.wake()
        self.intake.wake()

    def wake(self) -> None:
        """Somebody has queued something, or given an order. What a pause kept out of Redis is missing there when it is
        over, so that is looked for too."""
        self.reconcile.wake()
        self.intake.wake()
        self.orders.wake()

    def _on_change(self) -> None:
        """The worker's state is another one: SQL and Redis are to hear of it."""
        self.leases.wake()
        self.upkeep.beat_soon()
        self.rq_beat.wake()

    def _on_end(self) -> None:
        """A shard is held no more: Redis is to hear of it, and there is room for another."""
        self.rq_beat.wake()
        self.intake.make_room()

    def _save(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(CHECKPOINT_WAIT_SECONDS)
