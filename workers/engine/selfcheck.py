"""A look at a model before it serves anybody: do two sequences in one row stay apart?

The probe of the attention layers sees what the model asks of them, but not what it does elsewhere: a convolution over
the row, a token shift, a router with a capacity. Such a model would let a neighbour change an answer, so it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from batchjobs.errors import UsageError
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Forward = Callable[[PackedBatch], torch.Tensor]

ROWS = 3  # of each sequence: more than one, so that something before the last row could be taken from the neighbour
TOLERANCE = {torch.float32: 1e-3}  # of the largest logit; rounding alone stays far below
COARSE_TOLERANCE = 5e-2  # in bfloat16 and float16


def check_isolation(
    forward: Forward, *, vocab_size: int, page_size: int, groups: int, dtype: torch.dtype, source: str
) -> None:
    """Compare the logits [T, V] of two sequences in one row with those of each alone. Writes into the first pages.

    Raises:
        UsageError: The model mixes the rows of different sequences.
    """
    tokens = [[(7 * s + 3 * i + 1) % vocab_size for i in range(ROWS)] for s in range(2)]
    together = torch.split(forward(_batch(tokens, page_size, groups)), ROWS)
    for beside, alone in zip(together, (forward(_batch([t], page_size, groups)) for t in tokens), strict=True):
        scale = alone.abs().max().clamp(min=1e-6)
        apart = float((beside - alone).abs().max() / scale)
        if not apart <= TOLERANCE.get(dtype, COARSE_TOLERANCE):
            raise UsageError(
                f"{source!r} lets sequences in one row change each other's results "
                f"(logits differ by {apart:.2g} of their size), so it cannot run on packed rows"
            )


def _batch(sequences: Sequence[Sequence[int]], page_size: int, groups: int) -> PackedBatch:
    count, width = len(sequences), -(-ROWS // page_size)
    starts = np.arange(count + 1, dtype=np.int32) * ROWS
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    rows = PackedRows(starts, np.zeros(count, np.int32), tables, page_size)
    none = np.zeros(0, np.int64)
    return PackedBatch(
        input_ids=np.array(sequences).reshape(-1),
        positions=np.tile(np.arange(ROWS), count),
        fed_rows=none,
        fed_slots=none,
        sampled_rows=np.arange(count * ROWS),
        sampled_slots=none,
        scored_rows=none,
        scored_tokens=none,
        rows=[rows] * groups,
    )
