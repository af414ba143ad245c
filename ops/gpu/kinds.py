"""Who can compute attention on a device, how one of them is made to, and why it was or was not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from workers.engine.attention import cuda, flash_search
from workers.engine.attention.flash_search import Found

if TYPE_CHECKING:
    from workers.engine.attention.flash_functions import FlashFunctions
    from workers.engine.engine import Engine

PLAIN = "plain torch"


def available(device: str) -> list[str]:
    """The plain torch path first, then what is installed, best first."""
    return [PLAIN, *_functions(device)]


@contextmanager
def only(device: str, kind: str) -> Iterator[None]:
    """Engines that are made meanwhile compute attention in this way, where it serves their layers."""
    chosen = () if kind == PLAIN else (_functions(device)[kind],)
    before = vars(cuda)["find_functions"]
    vars(cuda)["find_functions"] = lambda device: iter([Found(chosen)])
    try:
        yield
    finally:
        vars(cuda)["find_functions"] = before


def why(engine: Engine) -> str:
    """Which kernel its layers have on a GPU, and why others have not, in the words of the log."""
    runner = engine.runner
    if runner.device.type == "cpu":
        return ""
    layers = [module.paged_attention for module in runner.model.modules() if hasattr(module, "paged_attention")]
    choice = cuda.choose(runner.device, runner.model.dtype, [layer.spec for layer in layers], runner.page_size)
    return "; ".join(sentence for _, sentence in choice.notes)


def can_be_recorded(engine: Engine) -> bool:
    return all(getattr(backend, "in_graphs", False) for backend in engine.runner.backends)


def is_recorded(engine: Engine) -> bool:
    """Whether decode steps run as recorded graphs."""
    return bool(getattr(engine.runner._graphs, "_forwards", None))


def _functions(device: str) -> dict[str, FlashFunctions]:
    found = flash_search.find_functions(torch.device(device))
    return {functions.name: functions for each in found for functions in each.functions}
