"""The steps that take the most memory, for finding out how much that is. They touch the null page only."""

from __future__ import annotations

import numpy as np

from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.sampling_rows import SamplingRows
from workers.engine.scheduler import MAX_SCORED_ROWS

DEEP_CHUNK = 16  # rows of a prompt at the end of the longest context
DEEP_POSITIONS = 1 << 19  # that decode rows at its end see together: more than any kernel gathers at a time
TOP = 20  # likely tokens that a request can ask for at most, or nearly


def trial_steps(
    tokens: int, *, requests: int, context: int, page_size: int, groups: int, vocab_size: int
) -> list[tuple[PackedBatch, SamplingRows]]:
    """A step of prompts with ``tokens`` rows, and one at the end of a ``context`` of so many tokens; with what each
    row asks of the sampler. ``requests`` is the most sequences that a step has."""
    prompts = [min(context, tokens - first) for first in range(0, tokens, context)]
    decoding = min(requests - 1, tokens - 1, DEEP_POSITIONS // context)
    chunk = min(DEEP_CHUNK, context, tokens - decoding)
    steps = (prompts, [0] * len(prompts)), ([chunk] + [1] * decoding, [context - chunk] + [context - 1] * decoding)
    found = []
    for counts, cached in steps:
        starts = np.cumsum([0, *counts]).astype(np.int32)
        sampled = min(requests, int(starts[-1]))
        scored = min(MAX_SCORED_ROWS, int(starts[-1]))
        first = np.array(cached, np.int32)
        tables = np.zeros((len(counts), -(-int((first + counts).max()) // page_size)), np.int32)
        rows = PackedRows(starts, first, tables, page_size)
        batch = _batch(rows, groups, vocab_size, sampled, scored, spare_slot=requests)
        found.append((batch, _costly_rows(sampled, vocab_size)))
    return found


def _batch(
    rows: PackedRows, groups: int, vocab_size: int, sampled: int, scored: int, *, spare_slot: int
) -> PackedBatch:
    """The first rows are sampled, and scored too."""
    total, none = rows.num_rows, np.zeros(0, np.int64)
    return PackedBatch(
        input_ids=np.arange(total, dtype=np.int64) % vocab_size,
        positions=np.arange(total) - np.repeat(rows.starts[:-1] - rows.cached, np.diff(rows.starts)),
        fed_rows=none,
        fed_slots=none,
        sampled_rows=np.arange(sampled),
        sampled_slots=np.full(sampled, spare_slot),
        scored_rows=np.arange(scored),
        scored_tokens=np.arange(scored) % vocab_size,
        rows=[rows] * groups,
    )


def _costly_rows(count: int, vocab_size: int) -> SamplingRows:
    """Every row is drawn from a distribution that has to be sorted whole."""
    rows = SamplingRows(count, drawn=list(range(count)), point=[0.5] * count, top_logprobs=min(TOP, vocab_size))
    rows.temperature, rows.top_p = [1.0] * count, [0.9] * count
    rows.top_k, rows.min_p = [vocab_size] * count, [0.0] * count
    return rows
