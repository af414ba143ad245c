"""A planned step as arrays: one ragged row of tokens, in which every sequence sees only itself.

Row i of a sequence stands at position ``first + i``. Nothing is padded, and no mask is built: ``rows`` says where each
sequence begins, how much of it is cached, and in which pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workers.engine.attention.interface import PackedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.engine.scheduler import Scheduled


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The inputs of one forward pass over T rows."""

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    sampled_rows: NDArray[np.int64]  # [R] rows whose logits are needed, in the order of the plan
    rows: PackedRows


def pack(plan: list[Scheduled], page_size: int) -> PackedBatch:
    counts = np.fromiter((part.count for part in plan), np.int32, len(plan))
    starts = np.zeros(len(plan) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    input_ids, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    tables = np.zeros((len(plan), max(len(part.sequence.pages) for part in plan)), np.int32)
    for index, part in enumerate(plan):
        start, first, last = starts[index], part.first, part.first + part.count
        input_ids[start : start + part.count] = part.sequence.tokens[first:last]
        positions[start : start + part.count] = np.arange(first, last)
        tables[index, : len(part.sequence.pages)] = part.sequence.pages
    cached = np.fromiter((part.first for part in plan), np.int32, len(plan))
    sampled = np.fromiter((starts[i + 1] - 1 for i, part in enumerate(plan) if part.samples), np.int64)
    return PackedBatch(input_ids, positions, sampled, PackedRows(starts, cached, tables, page_size))
