"""The worker: claims shards, feeds the engine, stores the outcomes, and leaves everything in order when it ends.

| thread | does |
| --- | --- |
| main | signals, messages, supervision, the end |
| intake | claims ahead of need, reads, tokenises |
| engine | generates |
| recorder | writes outcomes to SQL |
| orders | every second: cancels, pauses, and which commands there are |
| commands | carries out model updates and drains |
| standstill | holds the engine's pause while the worker is paused |
| leases, rq, reconcile, checkpoints | every few seconds each, see :mod:`workers.upkeep` |

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
from batchjobs.store import WorkerFigures, WorkerInfo
from batchjobs.text import shortened
from workers.command_listener import MessageKind
from workers.logs import name_worker
from workers.parts import Parts
from workers.shutdown import Shutdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings
    from batchjobs.store import Orders, Store
    from workers.engine.loop import EngineLoop
    from workers.reader import Observer

log = logging.getLogger("batchjobs.worker")

_TICK_SECONDS = 0.1
_STANDSTILL_SECONDS = 1.0
_ASK_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run_worker(
    settings: Settings,
    loop: EngineLoop,
    *,
    burst: bool = False,
    name: str | None = None,
    until: Callable[[], bool] | None = None,
    observers: Observer | None = None,
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
            return Daemon(settings, store, queue, loop, burst=burst, name=name, until=until, observers=observers).run()
        finally:
            queue.close()
    finally:
        store.close()


class Daemon:
    """One worker process.

    Args:
        loop: Around the engine; started here, and stopped.
        burst: End when there is nothing to claim, everything held is stored, and whoever holds other shards lives: see
            :class:`workers.burst.Burst`.
        name: Unique among the living workers; made up of host and process where none is given.
        until: Asked now and then; the worker ends in good order when it says True.
        observers: Is told of outcomes and updates.
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
        observers: Observer | None = None,
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
        self._parts = parts = Parts(settings, store, queue, loop, self.name, self._end_drained, observers)
        self._rq, self._holdings, self._recorder, self._intake = parts.rq, parts.holdings, parts.recorder, parts.intake

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

    def _end_drained(self) -> None:
        self.stop("drained by a command")

    # Beginning

    def _open(self) -> None:
        name_worker(self.name)
        self._rq.open()
        try:
            self._register()
            orders = self._first_orders()
        except BaseException:
            with suppress(BatchjobsError):
                self._rq.close()
            raise
        if not self._loop.is_running:
            self._loop.start()
        self._obey_first(orders)
        for thread in self._parts.threads:
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
        source = self._settings.model or engine.model_name
        self._store.register_model_version(
            engine.model_version, engine.model_name, source, engine.dtype, engine.model_details
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
                serves=tuple(sorted(self._parts.serving.names)),
            )
        )

    def _first_orders(self) -> Orders:
        """What an earlier process of this name left behind is settled. What holds for the worker is known before it
        claims anything: one that is paused starts paused."""
        self._store.settle_commands(self.name, self._loop.engine.model_version)
        return self._parts.control.look()

    def _obey_first(self, orders: Orders) -> None:
        self._parts.control.apply(orders)
        figures = WorkerFigures(state=self._parts.mode.state(is_busy=False, is_suspended=False))
        with suppress(BatchjobsError):  # the first heartbeat says it again
            self._store.beat(self.name, figures)

    # Working

    def _supervise(self) -> str | None:
        """Returns when the worker shall end: None in good order, or what broke."""
        while self._stop_reason is None:
            self._obey()
            self._rq.note = self._note()
            if broken := self._broken():
                return broken
            if self._burst and self._parts.burst.is_over():
                self.stop("nothing left to do")
            elif self._is_time():
                self.stop("done")
        log.info("worker %s ends: %s", self.name, self._stop_reason)
        return None

    def _note(self) -> str:
        if self._parts.leases.is_failing or self._recorder.is_failing:
            return "waiting for the database"
        loading = self._parts.mode.loading
        return "" if loading is None else f"loading the model {shortened(loading, 100)}"

    def _is_time(self) -> bool:
        if self._until is None or time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_SECONDS
        try:
            return self._until()
        except BatchjobsError:  # the threads that need the database say so
            return False

    def _obey(self) -> None:
        """One message, or a moment's rest."""
        try:
            message = self._rq.messages.get(timeout=_TICK_SECONDS)
        except queues.Empty:
            return
        if message.kind == MessageKind.SHUTDOWN:
            self.stop("told so by RQ's shutdown command")
        elif message.kind == MessageKind.STOP_SHARD and message.shard is not None:
            self._holdings.stop(message.shard)
        else:
            self._parts.wake()

    def _broken(self) -> str | None:
        if not self._loop.is_running:
            return f"the engine died: {_told(self._loop.failure)}"
        for thread in self._parts.threads:
            if not thread.is_alive():
                return f"the thread {thread.name!r} died: {_told(thread.failure)}"
        return None

    # Ending

    def _close(self, broken: str | None) -> None:
        if broken:
            log.error("worker %s: %s", self.name, broken, exc_info=self._failure())
        parts = self._parts
        saving = [parts.saving] if parts.saving else []
        Shutdown(
            store=self._store,
            rq=self._rq,
            loop=self._loop,
            holdings=self._holdings,
            recorder=self._recorder,
            returns=parts.returns,
            checkpoints=parts.checkpoints,
            upkeep=parts.upkeep,
            claiming=(parts.commands, parts.intake, parts.orders, parts.reconcile, *saving),
            beating=(parts.leases, parts.rq_beat),
        ).run(in_order=broken is None)
        parts.standstill.close(_STANDSTILL_SECONDS)

    def _failure(self) -> BaseException | None:
        failures = [self._loop.failure, *(thread.failure for thread in self._parts.threads)]
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
