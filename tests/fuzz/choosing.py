"""The definition of a choice of token, written once more in plain numpy and float64, with what rounding may change.

Order: repetition penalty, presence and frequency penalty and bias, bans, then temperature, top-k, top-p, min-p. A draw
inverts the cumulated probability at a point in [0, 1): in the order of the ids where no filter is set, else best first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from batchjobs.types import SamplingParams
from workers.engine.sampling_rows import uniform

Row = NDArray[np.float64]
LOGIT_NOISE = 5e-5
"""How far a logit of a packed forward may lie from that of a solo forward in float32."""
POINT_NOISE = 1e-6
"""Rounding of a cumulated probability, beside what the logits' own noise does to it."""


def processed(
    logits: Row,
    sampling: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    banned: Iterable[int],
    allowed: NDArray[np.bool_] | None,
) -> Row:
    """Logits [V] after everything that the request asks for but temperature and filters."""
    row = logits.copy()
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, uses in Counter(answer).items():
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * uses
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    row[list(banned)] = -np.inf
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def choose(row: Row, sampling: SamplingParams, choice: int, position: int) -> int:
    """The token for a processed row."""
    if sampling.is_greedy:
        return int(row.argmax())
    return _draw(row, sampling, _point(sampling, choice, position))


def within_rounding(row: Row, sampling: SamplingParams, choice: int, position: int) -> set[int]:
    """Every token that is the right one for some logits and sums that differ from these by their noise.

    The point, and the borders of top-p and min-p, are moved by what the noise can do; then tokens that are as good as
    the ones found can have changed places with them.
    """
    if sampling.is_greedy:
        found = {int(row.argmax())}
    else:
        noise = LOGIT_NOISE / sampling.temperature
        slack = min(1.0, POINT_NOISE + noise / 2)
        point = _point(sampling, choice, position)
        moves = itertools.product((-1, 0, 1), repeat=3)
        found = {
            _draw(row, sampling, point + a * slack, top_p=b * slack, min_p=float(np.exp(2 * c * noise)))
            for a, b, c in moves
        }
    return {int(t) for f in found for t in np.flatnonzero(np.abs(row - row[f]) <= 2 * LOGIT_NOISE)}


def _point(sampling: SamplingParams, choice: int, position: int) -> float:
    assert sampling.seed is not None
    return uniform(sampling.seed, choice, position)


def _draw(row: Row, sampling: SamplingParams, point: float, *, top_p: float = 0.0, min_p: float = 1.0) -> int:
    """``top_p`` is added to the request's own, ``min_p`` multiplied with it."""
    weights = np.exp((row - row.max()) / sampling.temperature)
    limited = 0 < sampling.top_k < len(row)
    if not limited and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return _invert(weights, point)
    best_first = np.argsort(-row, kind="stable")[: sampling.top_k if limited else None]
    probabilities = weights[best_first] / weights[best_first].sum()
    before = np.cumsum(probabilities) - probabilities
    border = sampling.top_p if sampling.top_p == 1.0 else sampling.top_p + top_p
    keep = (before < border) & (probabilities >= sampling.min_p * min_p * probabilities[0])
    keep[0] = True
    return int(best_first[keep][_invert(probabilities[keep], point)])


def _invert(weights: Row, point: float) -> int:
    """The first index at which the cumulated weight exceeds ``point`` of the whole."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, cumulated[-1] * min(max(point, 0.0), 1.0), side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))
