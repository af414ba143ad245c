"""Paged attention over ragged packed rows, and the choice of who computes it."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.engine.attention.compiler import KernelError, load_kernel
from workers.engine.attention.cpu import CpuPagedAttention
from workers.engine.attention.cuda import choose
from workers.engine.attention.interface import AttentionBackend, LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

__all__ = ["AttentionBackend", "LayerCache", "LayerSpec", "PackedRows", "choose_backend"]

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("paged_attention.cpp")


def choose_backend(
    device: torch.device | str, dtype: torch.dtype, specs: Sequence[LayerSpec], page_size: int | None = None
) -> AttentionBackend:
    """The fastest backend that serves all these layers on this device; there is always one. Says once which and why.

    Args:
        page_size: Tokens of a page if that is decided; None leaves it to the backend.
    """
    device = torch.device(device)
    if device.type != "cpu":
        choice = choose(device, dtype, specs, page_size)
        for level, note in choice.notes:
            _say_once(level, note)
        return choice.backend
    if not all(CpuPagedAttention.supports(spec, dtype) for spec in specs):
        _say_once(logging.INFO, f"attention runs in plain torch: the C++ kernel does not serve these layers in {dtype}")
        return TorchPagedAttention()
    kernel = _kernel()
    if isinstance(kernel, str):
        _say_once(logging.WARNING, f"attention runs in plain torch, several times slower on a CPU: {kernel}")
        return TorchPagedAttention()
    _say_once(logging.INFO, f"attention runs in the C++ kernel {kernel._name}")
    return CpuPagedAttention(kernel)


@cache
def _kernel() -> ctypes.CDLL | str:
    """The kernel, or why there is none: tried once a process."""
    try:
        return load_kernel(_SOURCE)
    except KernelError as reason:
        return str(reason)


@cache
def _say_once(level: int, message: str) -> None:
    _log.log(level, "%s", message)
