"""Which attention functions are installed and fit the device, best first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from workers.engine.attention.flash_functions import (
    FlashFunctions,
    flash_attn_2,
    flash_attn_2_varlen,
    flash_attn_3,
    torch_varlen,
)

Import = Callable[[str], Any]
LEAST_CAPABILITY = (8, 0)
HOPPER = 9  # FlashAttention 3 is made for it


@dataclass(frozen=True, slots=True)
class Found:
    """The functions of one package, best first; or why there are none."""

    functions: tuple[FlashFunctions, ...]
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    package: str
    module: str
    make: tuple[Callable[[Any], FlashFunctions | None], ...]
    only_major: int | None = None


_PLACES = (
    _Place("FlashAttention 3", "flash_attn_interface", (flash_attn_3,), only_major=HOPPER),
    _Place("flash-attn 2", "flash_attn", (flash_attn_2, flash_attn_2_varlen)),
    _Place("torch's varlen_attn", "torch.nn.attention.varlen", (torch_varlen,)),
)


def find_functions(device: torch.device) -> Iterator[Found]:
    """Those for a device, package by package. Each is imported only when it is its turn, and none without CUDA."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        yield from search(torch.cuda.get_device_capability(device))


def search(capability: tuple[int, int], load: Import = importlib.import_module) -> Iterator[Found]:
    """Those for devices of a compute capability, from modules that ``load`` imports."""
    if capability < LEAST_CAPABILITY:
        yield Found((), f"flash attention needs compute capability 8.0, and this device has {_dotted(capability)}")
        return
    for place in _PLACES:
        if place.only_major in (None, capability[0]):
            yield _found(place, load)


@cache
def _found(place: _Place, load: Import) -> Found:
    """The same ones whenever they are asked for, so that a trial of them holds. What fails is not tried again."""
    try:
        module = load(place.module)
    except ModuleNotFoundError as error:
        name = error.name or place.module
        return Found((), f"{place.package} is not installed" + ("" if name == place.module else f" (no {name})"))
    except Exception as error:  # noqa: BLE001 - built for another torch, say
        return Found((), f"{place.package} cannot be imported: {error}")
    made = tuple(functions for make in place.make if (functions := make(module)) is not None)
    return Found(made, None if made else f"{place.package} has no functions here that take page tables")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
