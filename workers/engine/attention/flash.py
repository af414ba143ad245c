"""Paged attention by the functions of another package: at most two calls a layer, one for all decode rows and one for
all prefill rows.

Kept true here:
- All rows' keys and values are written first, by one indexed copy each. A kernel that appends them itself would write
  one kind of rows while the other kind, which may share pages with it, has yet to be read; and not every kernel can.
- Neither `begin` nor `attend` makes the host wait for the device. What `attend` reads of a step of decode rows only is
  the arrays that `begin` got, so a captured graph stays right when they are filled anew.
- What lies in a page past its sequence's end, or in the null page, reaches no result: lengths end what a kernel reads,
  page sizes are such that its blocks of keys end there too, and `flash_rows` names pages before a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workers.engine.attention.flash_rows import FlashStep, decode_arrays, decode_rows, flash_step, step_arrays
from workers.engine.attention.interface import LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workers.engine.attention.flash_functions import FlashFunctions

__all__ = ["FlashPagedAttention", "decode_rows"]


class FlashPagedAttention:
    """Caches are [num_pages, page_size, Hkv, D], as those of `TorchPagedAttention`."""

    in_graphs = True

    def __init__(self, functions: FlashFunctions) -> None:
        self.functions = functions
        self.name, self.page_size = functions.name, functions.page_size
        self._step: FlashStep | None = None

    def allocate(
        self, spec: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        """Make a layer's pages; see `AttentionBackend.allocate`."""
        return TorchPagedAttention().allocate(spec, num_pages, page_size, dtype, device)

    def host_arrays(self, rows: PackedRows) -> list[NDArray[Any]]:
        """Slots, lengths, page tables and the like; see `flash_rows`."""
        return step_arrays(rows)

    def decode_arrays(self, rows: PackedRows, size: int, width: int) -> list[NDArray[Any]]:
        """Those of a step of decode rows, padded; see `flash_rows.decode_arrays`."""
        return decode_arrays(rows, size, width)

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None:
        """Keep the step's arrays. Raises ValueError if they are not those of such a step."""
        self._step = flash_step(rows, arrays)

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
        step = self._step
        if step is None:
            raise RuntimeError("attend before begin: no packed step is known")
        _write(cache.keys, step.slots, key)
        _write(cache.values, step.slots, value)
        packed = query[0].transpose(0, 1).to(cache.keys.dtype)  # [T, Hq, D]
        if packed.stride(-1) != 1:
            packed = packed.contiguous()
        return self._attend(spec, cache, packed, step).to(query.dtype)[None]

    def _attend(self, spec: LayerSpec, cache: LayerCache, packed: torch.Tensor, step: FlashStep) -> torch.Tensor:
        """[T, Hq, D] -> [T, Hq, Dv], contiguous."""
        count, functions = step.decode_count, self.functions
        if step.decode is None or step.prefill is None:
            rows = step.prefill if step.decode is None else step.decode
            if rows is None:  # a step without rows
                return packed.new_empty(0, spec.num_heads, spec.value_dim)
            attend = functions.prefill if step.decode is None else functions.decode
            return attend(packed, cache.keys, cache.values, rows, spec).contiguous()
        if step.decode_rows is None or step.prefill_rows is None:
            first = functions.decode(packed[:count], cache.keys, cache.values, step.decode, spec)
            rest = functions.prefill(packed[count:], cache.keys, cache.values, step.prefill, spec)
            return torch.cat((first, rest))
        out = packed.new_empty(len(packed), spec.num_heads, spec.value_dim)
        for attend, rows, where in (
            (functions.decode, step.decode, step.decode_rows),
            (functions.prefill, step.prefill, step.prefill_rows),
        ):
            out.index_copy_(0, where, attend(packed.index_select(0, where), cache.keys, cache.values, rows, spec))
        return out


def _write(pages: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """[1, Hkv, T, D] into their slots."""
    pages.flatten(0, 1).index_copy_(0, slots, new[0].transpose(0, 1).to(pages.dtype))
