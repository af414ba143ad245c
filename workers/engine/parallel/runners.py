"""A rank's part of each step: the model's pages on its device, and the same forward passes in the same order.

Only the driving rank chooses tokens: it alone has the requests, and no two ranks can come to differ over a logit's last
bit. What a step reads of the step before it, each slot's last token, is therefore sent from its device to the others',
in the order of the device's work: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from batchjobs.errors import BatchjobsError
from workers.engine.parallel.messages import Forward
from workers.engine.parallel.ranks import config_of_rank, least
from workers.engine.runner import Runner

if TYPE_CHECKING:
    from workers.engine.batch import PackedBatch
    from workers.engine.config import EngineConfig
    from workers.engine.models import LoadedModel
    from workers.engine.offload import PageCopy
    from workers.engine.parallel.group import Group
    from workers.engine.parallel.loading import Split
    from workers.engine.results import Result, StepResult
    from workers.engine.sampling_rows import SamplingRows


class RankRunner(Runner):
    """Of any rank. All of them are made at the same time, and take as many pages as the least of them can."""

    is_alone = False  # a step that one of them cannot do, the others are in the middle of

    def __init__(self, loaded: LoadedModel, config: EngineConfig, max_model_len: int, split: Split) -> None:
        super().__init__(loaded, config_of_rank(config, split), max_model_len, agree=partial(least, split=split))

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, copies: Sequence[PageCopy]) -> torch.Tensor:
        self.path.make_current()
        if len(batch.fed_rows):
            dist.broadcast(self._last_tokens, src=0)
        return super().forward(batch, copies)


class DrivingRunner(RankRunner):
    """Of the rank that has the requests: each forward pass is told to the others first."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, max_model_len: int, group: Group) -> None:
        self._group = group
        self._is_ready = False
        with group.watched():
            super().__init__(loaded, config, max_model_len, group.split)
        self._is_ready = True

    def forward(self, batch: PackedBatch, copies: Sequence[PageCopy]) -> torch.Tensor:
        """As :meth:`Runner.forward`. Raises GroupBroken."""
        if self._is_ready:  # until then each rank knows by itself what comes next
            self._group.tell(Forward(batch, list(copies)))
        with self._group.watched():
            try:
                return super().forward(batch, copies)
            except torch.OutOfMemoryError as error:  # the others are in the middle of this step: it cannot be repeated
                raise BatchjobsError(f"{self.device} has no memory for a step: lower max_memory_percent") from error

    def sample(self, logits: torch.Tensor, batch: PackedBatch, rows: SamplingRows, score_top: int) -> Result:
        with self._group.watched():
            return _Checked(super().sample(logits, batch, rows, score_top), self._group)


class _Checked:
    """A result that counts only if the group was whole when it arrived."""

    def __init__(self, result: Result, group: Group) -> None:
        self._result, self._group = result, group

    def wait(self) -> StepResult:
        with self._group.watched():
            return self._result.wait()
