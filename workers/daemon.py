"""The worker: claims shards, feeds the engine, stores the outcomes, and leaves everything in order when it ends.

| thread | does |
| --- | --- |
| main | signals, commands, supervision, the end |
| intake | claims ahead of need, reads, tokenises |
| engine | generates |
| recorder | writes outcomes to SQL |
| leases, rq, cancels, reconcile, checkpoints | every few seconds each, see :mod:`workers.upkeep` |

SQL commits first, then RQ hears of it. Whatever dies, SQL's leases run out and somebody else goes on.
"""

from __future__ import annotations

import logging
import os
import queue as queues
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from batchjobs.checkup import SKEW_SECONDS
from batchjobs.connections import connect_queue, connect_store
from batchjobs.errors import BatchjobsError, UsageError
from batchjobs.store import WorkerInfo
from workers.checkpointer import Checkpointer
from workers.command_listener import CommandKind
from workers.holdings import Holdings
from workers.intake import Intake
from workers.outcomes import Outcomes
from workers.periodic import Periodic
from workers.recorder import Recorder
from workers.rq_worker import RqWorker
from workers.shutdown import Shutdown
from workers.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings
    from batchjobs.store import Store
    from workers.engine.loop import EngineLoop

log = logging.getLogger("batchjobs.worker")

CANCEL_SECONDS = 1.5
RECONCILE_SECONDS = 5.0
CHECKPOINT_WAIT_SECONDS = 10.0
"""How long a checkpoint waits for the engine's step in progress; else the next one comes round."""

_TICK_SECONDS = 0.1
_ASK_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_worker(
    settings: Settings,
    loop: EngineLoop,
    *,
    burst: bool = False,
    name: str | None = None,
    until: Callable[[], bool] | None = None,
) -> int:
    """Connects, works until told to end (see :class:`Daemon`), and returns the exit code.

    Raises:
        ConnectionFailed: The database or Redis cannot be reached at the start.
        UsageError: The name cannot be used.
    """
    store = connect_store(settings)
    try:
        queue = connect_queue(settings)
        try:
            return Daemon(settings, store, queue, loop, burst=burst, name=name, until=until).run()
        finally:
            queue.close()
    finally:
        store.close()


