"""Tokens chosen on a device that works beside the host, without waiting for it.

What it keeps true:
- Which kernels run, and on which shapes, follows from what the requests ask for and never from a value on the device.
- The tokens are those of `sampler.sample_in_torch` for the same logits.
- A row that is not finite keeps to itself. Its logprob is NaN, and its token is one of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.draws import (
    SHORT_LIST,
    Parameters,
    draw_from_all,
    draw_from_list,
    draw_from_sorted,
    most_likely,
    short_list,
)
from workers.engine.results import Chosen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.engine.sampling_rows import Cells, SamplingRows
    from workers.engine.transfer import Array

PIECE = 1 << 23  # logits that are worked on at once where each takes up to ten numbers of 8 bytes: 640 MiB in all
WORD = 32  # tokens in a word of a grammar's mask

Draw = Callable[[torch.Tensor, Parameters], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kinds:
    """A step's rows that are not plain, by how their tokens are found. Their order here is that of all arrays.

    ``changed`` holds rows that take the most likely token of their processed logits. The others hold places in
    ``SamplingRows.drawn``: rows that keep the whole vocabulary, rows whose candidates are surely in a short list, and
    rows that have to be sorted.
    """

    changed: list[int]
    everything: list[int]
    short: list[int]
    long: list[int]

    @classmethod
    def of(cls, rows: SamplingRows, vocabulary: int) -> _Kinds:
        kinds = cls([], [], [], [])
        if changed := rows.changed:
            kinds.changed.extend(sorted(set(changed).difference(rows.drawn)))
        for place, (top_k, top_p, min_p) in enumerate(zip(rows.top_k, rows.top_p, rows.min_p, strict=True)):
            if top_k >= vocabulary and top_p == 1.0 and min_p == 0.0:
                kinds.everything.append(place)
            elif min(top_k, vocabulary) <= SHORT_LIST:
                kinds.short.append(place)
            else:
                kinds.long.append(place)
        return kinds

    @property
    def drawn(self) -> list[int]:
        return [*self.everything, *self.short, *self.long]


def sampling_arrays(rows: SamplingRows, vocabulary: int) -> list[Array]:
    """What :func:`choose` needs on the device; nothing where every row takes its most likely token.

    Else four arrays, of W rows that are not plain, M masks, and D draws:
        numbers: int64. The W rows; which of these have a mask [M]; then the cells that are repeated, added and
            banned, as places in the logits [W, vocabulary] laid out flat.
        values: float32, of the cells that are repeated and added.
        masks: int32 [M, ceil(vocabulary / 32)].
        parameters: float64 [5, D], by the fields of :class:`Parameters`.

    Raises:
        IndexError: Something is asked for a token that the logits do not have.
    """
    kinds = _Kinds.of(rows, vocabulary)
    drawn = kinds.drawn
    order = [*kinds.changed, *(rows.drawn[place] for place in drawn)]
    if not order:
        return []
    place_of = np.zeros(rows.count, np.int64)
    place_of[order] = np.arange(len(order))
    cells = [_flat(cells, place_of, vocabulary) for cells in (rows.repeated, rows.added, rows.banned)]
    values = np.array([rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.point], np.float64)
    return [
        np.concatenate((order, place_of[rows.masked], *cells), dtype=np.int64),
        np.concatenate((*rows.repeated.values, *rows.added.values, ()), dtype=np.float32),
        _masks(rows.masks, vocabulary),
        values[:, drawn],
    ]


def _flat(cells: Cells, place_of: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    if not cells.rows:
        return place_of[:0]
    tokens = np.concatenate(cells.tokens)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise IndexError(f"a token is outside the vocabulary of {vocabulary}")
    counts = [len(some) for some in cells.tokens]
    flat: NDArray[np.int64] = np.repeat(place_of[cells.rows] * vocabulary, counts) + tokens
    return flat


def _masks(masks: Sequence[NDArray[np.int32]], vocabulary: int) -> NDArray[np.int32]:
    words = -(-vocabulary // WORD)
    if not masks:
        return np.zeros((0, words), np.int32)
    stacked = np.stack(masks)
    if stacked.shape[1] < words:
        raise IndexError(f"a mask of {stacked.shape[1]} words does not cover {vocabulary} tokens")
    return stacked[:, :words]


def choose(
    logits: torch.Tensor,
    rows: SamplingRows,
    arrays: Sequence[torch.Tensor],
    scored_tokens: torch.Tensor,
    score_top: int,
) -> Chosen:
    """The next token of each of the first ``rows.count`` rows of ``logits`` [R + P, V] float32, and how likely the
    ``scored_tokens`` [P] were under the others.

    Args:
        arrays: Those of :func:`sampling_arrays`, on the device.
        score_top: How many of the most likely tokens of each scored row are wanted.
    """
    sampled, scored = logits[: rows.count], logits[rows.count :]
    tokens, normalisers = _best(sampled)
    allowed = torch.ones_like(tokens, dtype=torch.bool)
    if arrays:
        _choose(sampled, rows, arrays, normalisers.isnan(), tokens, allowed)
    scores, score_normalisers = _score(scored, scored_tokens)
    return Chosen(
        tokens=tokens,
        logprobs=_logprobs(sampled, tokens, normalisers),
        allowed=allowed,
        tops=_tops(sampled, normalisers, rows.top_logprobs),
        scores=scores,
        score_tops=_tops(scored, score_normalisers, score_top),
    )


def choose_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely token of each row of ``logits`` [R, V] float32, its logprob, and that it may be chosen."""
    tokens, normalisers = _best(logits)
    return tokens, _logprobs(logits, tokens, normalisers), torch.ones_like(tokens, dtype=torch.bool)


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, the first of equal ones, and the log of its normaliser: [R].

    The normaliser is NaN where the row is not finite: where its peak is NaN or infinite, so is what is taken from it.
    """
    peaks, tokens = logits.max(dim=-1)
    sums = (logits - peaks[:, None]).exp_().sum(dim=-1)
    return tokens, sums.log_().add_(peaks)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, normalisers: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, tokens[:, None])[:, 0] - normalisers


def _score(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [P] of given tokens, and the log of each row's normaliser [P]."""
    if not len(tokens):
        return logits.new_empty(0), logits.new_empty(0)
    normalisers = _joined([_best(logits[some])[1] for some in _pieces(0, *logits.shape)])
    return _logprobs(logits, tokens, normalisers), normalisers


