"""What the sequences of a step ask for, as arrays: made on the host while the forward runs, used by the sampler.

Everything that depends on the tokens so far (penalties, the place of a draw in its random stream, a grammar's mask) is
read from the sequence here, when the step before has been collected: so it never lags behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.engine.sequence import Sequence as EngineSequence

_MASK = (1 << 64) - 1
_PER_POSITION, _GAMMA = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_11, _27, _30, _31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


@dataclass(slots=True)
class Cells:
    """Single logits of a step and a number for each: (row, token, value), no cell twice.

    Kept by row, a row once, in ascending order.
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[NDArray[np.int64]] = field(default_factory=list)  # of each of these rows
    values: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, row: int, tokens: Collection[int], values: Collection[float] | NDArray[np.float64]) -> None:
        if tokens:
            self.rows.append(row)
            self.tokens.append(np.fromiter(tokens, np.int64, len(tokens)))
            self.values.append(np.fromiter(values, np.float64, len(tokens)))

    def counts(self, rows: int) -> NDArray[np.int64]:
        """How many cells each of the step's rows has."""
        counts = np.zeros(rows, np.int64)
        counts[self.rows] = [len(tokens) for tokens in self.tokens]
        return counts


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
        return sorted({*self.repeated.rows, *self.added.rows, *self.banned.rows, *self.masked})

    @property
    def is_plain(self) -> bool:
        """Whether every row takes its most likely token, and nobody asks for others."""
        return not (self.drawn or self.top_logprobs or self.changed)


def sampling_rows(sequences: Sequence[EngineSequence], vocab_size: int) -> SamplingRows:
    """The rows of a step's sampling sequences. One that has ended meanwhile gets a plain row, and nobody reads it."""
    rows = SamplingRows(len(sequences))
    drawing = []
    for row, sequence in enumerate(sequences):
        if sequence.finish_reason is not None:
            continue
        sampling = sequence.request.sampling
        if sequence.is_processed or sequence.grammar is not None:
            _process(rows, row, sequence, vocab_size)
        if sampling.top_logprobs > rows.top_logprobs:
            rows.top_logprobs = sampling.top_logprobs
        if not sampling.is_greedy:
            rows.drawn.append(row)
            drawing.append((sequence, sampling))
    if drawing:
        rows.temperature = [sampling.temperature for _, sampling in drawing]
        rows.top_k = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for _, s in drawing]
        rows.top_p = [sampling.top_p for _, sampling in drawing]
        rows.min_p = [sampling.min_p for _, sampling in drawing]
        rows.point = points([s.stream for s, _ in drawing], [s.generated for s, _ in drawing])
    return rows


def _process(rows: SamplingRows, row: int, sequence: EngineSequence, vocab_size: int) -> None:
    """Penalties, bias, the ban on early ends and the grammar. Definitions as in vLLM and the OpenAI API."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = sequence.prompt_tokens | sequence.uses.keys()
        rows.repeated.add(row, seen, np.full(len(seen), sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        uses = np.fromiter(sequence.uses.values(), np.float64, len(sequence.uses))
        shifts = -(sampling.presence_penalty + sampling.frequency_penalty * uses)
        if sampling.logit_bias:
            merged = dict(sampling.logit_bias)
            for token, shift in zip(sequence.uses, shifts.tolist(), strict=True):
                merged[token] = merged.get(token, 0.0) + shift
            rows.added.add(row, merged, merged.values())
        else:
            rows.added.add(row, sequence.uses, shifts)
    else:
        rows.added.add(row, sampling.logit_bias, sampling.logit_bias.values())
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
    return points([stream(seed, choice)], [position])[0]


def stream(seed: int, choice: int) -> int:
    """Where the random numbers of a choice begin."""
    return _mix((_mix(seed & _MASK) + choice * 0x9E3779B97F4A7C15) & _MASK)


def points(streams: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Of many choices at once; see :func:`uniform`."""
    state = np.array(streams, np.uint64) + np.array(positions, np.uint64) * _PER_POSITION  # modulo 2^64
    state = state + _GAMMA
    state = (state ^ (state >> _30)) * _FIRST
    state = (state ^ (state >> _27)) * _SECOND
    state = state ^ (state >> _31)
    numbers: list[float] = ((state >> _11) * 2.0**-53).tolist()
    return numbers


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