class Daemon:
    """One worker process.

    Args:
        loop: Around the engine; started here, and stopped.
        burst: End when there is nothing to claim, everything held is stored, and whoever holds other shards lives.
        name: Unique among the living workers; made up of host and process where none is given.
        until: Asked now and then; the worker ends in good order when it says True.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        queue: JobQueue,
        loop: EngineLoop,
        *,
        burst: bool = False,
        name: str | None = None,
        until: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name or _made_up_name()
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} cannot be a worker's name: use letters, digits, '.', '_' and '-'")
        self._settings = settings
        self._store = store
        self._loop = loop
        self._burst = burst
        self._until = until
        self._stop_reason: str | None = None
        self._signalled = False
        self._ask_at = 0.0
        self._first_ends: dict[str, float] = {}  # of others' leases, as they were seen first
        self._waits = False
        lease = settings.lease_seconds
        self._rq = RqWorker(queue.url, self.name, lease_seconds=lease)
        outcomes = Outcomes(self.name, loop.engine)
        self._holdings = Holdings(loop, self._rq, unread_size=settings.shard_size)
        self._recorder = Recorder(store, self._holdings, outcomes)
        # A batch may name the model as the worker was told it, or by its short name.
        self._models = {loop.engine.model_name, settings.model or loop.engine.model_name}
        self._intake = Intake(
            store,
            self._rq,
            loop,
            self._holdings,
            self._recorder,
            outcomes,
            models=self._models,
            lease_seconds=lease,
            shard_size=settings.shard_size,
            max_requests=settings.max_requests_per_batch,
            is_queue_broken=lambda: self._reconcile.is_failing,
        )
        beat = settings.heartbeat_seconds
        upkeep = Upkeep(store, queue, self._rq, loop, self._holdings, lease_seconds=lease, heartbeat_seconds=beat)
        self._upkeep = upkeep
        self._leases = Periodic("renewing leases", beat, upkeep.keep_leases)
        self._rq_beat = Periodic("telling Redis", beat, upkeep.keep_rq)
        self._cancels = Periodic("looking for cancellations", CANCEL_SECONDS, upkeep.watch_cancels)
        self._reconcile = Periodic("reconciling", min(RECONCILE_SECONDS, lease / 2), upkeep.reconcile)
        self._checkpoints = Checkpointer(store, loop, self._holdings)
        self._saving = Periodic("storing unfinished answers", settings.checkpoint_seconds, self._save)
        self._saves = settings.checkpoint_seconds > 0
        self._holdings.on_end = self._on_end

    def run(self) -> int:
        """Works until told to end. Returns 0 after an end in good order, 1 when something in it broke."""
        with self._signals():
            self._open()
            broken: str | None = "it was interrupted"
            try:
                broken = self._supervise()
            finally:
                self._close(broken)
        return 1 if broken else 0

    def stop(self, reason: str = "asked to stop") -> None:
        """Asks for an end in good order: from any thread, and from a signal handler."""
        self._stop_reason = self._stop_reason or reason

    def _threads(self) -> list[Intake | Recorder | Periodic]:
        periodic = [self._leases, self._rq_beat, self._cancels, self._reconcile]
        return [self._intake, self._recorder, *periodic, *([self._saving] if self._saves else [])]

    # Beginning

    def _open(self) -> None:
        self._rq.open()
        try:
            self._register()
        except BaseException:
            with suppress(BatchjobsError):
                self._rq.close()
            raise
        if not self._loop.is_running:
            self._loop.start()
        for thread in self._threads():
            thread.start()
        engine = self._loop.engine
        log.info("worker %s started: %s on %s (%s)", self.name, engine.model_name, engine.device, engine.dtype)

    def _register(self) -> None:
        engine = self._loop.engine
        skew = self._store.clock_skew_seconds()
        if abs(skew) > SKEW_SECONDS:
            log.warning(
                "the clock of this host is %.0f s %s that of the database; leases do not mind, times in results do",
                *(abs(skew), "ahead of" if skew > 0 else "behind"),
            )
        self._store.register_model_version(
            engine.model_version, engine.model_name, self._settings.model or engine.model_name, engine.dtype, {}
        )
        self._store.register_worker(
            WorkerInfo(
                name=self.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                device=engine.device,
                dtype=engine.dtype,
                model=engine.model_name,
                model_version=engine.model_version,
                state="idle",
            )
        )

    # Working

    def _supervise(self) -> str | None:
        """Returns when the worker shall end: None in good order, or what broke."""
        while self._stop_reason is None:
            self._obey()
            self._rq.note = "waiting for the database" if self._is_database_away() else ""
            if broken := self._broken():
                return broken
            if self._burst and self._is_drained():
                self.stop("nothing left to do")
            elif self._is_time():
                self.stop("done")
        log.info("worker %s ends: %s", self.name, self._stop_reason)
        return None

    def _on_end(self) -> None:
        """A shard is held no more: Redis is to hear of it, and there is room for another."""
        self._rq_beat.wake()
        self._intake.make_room()

    def _save(self) -> None:
        self._checkpoints.save(CHECKPOINT_WAIT_SECONDS)

    def _is_database_away(self) -> bool:
        return self._leases.is_failing or self._recorder.is_failing

    def _is_time(self) -> bool:
        if self._until is None or time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_SECONDS
        try:
            return self._until()
        except BatchjobsError:  # the threads that need the database say so
            return False

    def _obey(self) -> None:
        """One command, or a moment's rest."""
        try:
            command = self._rq.commands.get(timeout=_TICK_SECONDS)
        except queues.Empty:
            return
        if command.kind == CommandKind.SHUTDOWN:
            self.stop("told so by RQ's shutdown command")
        elif command.kind == CommandKind.STOP_SHARD and command.shard is not None:
            self._holdings.stop(command.shard)
        else:
            self._intake.wake()
            self._cancels.wake()

    def _broken(self) -> str | None:
        if not self._loop.is_running:
            return f"the engine died: {_told(self._loop.failure)}"
        for thread in self._threads():
            if not thread.is_alive():
                return f"the thread {thread.name!r} died: {_told(thread.failure)}"
        return None

    def _is_drained(self) -> bool:
        if len(self._holdings) or self._recorder.backlog:
            return False
        if self._intake.is_suspended:
            return True
        try:
            left = self._store.claimable_count(self._models) or self._silent_holders()
        except BatchjobsError:  # the threads that need the database say so
            return False
        if left:
            self._reconcile.wake()  # it is in SQL, and may be missing in Redis
            self._intake.wake()
        return not left and not len(self._holdings)

    def _silent_holders(self) -> list[str]:
        """Workers that hold shards and were not seen to prolong their leases since we look: they may be dead."""
        holders = self._store.holders(self._models)
        self._first_ends = {name: self._first_ends.get(name, end) for name, end in holders.items()}
        silent = [name for name, end in holders.items() if end <= self._first_ends[name]]
        if silent and not self._waits:
            log.info("waiting for the leases of %s: it works on them, or they run out", ", ".join(silent))
        self._waits = bool(silent)
        return silent

    # Ending

    def _close(self, broken: str | None) -> None:
        if broken:
            log.error("worker %s: %s", self.name, broken, exc_info=self._failure())
        Shutdown(
            store=self._store,
            rq=self._rq,
            loop=self._loop,
            holdings=self._holdings,
            recorder=self._recorder,
            checkpoints=self._checkpoints if self._saves else None,
            upkeep=self._upkeep,
            claiming=(self._intake, self._cancels, self._reconcile, self._saving),
            beating=(self._leases, self._rq_beat),
        ).run(in_order=broken is None)

    def _failure(self) -> BaseException | None:
        failures = [self._loop.failure, *(thread.failure for thread in self._threads())]
        return next((failure for failure in failures if failure is not None), None)

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the worker in good order; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
        self.stop(f"got {signal.Signals(number).name}")


def _made_up_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:60]
    return f"{host}-{os.getpid()}-{uuid4().hex[:4]}"


def _told(failure: BaseException | None) -> str:
    return f"{type(failure).__name__}: {failure}" if failure is not None else "for no known reason"
