"""The queues as a worker sees them before it takes something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjobs.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queues at one moment: shards that wait, by queue; other workers with nothing to do; `rq suspend`."""

    depths: tuple[int, ...]
    idle_others: int
    suspended: bool

    @property
    def depth(self) -> int:
        return sum(self.depths)


def shares(count: int, depths: Sequence[int]) -> list[int]:
    """How many to take from each queue: the first ones first."""
    takes = []
    for depth in depths:
        takes.append(min(count, depth))
        count -= takes[-1]
    return takes


def is_shard(job_id: str) -> bool:
    try:
        ShardId.parse(job_id)
    except ValueError:
        return False
    return True
