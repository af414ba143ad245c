"""Paged attention on CUDA: the best functions that are installed, and plain torch for the layers that they refuse.

Both work on the same pages, so each layer is free to go its own way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from workers.engine.attention.flash import FlashPagedAttention
from workers.engine.attention.flash_search import Found, find_functions
from workers.engine.attention.flash_trial import fault
from workers.engine.attention.interface import AttentionBackend, LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from workers.engine.attention.flash_functions import FlashFunctions


class CudaPagedAttention(FlashPagedAttention):
    """Functions of a package for most layers, plain torch for those in ``refused``."""

    def __init__(self, functions: FlashFunctions, refused: Iterable[int] = ()) -> None:
        """``refused`` are the indices of layers."""
        super().__init__(functions)
        self._refused = frozenset(refused)
        self._plain = TorchPagedAttention()
        self.in_graphs = not self._refused  # plain torch makes its indices on the host

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None:
        """Keep the step, for both ways; see `FlashPagedAttention.begin`."""
        super().begin(rows, arrays)
        self._plain.begin(rows)

    def attend(
        self,
        spec: LayerSpec,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend; see `AttentionBackend.attend`."""
        if spec.index in self._refused:
            return self._plain.attend(spec, cache, query, key, value, sinks)
        return super().attend(spec, cache, query, key, value, sinks)


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves the layers of a model, and sentences for the log that say why."""

    backend: AttentionBackend
    notes: tuple[tuple[int, str], ...]  # level of logging, and sentence


def choose(
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[LayerSpec],
    page_size: int | None = None,
    finds: Iterable[Found] | None = None,
) -> Choice:
    """The functions that serve most layers, the best of them where several do; plain torch where none serves one.

    Args:
        page_size: Tokens of a page if that is decided; functions that cannot use such pages are passed over.
        finds: What is installed, best first; None looks for it.
    """
    passed: list[str] = []
    best: tuple[FlashFunctions, dict[int, str]] | None = None
    for functions in _each(find_functions(device) if finds is None else finds, passed):
        size = page_size or functions.page_size
        if (reason := functions.refuses_pages(size)) is not None:
            passed.append(f"{functions.name}: {reason}")
            continue
        refused = _refused(functions, specs, dtype, size, device)
        if len(refused) == len(specs):
            passed.append(f"{functions.name}: {next(iter(refused.values()))}")
        elif best is None or len(refused) < len(best[1]):
            best = functions, refused
        if not refused:
            break
    if best is None:
        why = f": {'; '.join(passed)}" if passed else ""
        level = logging.WARNING if device.type == "cuda" and dtype.itemsize == 2 else logging.INFO
        return Choice(TorchPagedAttention(), ((level, f"attention runs in plain torch on {device.type}{why}"),))
    functions, refused = best
    size = page_size or functions.page_size
    note = f"attention runs in {functions.name}, in pages of {size} tokens" + _passed_over(passed)
    notes = [(logging.INFO, note)]
    if refused:
        notes.append((logging.WARNING, f"plain torch computes the attention of {_by_reason(refused)}"))
    return Choice(CudaPagedAttention(functions, refused), tuple(notes))


def _each(finds: Iterable[Found], passed: list[str]) -> Iterator[FlashFunctions]:
    """All functions in their order; ``passed`` gets what is missing."""
    for found in finds:
        passed += [] if found.missing is None else [found.missing]
        yield from found.functions


def _refused(
    functions: FlashFunctions, specs: Sequence[LayerSpec], dtype: torch.dtype, page_size: int, device: torch.device
) -> dict[int, str]:
    """Reasons by the indices of layers."""
    reasons = {
        spec.index: functions.refuses(spec, dtype)
        or _fault(functions, replace(spec, index=0), dtype, page_size, device)
        for spec in specs
    }
    return {index: reason for index, reason in reasons.items() if reason is not None}


_fault = cache(fault)  # the layers of a model, and its groups, are much alike


def _passed_over(passed: Sequence[str]) -> str:
    return f" ({'; '.join(passed)})" if passed else ""


def _by_reason(refused: Mapping[int, str]) -> str:
    by_reason: dict[str, list[int]] = {}
    for index, reason in refused.items():
        by_reason.setdefault(reason, []).append(index)
    return "; ".join(f"{_layers(indices)}: {reason}" for reason, indices in by_reason.items())


def _layers(indices: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-2, 5``."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0])]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer{'s' if len(indices) > 1 else ''} {named}"
