"""Why a batch waits: nobody lives that can serve it, or all who could are paused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.cli.moments import pause_text
from batchjobs.fields import listed
from batchjobs.store.pauses import ALL_WORKERS
from batchjobs.text import visible

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from batchjobs.store import Store, WorkerRow
    from batchjobs.types import BatchInfo

Wanted = tuple[str | None, str | None]
"""A model and a version of it; None takes any."""


def why_waiting(store: Store, info: BatchInfo, workers: Sequence[WorkerRow]) -> str | None:
    """Why a batch that has not ended does not go on, with what would help; None where nothing is known against it."""
    if info.status.is_final:
        return None
    alive = [worker for worker in workers if worker.is_alive]
    if not alive:
        return "no worker is running; `batchjobs worker` starts one"
    wanted = store.unserved(info.id)
    return _unserved(wanted, alive) or _paused(store, wanted, alive)


def why_stranded(store: Store, info: BatchInfo, workers: Sequence[WorkerRow]) -> str | None:
    """Of a batch that has not ended: that no living worker serves what it asks for."""
    return _unserved(store.unserved(info.id), [worker for worker in workers if worker.is_alive])


def _unserved(wanted: Collection[Wanted], alive: Sequence[WorkerRow]) -> str | None:
    missing = [pair for pair in wanted if not any(_serves(worker, *pair) for worker in alive)]
    models = sorted({model for model, _ in missing if model is not None and not any(_has(row, model) for row in alive)})
    if models:
        served = listed(sorted({name for worker in alive for name in _names_of(worker)}))
        return (
            f"no living worker has the model that the batch asks for, {visible(models[0])} (there is {served}); "
            "`batchjobs worker --model` or `batchjobs model update` with that name brings one"
        )
    versions = sorted({version for _, version in missing if version is not None})
    if versions:
        served = listed(sorted({worker.model_version for worker in alive}))
        return (
            f"requests of the batch are pinned to version {listed(versions)} of the model, and no living worker has "
            f"it (there is {served}); `batchjobs model list` says what it was loaded from"
        )
    return None


def _paused(store: Store, wanted: Collection[Wanted], alive: Sequence[WorkerRow]) -> str | None:
    """All who could serve some of it are paused."""
    for pair in wanted:
        able = [worker for worker in alive if _serves(worker, *pair)]
        if able and all(worker.pause is not None for worker in able):
            first = able[0].pause
            names = listed(worker.name for worker in able)
            are = "the worker that could go on with it is" if len(able) == 1 else "all workers that could go on are"
            whom = "--all-workers" if ALL_WORKERS in store.worker_pauses() else f"--worker {able[0].name}"
            return f"{are} paused ({names}), {pause_text(first)}; `batchjobs resume {whom}` lifts that"
    return None


def _names_of(worker: WorkerRow) -> tuple[str, ...]:
    """The names it may be asked for; one of an older version says nothing about them."""
    return worker.serves or (worker.model,)


def _has(worker: WorkerRow, model: str) -> bool:
    return model in _names_of(worker)


def _serves(worker: WorkerRow, model: str | None, version: str | None) -> bool:
    return (model is None or _has(worker, model)) and (version is None or worker.model_version == version)
