"""Workers that are only rows, and answer an order in the moment it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchjobs.store import Store, WorkerFigures, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batchjobs.types import Command

VERSION = "sha256:00000000000000aa"
UPDATED: dict[str, Any] = {
    "old_version": VERSION, "new_version": "sha256:00000000000000bb", "old_model": "m", "new_model": "n",
    "is_reload": False, "paused_seconds": 0.25, "loading_seconds": 1.5, "inflight": "recompute", "finished": 0,
    "restarted": 0, "recomputed": 3, "kept": 0, "given_back": 2, "dry_run": False,
}  # fmt: skip


def register(store: Store, *names: str, state: str = "idle", **values: Any) -> None:
    """Enters living workers."""
    for name in names:
        given = {"host": "h", "pid": 5, "device": "cpu", "dtype": "float32", "model": "m", "model_version": VERSION}
        store.register_worker(WorkerInfo(name=name, **{**given, **values}))
        store.beat(name, WorkerFigures(state=state))


def answer_orders(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Store, Command], object]) -> list[Command]:
    """``answer`` is called with each command right after it was given. Returns the list of commands, which grows."""
    given: list[Command] = []
    order = Store.order

    def ordered(store: Store, *arguments: Any, **options: Any) -> list[Command]:
        made = order(store, *arguments, **options)
        for command in made:
            given.append(command)
            answer(store, command)
        return made

    monkeypatch.setattr(Store, "order", ordered)
    return given


def carried_out(store: Store, command: Command) -> None:
    """An update as it goes well."""
    store.begin_command(command.id)
    store.end_command(command.id, result=UPDATED)


def drained(store: Store, command: Command) -> None:
    """A drain, and the end of its worker."""
    store.begin_command(command.id)
    store.end_command(command.id, result={"finished": 3, "given_back": 1})
    store.retire_worker(command.worker, "stopped")