def _tops(logits: torch.Tensor, normalisers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not count:
        return None
    if not len(normalisers):
        return most_likely(logits, normalisers, count)
    parts = [most_likely(logits[some], normalisers[some], count) for some in _pieces(0, *logits.shape)]
    return _joined([ids for ids, _ in parts]), _joined([logprobs for _, logprobs in parts])


def _choose(
    logits: torch.Tensor,
    rows: SamplingRows,
    arrays: Sequence[torch.Tensor],
    is_bad: torch.Tensor,
    tokens: torch.Tensor,
    allowed: torch.Tensor,
) -> None:
    """Overwrite the tokens of the rows that are processed or drawn. Rows that are not finite count as even."""
    numbers, values, masks, parameters = arrays
    kinds = _Kinds.of(rows, logits.shape[1])
    count = len(kinds.changed) + len(kinds.drawn)
    order, others = numbers[:count], numbers[count:]
    worked = logits.index_select(0, order)  # [W, V]
    worked.masked_fill_(is_bad.index_select(0, order)[:, None], 0.0)
    if len(kinds.changed) or len(others):
        _process(worked, rows, others, values, masks)
    peaks, chosen = worked.max(dim=-1)
    _draw(worked, kinds, parameters, chosen)
    tokens.index_copy_(0, order, chosen)
    allowed.index_copy_(0, order, peaks > -torch.inf)


def _process(
    logits: torch.Tensor, rows: SamplingRows, numbers: torch.Tensor, values: torch.Tensor, masks: torch.Tensor
) -> None:
    """Penalties, bias, bans and grammar, in place."""
    sizes = [sum(map(len, cells.tokens)) for cells in (rows.repeated, rows.added, rows.banned)]
    masked, repeated, added, banned = torch.split(numbers, [len(rows.masked), *sizes])
    factors, shifts = torch.split(values, sizes[:2])
    flat = logits.view(-1)
    if rows.repeated.rows:
        before = flat.index_select(0, repeated)
        flat.index_copy_(0, repeated, torch.where(before > 0, before / factors, before * factors))
    if rows.added.rows:
        flat.index_add_(0, added, shifts)
    if rows.banned.rows:
        flat.index_fill_(0, banned, -torch.inf)
    if rows.masked:
        bits = masks[:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=masks.device)
        is_banned = bits.bitwise_and_(1).view(len(masks), -1)[:, : logits.shape[1]] == 0
        logits.index_copy_(0, masked, logits.index_select(0, masked).masked_fill_(is_banned, -torch.inf))


def _draw(logits: torch.Tensor, kinds: _Kinds, parameters: torch.Tensor, tokens: torch.Tensor) -> None:
    """Overwrite the tokens [W] of the rows that draw."""
    first = begin = len(kinds.changed)
    each: tuple[tuple[list[int], Draw], ...] = (
        (kinds.everything, draw_from_all),
        (kinds.short, _draw_from_short_list),
        (kinds.long, draw_from_sorted),
    )
    for places, draw in each:
        end = begin + len(places)
        for some in _pieces(begin, end, logits.shape[1]):
            own = parameters[:, some.start - first : some.stop - first, None]
            tokens[some].copy_(draw(logits[some], Parameters(*own.unbind())))
        begin = end


def _draw_from_short_list(logits: torch.Tensor, asked: Parameters) -> torch.Tensor:
    return draw_from_list(*short_list(logits), asked)[0]


def _pieces(begin: int, end: int, vocabulary: int) -> Iterator[slice]:
    """Rows that are worked on at once."""
    size = max(1, PIECE // vocabulary)
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
