"""The page tables of the running sequences as one array, kept up as pages come and go: a step only copies from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PageTables:
    """``array[group, slot, i]`` is the page of positions ``i * page_size …``; 0 where there is none."""

    def __init__(self, groups: int, slots: int) -> None:
        self.array: NDArray[np.int32] = np.zeros((groups, slots, 16), np.int32)

    def write(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """Pages of a slot from index ``first`` on."""
        end = first + len(pages)
        if end > self.array.shape[2]:
            wider = max(end, 2 * self.array.shape[2]) - self.array.shape[2]
            self.array = np.pad(self.array, ((0, 0), (0, 0), (0, wider)))
        self.array[group, slot, first:end] = pages

    def clear(self, group: int, slot: int, first: int, end: int) -> None:
        self.array[group, slot, first:end] = 0

    def of(self, group: int, slots: NDArray[np.intp], width: int) -> NDArray[np.int32]:
        """A copy for these slots: [len(slots), width]."""
        return np.ascontiguousarray(self.array[group, slots, :width])
