"""An engine whose model is split: its processes and its runner. What belongs to them is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.errors import UsageError
from workers.engine.models import choose_device
from workers.engine.runner import Runner

if TYPE_CHECKING:
    import torch

    from workers.engine.config import EngineConfig
    from workers.engine.models import LoadedModel
    from workers.engine.parallel.group import Group

SPLIT = (
    "a model that is split over several devices cannot be exchanged while it runs: drain the worker, and start it with "
    "the other model"
)


def lead(model: str, config: EngineConfig, revision: str | None) -> tuple[Group, LoadedModel]:
    """Start the processes among which the model is split, and load this one's part of it.

    Raises:
        UsageError: It cannot be split so, or cannot be loaded.
        GroupBroken: One of the processes ended.
    """
    from workers.engine.parallel.loading import refuse_unsplittable

    refuse_unsplittable(model, config.tensor_parallel_size, revision)  # before any process is started for it
    group = make_group(config.tensor_parallel_size, choose_device(config.device))
    try:
        return group, group.load(model, config, revision)
    except BaseException:
        group.close()
        raise


def make_group(size: int, device: torch.device) -> Group:
    """Of ``size`` processes, the first one on ``device``. Raises UsageError or GroupBroken."""
    from workers.engine.parallel.group import Group

    return Group(size, device)


def make_runner(loaded: LoadedModel, config: EngineConfig, max_model_len: int, group: Group | None) -> Runner:
    """With a ``group`` the one that drives it."""
    if group is None:
        if config.tensor_parallel_size > 1:
            raise UsageError("a model in memory is whole: name a folder or hub id to have it split over devices")
        return Runner(loaded, config, max_model_len)
    from workers.engine.parallel.runners import DrivingRunner

    return DrivingRunner(loaded, config, max_model_len, group)
