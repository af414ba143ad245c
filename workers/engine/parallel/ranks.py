"""What every rank does as the others do: it joins them, agrees with them on numbers, and has a device of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from batchjobs.errors import UsageError
from workers.engine.memory import HostMemory

if TYPE_CHECKING:
    from pathlib import Path

    from workers.engine.config import EngineConfig
    from workers.engine.parallel.loading import Split

LOADING_SECONDS = 3600.0
"""How long ranks wait for each other: one may read its part of the weights much later than another."""

_LOOPBACK = "lo"


def join(split: Split, store: Path) -> None:
    """Become a rank among others, who find each other by the file ``store``. Returns when all of them are there."""
    is_cuda = split.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(split.device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // split.size))
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # else it listens to the whole network
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.FileStore(str(store), split.size),  # type: ignore[attr-defined]
        rank=split.rank,
        world_size=split.size,
        timeout=timedelta(seconds=LOADING_SECONDS),
        device_id=split.device if is_cuda else None,
    )


def least(number: int, split: Split) -> int:
    """The smallest of the ranks' numbers. Every rank calls it at the same place."""
    tensor = torch.tensor([number], dtype=torch.long, device=split.device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor.item())


def devices_from(first: torch.device, size: int) -> list[torch.device]:
    """``size`` devices from ``first`` on. On a CPU all ranks share it. Raises UsageError."""
    if first.type == "cpu":
        if torch.cuda.is_available():  # transformers would put the parts there
            raise UsageError("a model can be split on a CPU only where no GPU is visible: set CUDA_VISIBLE_DEVICES=''")
        return [first] * size
    if first.type != "cuda":
        raise UsageError(f"a model can be split over CUDA devices, not over {first.type}")
    start, there = first.index or 0, torch.cuda.device_count()
    if start + size > there:
        raise UsageError(f"tensor_parallel_size is {size}, but from cuda:{start} on there are {there - start} devices")
    return [torch.device("cuda", index) for index in range(start, start + size)]


def config_of_rank(config: EngineConfig, split: Split) -> EngineConfig:
    """What one rank's part of the engine goes by. Memory of the host is shared by the ranks."""
    own = replace(
        config, native_forward=False, use_cuda_graph=False, cpu_offload_space=config.cpu_offload_space / split.size
    )
    if split.device.type != "cpu":
        return own
    return replace(own, max_memory_percent=(config.max_memory_percent or HostMemory.share) / split.size)
