"""The loop's thread: what it does in each of its turns.

What it keeps true:
- Nobody else touches the engine.
- An update that waits for answers to be finished holds up nothing: steps go on, outcomes are delivered, cancels heard.
  It waits for suspended ones too, until they are resumed or cancelled: its caller can set a limit, or stop the loop.
- What has ended is delivered before another model takes over, so whoever asks for the model's version while an outcome
  is delivered gets that of the model that made it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError
from batchjobs.types import Inflight
from workers.engine.inbox import Inbox, Turn, UpdateOrder
from workers.engine.update import Update, UpdateRefused

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.outbox import Outbox
    from workers.engine.requests import EngineOutput
    from workers.engine.update import UpdateReport


class Driver:
    """Takes from the inbox, drives the engine, puts into the outbox."""

    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox) -> None:
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._update: Update | None = None  # begun, and waiting for answers to be finished

    def run(self) -> BaseException | None:
        """Returns when the loop is to end: with what the engine died of, if it did."""
        self._outbox.thread_id = threading.get_ident()
        turns = {
            Turn.APPLY: self._apply_changes,
            Turn.LOOK: self._look,
            Turn.UPDATE: self._go_on_updating,
            Turn.STEP: self._step,
            Turn.STAND: self._stand,
        }
        try:
            while (turn := self._inbox.next_turn(self._has_work, self._is_update_due)) is not Turn.END:
                turns[turn]()
            self._clear()
        except BaseException as error:  # noqa: BLE001  # kept for every caller; the thread ends with it
            return error
        return None

    def _has_work(self) -> bool:
        return self._engine.has_work

    def _step(self) -> None:
        self._publish(self._engine.step())

    def _apply_changes(self) -> None:
        changes = self._inbox.take_changes()
        for request in changes.added:
            self._engine.add(request)
        for request_id in changes.cancelled:
            self._cancel(request_id)
        for is_suspension, request_ids in changes.suspensions:
            (self._engine.suspend if is_suspension else self._engine.resume)(request_ids)
        if changes.suspensions:
            self._publish(self._engine.settle())

    def _cancel(self, request_id: Hashable) -> None:
        output = self._engine.cancel(request_id)
        self._publish([] if output is None else [output])

    def _publish(self, outputs: list[EngineOutput]) -> None:
        """Tokens first: the last ones of a stream come before its end."""
        if self._outbox.is_streaming:
            self._outbox.put_deltas(self._engine.take_deltas())
        if self._inbox.max_queue_size:
            with self._outbox.lock:
                self._inbox.waiting = self._engine.stats().unbegun
                self._outbox.news.notify_all()
        for output in outputs:
            self._outbox.put(output)

    def _look(self) -> None:
        looks, seen = self._inbox.take_looks(), self._engine.progress()
        with self._outbox.lock:
            for look in looks:
                look.seen = seen
            self._outbox.news.notify_all()

    def _stand(self) -> None:
        self._publish(self._engine.settle())
        with self._outbox.lock:
            self._inbox.is_standing = True
            self._outbox.news.notify_all()

    # Another model

    def _is_update_due(self, order: UpdateOrder) -> bool:
        return order.is_withdrawn or self._update is None or self._update.is_ready

    def _go_on_updating(self) -> None:
        """Begin the update that was asked for, apply it where nothing is to be waited for, or give it up."""
        with self._outbox.lock:
            order = self._inbox.updates[0]
            is_off = order.is_withdrawn or bool(self._inbox.stopping)
        report, error = None, None
        try:
            report = None if is_off else self._begin_or_apply(order)
        except UsageError as refused:
            error = refused.with_traceback(None)  # which has frames that know the staged model, and this one the error
        if report is None and error is None and not is_off:
            return  # answers are to be finished first
        if self._update is not None:
            self._update.abandon()
            self._update = None
        with self._outbox.lock:
            self._inbox.updates.popleft()
            order.report, order.error, order.is_dropped = report, error, is_off
            self._outbox.news.notify_all()
        self._publish(self._engine.settle())

    def _begin_or_apply(self, order: UpdateOrder) -> UpdateReport | None:
        if self._update is None:
            if self._inbox.holders and order.inflight == Inflight.FINISH:
                raise UpdateRefused("nothing is finished during a pause: resume first, or choose another inflight")
            update = Update(self._engine, order.staged, order.inflight)
            update.begin()
            self._update = update
        if not self._update.is_ready:
            return None
        self._publish(self._engine.settle())
        return self._update.apply()

    # The end

    def _clear(self) -> None:
        """Leave an engine that a new loop can use: the step in flight is collected, and nothing of ours is left."""
        if self._update is not None:
            self._update.abandon()
        self._publish(self._engine.settle())
        self._apply_changes()
        # What is suspended when all else is finished has not been cancelled by anybody: it is lost here, and can go on
        # elsewhere.
        cancel = self._cancel if self._inbox.stopping == "cancel" else self._engine.cancel
        for request_id in self._outbox.unfinished:
            cancel(request_id)
