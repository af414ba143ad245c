"""What the sequences of a step ask for, as arrays: made on the host while the forward runs, used by the sampler.

Everything that depends on the tokens so far (penalties, the place of a draw in its random stream, a grammar's mask) is
read from the sequence here, when the step before has been collected: so it never lags behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.engine.sequence import Sequence as EngineSequence

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Cells:
    """Single logits of a step and a number for each: (row, token, value), no cell twice in one addition."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Iterable[int], values: Iterable[float]) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.values.extend(values)
        self.rows.extend([row] * (len(self.tokens) - before))


@dataclass(slots=True)
class SamplingRows:
    """Row i of the logits belongs to the i-th sequence. Rows that nothing here names are greedy and unprocessed."""

    count: int
    repeated: Cells = field(default_factory=Cells)  # divided by the value where positive, multiplied where negative
    added: Cells = field(default_factory=Cells)  # penalties (negative) and biases
    banned: Cells = field(default_factory=Cells)  # set to -inf; the value means nothing
    masked: list[int] = field(default_factory=list)  # rows with a grammar [M]
    masks: list[NDArray[np.int32]] = field(default_factory=list)  # [M] of [ceil(V / 32)], a set bit allows its token
    drawn: list[int] = field(default_factory=list)  # rows that draw [D], and their parameters:
    temperature: list[float] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    top_p: list[float] = field(default_factory=list)
    min_p: list[float] = field(default_factory=list)
    point: list[float] = field(default_factory=list)  # in [0, 1), where the cumulated probability is cut
    top_logprobs: int = 0  # the most that any row asks for

    @property
    def changed(self) -> list[int]:
        """Rows whose logits are not the model's own when the token is chosen."""
        cells = (self.repeated.rows, self.added.rows, self.banned.rows, self.masked)
        return sorted({row for rows in cells for row in rows})


def sampling_rows(sequences: Sequence[EngineSequence], vocab_size: int) -> SamplingRows:
    """The rows of a step's sampling sequences. One that has ended meanwhile gets a plain row, and nobody reads it."""
    rows = SamplingRows(len(sequences))
    for row, sequence in enumerate(sequences):
        if sequence.is_finished:
            continue
        _process(rows, row, sequence, vocab_size)
        sampling = sequence.request.sampling
        rows.top_logprobs = max(rows.top_logprobs, sampling.top_logprobs)
        if not sampling.is_greedy:
            rows.drawn.append(row)
            rows.temperature.append(sampling.temperature)
            rows.top_k.append(sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size)
            rows.top_p.append(sampling.top_p)
            rows.min_p.append(sampling.min_p)
            rows.point.append(uniform(sequence.seed, sequence.choice, sequence.generated))
    return rows


def _process(rows: SamplingRows, row: int, sequence: EngineSequence, vocab_size: int) -> None:
    """Penalties, bias, the ban on early ends and the grammar. Definitions as in vLLM and the OpenAI API."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = {*sequence.request.prompt_ids, *sequence.uses}
        rows.repeated.add(row, seen, [sampling.repetition_penalty] * len(seen))
    shifts = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, uses in sequence.uses.items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * uses
            shifts[token] = shifts.get(token, 0.0) - penalty
    rows.added.add(row, shifts, shifts.values())
    if sequence.generated < sampling.min_tokens:
        rows.banned.add(row, sequence.stop_ids, [0.0] * len(sequence.stop_ids))
    if sequence.grammar is not None:
        mask = np.zeros(-(-vocab_size // 32), np.int32)
        sequence.grammar.fill(mask)
        rows.masked.append(row)
        rows.masks.append(mask)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) for one draw: a counter-based generator, so no draw depends on how many came before it.

    Chained finalisers of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = _mix(seed & _MASK)
    state = _mix((state + choice * 0x9E3779B97F4A7C15) & _MASK)
    state = _mix((state + position * 0xD1342543DE82EF95) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
