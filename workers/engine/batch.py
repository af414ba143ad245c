"""A planned step as arrays: one ragged row of tokens, in which every sequence sees only itself.

Row i of a sequence stands at position ``first + i``. Nothing is padded, and no mask is built: ``rows`` says where each
sequence begins, how much of it is cached, and in which pages. A token that the step before is still sampling is not
known here: its row is ``fed`` on the device, from the last token of the sequence's slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workers.engine.attention.interface import PackedRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from workers.engine.page_tables import PageTables
    from workers.engine.scheduler import Scheduled


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The inputs of one forward pass over T rows.

    Logits are needed of the ``sampled_rows``, one for each part of the plan that samples, and of the ``scored_rows``,
    those that tell how likely a prompt token was; both in the order of the plan.
    """

    input_ids: NDArray[np.int64]  # [T], 0 where fed
    positions: NDArray[np.int64]  # [T]
    fed_rows: NDArray[np.int64]  # [F]
    fed_slots: NDArray[np.int64]  # [F]
    sampled_rows: NDArray[np.int64]  # [R]
    sampled_slots: NDArray[np.int64]  # [R]
    scored_rows: NDArray[np.int64]  # [P]
    scored_tokens: NDArray[np.int64]  # [P] the prompt token after each of these rows
    rows: list[PackedRows]  # [groups]

    def part(self, first: int, end: int) -> PackedBatch:
        """Rows ``first`` to ``end`` as a step of their own, to be run behind the rows before them."""
        fed = _within(self.fed_rows, first, end)
        sampled, scored = self.wanted_within(first, end)
        return PackedBatch(
            input_ids=self.input_ids[first:end],
            positions=self.positions[first:end],
            fed_rows=self.fed_rows[fed] - first,
            fed_slots=self.fed_slots[fed],
            sampled_rows=self.sampled_rows[sampled] - first,
            sampled_slots=self.sampled_slots[sampled],
            scored_rows=self.scored_rows[scored] - first,
            scored_tokens=self.scored_tokens[scored],
            rows=[_part_of(rows, first, end) for rows in self.rows],
        )

    def wanted_within(self, first: int, end: int) -> tuple[slice, slice]:
        """Which of the sampled rows, and which of the scored ones, are rows ``first`` to ``end``."""
        return _within(self.sampled_rows, first, end), _within(self.scored_rows, first, end)


def pack(plan: Sequence[Scheduled], tables: PageTables, page_size: int) -> PackedBatch:
    counts = np.array([part.count for part in plan], np.int32)
    cached = np.array([part.first for part in plan], np.int32)
    slots = np.array([part.slot for part in plan], np.intp)
    samples = np.array([part.samples for part in plan], np.bool_)
    starts = np.zeros(len(plan) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    positions = np.arange(total) - np.repeat(starts[:-1] - cached, counts)
    input_ids: list[int] = []
    is_fed: list[bool] = []
    for part in plan:
        known = part.sequence.tokens[part.first : part.first + part.count]
        is_fed.append(len(known) < part.count)  # by the one token that is in flight
        input_ids += known
        if is_fed[-1]:
            input_ids.append(0)
    fed = np.array(is_fed, np.bool_)
    last_rows = starts[1:].astype(np.int64) - 1
    width = -(-int((cached + counts).max(initial=0)) // page_size)
    return PackedBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        fed_rows=last_rows[fed],
        fed_slots=slots[fed],
        sampled_rows=last_rows[samples],
        sampled_slots=slots[samples],
        scored_rows=_joined(starts[i] + r - p.first for i, p in enumerate(plan) if p.scores for r in p.scored_rows),
        scored_tokens=_joined(p.sequence.tokens[r + 1] for p in plan if p.scores for r in p.scored_rows),
        rows=[
            PackedRows(starts, cached, tables.of(group, slots, width), page_size)
            for group in range(tables.array.shape[0])
        ],
    )


def _joined(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)


def _within(rows: NDArray[np.int64], first: int, end: int) -> slice:
    """Where ``rows``, which ascend, lie from ``first`` to ``end``."""
    return slice(int(np.searchsorted(rows, first)), int(np.searchsorted(rows, end)))


def _part_of(rows: PackedRows, first: int, end: int) -> PackedRows:
    """A sequence whose rows begin before ``first`` has that much more in its pages by then."""
    low = int(np.searchsorted(rows.starts, first, side="right")) - 1
    high = int(np.searchsorted(rows.starts, end))
    starts = (np.clip(rows.starts[low : high + 1], first, end) - first).astype(np.int32)
    cached = rows.cached[low:high].copy()
    cached[0] += first - int(rows.starts[low])
    width = -(-int((cached + np.diff(starts)).max()) // rows.page_size)
    return PackedRows(starts, cached, np.ascontiguousarray(rows.tables[low:high, :width]), rows.page_size)
