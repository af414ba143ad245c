"""CPU memory for the pages of sequences that gave way, so that they go on later without computing anything again.

Strategy: the scheduler decides and numbers the pages (:class:`HostPool`), the runner copies (:class:`HostCache`), in
the order of the decisions and between two forwards. So a page that is copied out holds what every step before has
written, and the next step can write it.

Invariants:
- A host page is free or belongs to one waiting sequence.
- The tensors are made when the first page is copied out: a worker that never runs short takes no memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from workers.engine.cache import KVCache


class Direction(Enum):
    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Page ``device[i]`` to or from page ``host[i]``, in all page tensors."""

    direction: Direction
    device: list[int]
    host: list[int]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Where a waiting sequence's pages are: by group, 0 where it had none any more."""

    pages: list[list[int]]
    computed: int  # tokens whose keys and values are in them

    @property
    def held(self) -> list[int]:
        return [page for group in self.pages for page in group if page]


class HostPool:
    """Numbers of host pages, from 1 on."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def take(self, count: int) -> list[int]:
        """The caller has seen that ``count`` are free."""
        assert count <= self.free
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class HostCache:
    """The page tensors in CPU memory, pinned where the device is a GPU."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self._capacity = capacity
        self._tensors: list[torch.Tensor] = []

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Carry the copies out in their order. On a GPU they are queued on the current stream, behind its last step."""
        for copy in copies:
            for device, host in zip(self._cache.tensors, self._host_tensors(), strict=True):
                inside = torch.tensor(copy.device, device=device.device)
                outside = torch.tensor(copy.host) - 1
                if copy.direction is Direction.OUT:
                    host[outside] = device.index_select(0, inside).to(host.device)
                else:
                    device.index_copy_(0, inside, host.index_select(0, outside).to(device.device))

    def release(self) -> None:
        """Let go of the memory."""
        self._tensors = []

    def _host_tensors(self) -> list[torch.Tensor]:
        if not self._tensors:
            self._tensors = [
                torch.empty(
                    (self._capacity, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
                for tensor in self._cache.tensors
            ]
        return self._tensors


def host_pages(space_gib: float, *, threshold: float, page_bytes: int, useful: int) -> int:
    """How many pages ``space_gib`` GiB give, no more than ``threshold`` of the machine's memory and than are useful."""
    memory = min(space_gib * 2**30, threshold * psutil.virtual_memory().total)
    return min(int(memory) // page_bytes, useful)
