"""A packed step as the arrays that attention functions read: decode rows and prefill rows, each with its sequences.

Kept true here:
- A page table's entries before the first page in use name that page, not the null page. A kernel that loads a block of
  keys across the border finds the sequence's own numbers there; it gives them no weight.
- A padding row writes slot 0 of the null page and has a length of 0: it sees nothing, whatever lies there.
- Shapes follow from the step's rows alone, and for `decode_arrays` from size and width alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.engine.attention.flash_functions import FlashRows
from workers.engine.attention.interface import PackedRows
from workers.engine.attention.torch_paged import row_slots

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    _Arrays = list[NDArray[Any]]

_PER_KIND = 4  # arrays of the decode rows, and of the prefill rows


@dataclass(frozen=True, slots=True)
class _Split:
    """Which sequences bring one row and which bring more; those without a row are in neither."""

    decode: NDArray[np.intp]
    prefill: NDArray[np.intp]
    counts: NDArray[np.int32]  # [S] rows of each sequence

    @classmethod
    def of(cls, rows: PackedRows) -> _Split:
        counts = np.diff(rows.starts)
        return cls(np.flatnonzero(counts == 1), np.flatnonzero(counts > 1), counts)

    @property
    def is_ordered(self) -> bool:
        """Whether all decode rows come before all prefill rows, or there is one kind only."""
        return not (self.decode.size and self.prefill.size) or bool(self.decode[-1] < self.prefill[0])


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step on the device. Decode rows are the first ones, or those of ``decode_rows``."""

    slots: torch.Tensor  # [T] int64, where each row's key and value go
    decode: FlashRows | None
    prefill: FlashRows | None
    decode_count: int
    decode_rows: torch.Tensor | None = None  # [D] int64, where the kinds are mixed
    prefill_rows: torch.Tensor | None = None


def step_arrays(rows: PackedRows) -> _Arrays:
    """What a step's functions read: slots, the decode sequences, the prefill sequences, and rows of each if mixed."""
    split = _Split.of(rows)
    arrays: _Arrays = [row_slots(rows)]
    for sequences in (split.decode, split.prefill):
        if sequences.size:
            arrays += _sequences(rows, sequences, split.counts)
    if not split.is_ordered:
        is_decode = np.repeat(split.counts == 1, split.counts)
        arrays += [np.flatnonzero(is_decode), np.flatnonzero(~is_decode)]
    return arrays


def decode_arrays(rows: PackedRows, size: int, width: int) -> _Arrays:
    """Those of a step of decode rows only, padded to ``size`` rows and to page tables of ``width`` entries.

    Raises:
        ValueError: A sequence has another number of rows than one, or there is no room for the step.
    """
    count = len(rows.cached)
    if count > size or rows.num_rows != count or (np.diff(rows.starts) != 1).any():
        raise ValueError(f"{rows.num_rows} rows of {count} sequences are no {size} decode rows at most")
    needed = _pages(rows.cached.astype(np.int64) + 1, rows.page_size)
    if needed > width:
        raise ValueError(f"a sequence has {needed} pages, and the table has room for {width}")
    slots, lengths = np.zeros(size, np.int64), np.zeros(size, np.int32)
    tables = np.zeros((size, width), np.int32)
    slots[:count], lengths[:count] = row_slots(rows), rows.cached + 1
    seen = min(width, rows.tables.shape[1])
    tables[:count, :seen] = _with_own_pages(rows.tables[:, :seen])
    return [slots, lengths, tables, np.arange(size + 1, dtype=np.int32), _sums(lengths)]


def decode_rows(size: int, width: int, page_size: int) -> PackedRows:
    """A step of ``size`` decode rows in the null page, with page tables of ``width`` entries."""
    zeros = np.zeros(size, np.int32)
    return PackedRows(np.arange(size + 1, dtype=np.int32), zeros, np.zeros((size, width), np.int32), page_size)


def flash_step(rows: PackedRows, arrays: Sequence[torch.Tensor]) -> FlashStep:
    """The step that `step_arrays` or `decode_arrays` described, from its arrays on the device.

    Raises:
        ValueError: They are not those of such a step.
    """
    split = _Split.of(rows)
    kinds = [bool(split.decode.size), bool(split.prefill.size)]
    expected = 1 + _PER_KIND * sum(kinds) + (0 if split.is_ordered else 2)
    if len(arrays) != expected:
        raise ValueError(f"a step with {expected} arrays on the device was expected, not with {len(arrays)}")
    slots, *rest = arrays
    left = iter(rest)
    decode = _on_device(left, 1, rows.page_size) if kinds[0] else None
    most = int(split.counts.max(initial=1))
    prefill = _on_device(left, most, rows.page_size) if kinds[1] else None
    return FlashStep(slots, decode, prefill, len(split.decode), *left)


def _sequences(rows: PackedRows, chosen: NDArray[np.intp], counts: NDArray[np.int32]) -> _Arrays:
    lengths = rows.cached[chosen] + counts[chosen]
    width = max(1, _pages(lengths, rows.page_size))
    tables = _with_own_pages(rows.tables[chosen, :width])
    return [lengths.astype(np.int32), tables, _sums(counts[chosen]), _sums(lengths)]


def _on_device(arrays: Iterator[torch.Tensor], most_rows: int, page_size: int) -> FlashRows:
    lengths, tables, starts, ends = (next(arrays) for _ in range(_PER_KIND))
    return FlashRows(starts, lengths, ends, tables, most_rows, longest=tables.shape[1] * page_size)


def _with_own_pages(tables: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tables with the entries before a sequence's first page in use set to that page."""
    if tables[:, 0].all():
        return np.ascontiguousarray(tables)
    first = (tables != 0).argmax(axis=1)  # 0 where a sequence has none
    before = np.arange(tables.shape[1]) < first[:, None]
    return np.where(before, tables[np.arange(len(tables)), first][:, None], tables)


def _pages(lengths: NDArray[Any], page_size: int) -> int:
    return -(-int(lengths.max(initial=0)) // page_size)


def _sums(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
