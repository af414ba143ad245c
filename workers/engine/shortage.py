"""A step for which the device's memory does not suffice: it runs in parts, and later steps are made smaller.

What it keeps true:
- The parts give the logits of the whole, in its order. Rows run behind the rows before them of their own sequence, and
  keys and values that were written before the memory ran out are written again, the same.
- Nothing of a failed attempt is kept: its memory is given back before the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from workers.engine.batch import PackedBatch

log = logging.getLogger(__name__)

T = TypeVar("T")
Compute = Callable[["PackedBatch"], torch.Tensor]


class Shortage:
    """``most_rows`` is what the scheduler may plan for a step from now on: it falls when memory runs out."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows

    def run(self, compute: Compute, batch: PackedBatch) -> torch.Tensor:
        """The logits of a step's sampled rows and then of its scored rows, [R + P, V].

        Raises:
            torch.OutOfMemoryError: There is not even memory for one of its rows; the message says what can be done.
        """
        logits = _attempt(partial(compute, batch))
        if isinstance(logits, _Refusal):
            logits, ran, refused = _in_parts(compute, batch, logits)
            self._lower(len(batch.input_ids), ran, refused)
        return logits

    def _lower(self, rows: int, ran: list[int], refused: int) -> None:
        """A step that was planned before the last lowering teaches nothing new, unless it had to be cut smaller."""
        largest = max(ran)
        if largest < self.most_rows and refused <= self.most_rows:
            self.most_rows = largest
            log.warning(
                "the device ran out of memory in a step of %d rows; it ran in %d parts, and steps have %d rows at most "
                "from now on",
                rows,
                len(ran),
                largest,
            )


def twice(call: Callable[[], T]) -> T:
    """A call that may be made twice, and is if memory runs out the first time."""
    result = _attempt(call)
    if isinstance(result, _Refusal):
        log.warning("the device ran out of memory while tokens were chosen; they are chosen once more: %s", result)
        return call()
    return result


class _Refusal(str):
    """What torch said when memory ran out, in one line."""


def _attempt(call: Callable[[], T]) -> T | _Refusal:
    try:
        return call()
    except torch.OutOfMemoryError as error:
        refusal = _Refusal((str(error).splitlines() or [""])[0])
    # Only out here is the error gone, and with its frames the tensors of the attempt.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return refusal


def _in_parts(compute: Compute, batch: PackedBatch, refusal: _Refusal) -> tuple[torch.Tensor, list[int], int]:
    """The logits of a step in halves, or halves of these; the rows of the parts that ran, and the fewest refused."""
    whole: torch.Tensor | None = None
    ran: list[int] = []
    refused = len(batch.input_ids)
    waiting = _halves(0, refused, refusal)
    while waiting:
        first, end = waiting.pop()
        part = batch.part(first, end)
        logits = _attempt(partial(compute, part))
        if isinstance(logits, _Refusal):
            refused = min(refused, end - first)
            waiting += _halves(first, end, logits)
            continue
        if whole is None:
            shape = len(batch.sampled_rows) + len(batch.scored_rows), logits.shape[1]
            made = _attempt(partial(logits.new_empty, shape))
            if isinstance(made, _Refusal):
                raise _too_little("the logits of a step", made)
            whole = made
        _put(logits, whole, batch, first, end)
        ran.append(end - first)
    assert whole is not None
    return whole, ran, refused


def _halves(first: int, end: int, refusal: _Refusal) -> list[tuple[int, int]]:
    """Rows ``first`` to ``end`` in two, the later ones first. Raises torch.OutOfMemoryError if there is but one."""
    if end - first < 2:
        raise _too_little("a step of a single row", refusal)
    middle = (first + end) // 2
    return [(middle, end), (first, middle)]


def _too_little(for_what: str, refusal: _Refusal) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"the device has no memory left for {for_what}: give the KV cache less (max_memory_percent, num_blocks), or "
        f"see who else uses the device. It said: {refusal}"
    )


def _put(logits: torch.Tensor, whole: torch.Tensor, batch: PackedBatch, first: int, end: int) -> None:
    """The logits of rows ``first`` to ``end`` where they belong among those of the whole step."""
    sampled, scored = batch.wanted_within(first, end)
    count = sampled.stop - sampled.start
    whole[sampled] = logits[:count]
    before = len(batch.sampled_rows)
    whole[before + scored.start : before + scored.stop] = logits[count:]
