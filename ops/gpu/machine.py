"""The machine: what it is, what is installed, and how fast it multiplies and reads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable

import torch

from ops.gpu.notes import Found, Notes
from ops.gpu.setup import Setup
from workers.bench import bound

PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-3", "triton", "numpy", "llguidance")
GPU_MATRIX, GPU_BYTES = 8192, 2**32  # wide enough to keep a large GPU busy for a millisecond, and past its caches
ROUNDS = 20


def section(notes: Notes, setup: Setup) -> None:
    notes.run("versions", versions)
    notes.run("device", lambda: device(setup.device))
    notes.run("peaks", lambda: peaks(setup.device), seconds=5)


def versions() -> Found:
    found: Found = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found


def device(name: str) -> Found:
    """Who it is. Raises RuntimeError with torch's own words where there is no such device."""
    if not name.startswith("cuda"):
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(name)
    free, total = torch.cuda.mem_get_info(name)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "driver": driver(),
    }


def driver() -> str | None:
    """The version of NVIDIA's driver, where it can be read."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


@torch.inference_mode()
def peaks(name: str) -> Found:
    """The matrix peak in bfloat16, and the memory bandwidth: the better of reading and of copying.

    On a GPU the best of some turns: a higher peak makes every share that is measured against it smaller.
    """
    on_gpu = name.startswith("cuda")
    size, count = (GPU_MATRIX, GPU_BYTES) if on_gpu else (bound.PEAK_SIZE // 4, bound.READ_BYTES // 16)
    where = torch.device(name)
    a, b = (torch.randn(size, size, device=where).to(torch.bfloat16) for _ in range(2))
    product = fastest(lambda: torch.mm(a, b), where)
    numbers, other = (torch.ones(count // 4, device=where) for _ in range(2))
    read, copied = fastest(numbers.sum, where), fastest(lambda: other.copy_(numbers), where)
    return {
        "flops": 2 * size**3 / product,
        "bytes_per_second": max(count / read, 2 * count / copied),
        "read_bytes_per_second": count / read,
        "copy_bytes_per_second": 2 * count / copied,
        "matrix_size": size,
    }


def fastest(call: Callable[[], object], where: torch.device, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest turn, two turns of warming up before."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - begin)
    return min(times[2:])
