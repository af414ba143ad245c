"""How many pages the KV cache gets and how many rows a step may have, from the memory that the device has.

Strategy: on a GPU the largest step is tried before there are pages, and the most memory that it takes for a while is
set apart. Of what is left besides, the pages get a share; the rest is for what nobody can know before: gaps between
tensors, recorded steps, libraries. Where nobody says how many rows a step has, they are halved until the step fits and
leaves most of the memory to the pages. On a CPU nothing is tried: pages take memory when they are first used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import psutil
import torch

from batchjobs.errors import UsageError
from workers.engine.cgroups import memory_left

log = logging.getLogger(__name__)

STEP_SHARE = 0.25  # of the free memory, for a step whose number of rows is worked out
ENOUGH_ROWS = 512  # such a step is not made smaller than this for the sake of more pages

MIB = 2**20


class DeviceMemory(Protocol):
    """The memory that pages and steps share."""

    share: float  # of what is free beside a step, for the pages
    batch_tokens: int  # rows of a step to begin with

    def free_bytes(self) -> int: ...

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        """The most that ``work`` takes for a while; None if there is not enough for it. 0 where nothing is tried."""
        ...


class HostMemory:
    """Of a CPU: the machine's, or what is left of the container's limit."""

    share, batch_tokens = 0.25, 2048

    def free_bytes(self) -> int:
        available = int(psutil.virtual_memory().available)
        left = memory_left()
        return available if left is None else min(available, left)

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        return 0


class CudaMemory:
    """Of a GPU, whoever else uses it considered."""

    share, batch_tokens = 0.9, 8192

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()  # what a former model let go of is free only then
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        try:
            work()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            return None
        most = torch.cuda.max_memory_allocated(self._device) - allocated  # a part may lie in gaps that were reserved
        return int(max(most, torch.cuda.max_memory_reserved(self._device) - reserved))


class UntriedCudaMemory(CudaMemory):
    """Of a GPU on which no step can be tried, since other devices would have to take part."""

    share, batch_tokens = 0.8, 2048

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        return 0


def memory_of(device: torch.device, *, tries: bool) -> DeviceMemory:
    if device.type != "cuda":
        return HostMemory()
    return CudaMemory(device) if tries else UntriedCudaMemory(device)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user decided; None is worked out. ``share`` is ``max_memory_percent``."""

    pages: int | None
    batch_tokens: int | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Budget:
    pages: int  # the null page is one of them
    batch_tokens: int  # rows of a step at most


def plan_memory(
    memory: DeviceMemory,
    wanted: Wanted,
    *,
    page_bytes: int,
    useful_pages: int,
    other_bytes: int = 0,
    try_step: Callable[[int], object],
) -> Budget:
    """Share the memory out.

    Args:
        useful_pages: More than that nobody could fill.
        other_bytes: What will be taken besides, for as long as there are pages.
        try_step: Runs a step of so many rows, in no pages.

    Raises:
        UsageError: There is no room for two pages, or for a step.
    """
    if wanted.pages is not None and wanted.batch_tokens is not None:
        return Budget(wanted.pages, wanted.batch_tokens)
    tokens, step_bytes, free = _largest_step(memory, wanted, page_bytes, other_bytes, try_step)
    share = wanted.share or memory.share
    pages = wanted.pages or min(useful_pages, int((free - step_bytes) * share) // page_bytes)
    if pages < 2:
        raise UsageError(
            f"no memory for the KV cache: one page takes {page_bytes / MIB:.1f} MiB, {free / MIB:.0f} MiB are free and "
            f"a step of {tokens} rows takes {step_bytes / MIB:.0f} MiB; set num_blocks"
        )
    if step_bytes:
        amounts = tokens, step_bytes / MIB, pages, pages * page_bytes / MIB
        log.info("a step of %d rows takes %.0f MiB for a while, %d pages take %.0f MiB", *amounts)
    return Budget(pages, tokens)


def _largest_step(
    memory: DeviceMemory, wanted: Wanted, page_bytes: int, other_bytes: int, try_step: Callable[[int], object]
) -> tuple[int, int, int]:
    """Its rows, the bytes that it takes, and those that are free when it has ended."""
    tokens = wanted.batch_tokens or memory.batch_tokens
    while True:
        step_bytes = memory.peak_bytes(partial(try_step, tokens))
        free = memory.free_bytes() - other_bytes
        if step_bytes is not None:
            pages = (wanted.pages or 0) * page_bytes
            room = free - pages if pages else STEP_SHARE * free
            if wanted.batch_tokens is not None or tokens <= ENOUGH_ROWS or step_bytes <= room:
                break
        elif tokens == 1:
            raise UsageError(f"no memory for a step of one row: {free / MIB:.0f} MiB are free beside the model")
        tokens = max(1, tokens // 2)
    if wanted.batch_tokens is not None and tokens < wanted.batch_tokens:
        log.warning("steps have %d rows at most: %d do not fit the device's memory", tokens, wanted.batch_tokens)
    return tokens, step_bytes, free
