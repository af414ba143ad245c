"""Waiting: for a batch to end, for one request, for what workers were ordered to do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from batchjobs.errors import WaitTimeout
from batchjobs.text import plural
from batchjobs.types import BatchStatus, CommandKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchjobs.store import Store, StoredResult, WorkerRow
    from batchjobs.types import BatchInfo, Command

_FIRST_LOOK_SECONDS = 0.05
_LONGEST_SECONDS = 1.0


def wait_for_end(
    store: Store,
    batch_id: str,
    timeout: float | None = None,
    seen: Callable[[BatchInfo], None] = lambda info: None,
) -> BatchInfo:
    """Returns when every request has its outcome. ``seen`` is called after each look, about once a second.

    What a worker that died held of a cancelled batch is cancelled here once its lease is over: no worker may be left
    that would do it.

    Raises:
        NotFound: There is no such batch.
        WaitTimeout: ``timeout`` seconds went by; 0 looks once.
    """
    for _ in _looks(timeout):
        info = store.batch(batch_id)
        seen(info)
        if info.status.is_final:
            return info
        if info.status == BatchStatus.CANCELLING:
            store.sweep_cancelled()
    raise WaitTimeout(too_late(info, timeout or 0))


def wait_for_request(store: Store, batch_id: str, index: int, timeout: float) -> StoredResult:
    """A request once it has ended; as it is when ``timeout`` seconds have gone by. Raises NotFound."""
    for _ in _looks(timeout):
        found = store.result(batch_id, index)
        if found.completion is not None:
            break
    return found


def wait_for_commands(
    store: Store,
    given: Sequence[Command],
    timeout: float | None = None,
    seen: Callable[[Command], None] = lambda command: None,
) -> list[Command]:
    """Returns the commands, in the same order, when each has been carried out or refused. A drain has when its worker
    has ended.

    A worker that ended or died before it was done leaves a command whose ``error`` says so; in the database it stays
    open, for a worker of that name that starts again. ``seen`` is called with each command once, as it ends.

    Raises WaitTimeout after ``timeout`` seconds; 0 looks once.
    """
    ended: dict[str, Command] = {}
    for _ in _looks(timeout):
        # In this order: a worker that ends between the two looks has left its last word.
        workers = {row.name: row for row in store.workers()}
        for command in store.commands([command.id for command in given if command.id not in ended]):
            outcome = _outcome(command, workers.get(command.worker))
            if outcome is not None:
                ended[command.id] = outcome
                seen(outcome)
        if len(ended) == len(given):
            return [ended[command.id] for command in given]
    left = ", ".join(sorted(command.worker for command in given if command.id not in ended))
    raise WaitTimeout(
        f"within {timeout or 0:g} s there was no answer from {left}; the order stands, `batchjobs workers` shows "
        "what each of them does"
    )


def _looks(timeout: float | None) -> Iterator[None]:
    """One at once, then more after growing pauses, the last one when ``timeout`` seconds have gone by."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_LOOK_SECONDS
    while True:
        yield
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            pause = min(pause, left)
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_SECONDS)


def _outcome(command: Command, worker: WorkerRow | None) -> Command | None:
    """The command with what became of it; None while its worker is at it."""
    is_drain = command.kind == CommandKind.DRAIN
    # One that started after the order is another process of the same name.
    is_there = worker is not None and worker.is_alive and not (is_drain and worker.started_at > command.created_at)
    if command.finished_at is not None and (command.error is not None or not is_drain or not is_there):
        return command
    if is_there:
        return None
    if is_drain and worker is not None and worker.stopped_at is not None:
        return replace(command, finished_at=worker.stopped_at)
    return replace(command, error=_left_open(command, worker))


def _left_open(command: Command, worker: WorkerRow | None) -> str:
    how = "died" if worker is not None and worker.state == "dead" else "ended"
    if command.started_at is None:
        return f"the worker {how} before it began; one of that name carries it out when it starts"
    return (
        f"the worker {how} while it carried this out; `batchjobs workers` shows which version it serves when it is back"
    )


def too_late(info: BatchInfo, timeout: float) -> str:
    left = plural(info.counts.total - info.counts.done, "request")
    return f"batch {info.id} did not end within {timeout:g} s: {left} left; it goes on, wait for it again"
