"""From logits to tokens, on the device, for all rows of a step at once whatever each of them asks for.

What it keeps true: a token depends on its own row of logits and on (seed, choice, position) only; logprobs are those of
the model's own distribution, before any of the processing here. Order of the processing: penalties, bias, bans and
grammar, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.native.logits import LogitsKernel, logits_kernel

if TYPE_CHECKING:
    from workers.engine.sampling_rows import Cells, SamplingRows
    from workers.engine.sequence import TopIds

SHORT_LIST = 256  # candidates looked at first: enough for nearly every top-k and top-p, far cheaper than a full sort
BLOCK = 256  # tokens whose probabilities are summed first when a row draws from its whole distribution


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of R rows. ``logprobs`` are NaN where a row's logits were not finite; then its token means nothing."""

    tokens: torch.Tensor  # [R] int64
    logprobs: torch.Tensor  # [R] float32
    allowed: torch.Tensor  # [R] bool: some token was left to choose from
    tops: list[TopIds] | None


def prepare(device: torch.device | str) -> None:
    """Have the kernel built and loaded where it is going to be used: else the first step would wait for it."""
    if torch.device(device).type == "cpu":
        logits_kernel()


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Choose the next token of each row of ``logits`` [R, V] float32."""
    if LogitsKernel.takes(logits) and (kernel := logits_kernel()) is not None:
        found = kernel.choose(logits, rows)
        tokens, logprobs, allowed = (torch.from_numpy(a) for a in (found.tokens, found.logprobs, found.allowed))
        return Sampled(tokens, logprobs, allowed, found.tops)
    return sample_in_torch(logits, rows)


def sample_in_torch(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """As :func:`sample`, on any device."""
    normalisers = torch.logsumexp(logits, dim=-1)  # [R]
    finite = normalisers.isfinite()
    tokens = logits.argmax(dim=-1)  # [R]
    allowed = torch.ones_like(finite)
    if rows.changed or rows.drawn:
        _choose(torch.where(finite[:, None], logits, 0.0), rows, tokens, allowed)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalisers
    logprobs = torch.where(finite, logprobs, torch.nan)
    return Sampled(tokens, logprobs, allowed, most_likely(logits, normalisers, rows.top_logprobs))


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, list[TopIds] | None]:
    """Logprobs [P] of given ``tokens`` under ``logits`` [P, V], and the ``top`` most likely ones; NaN as above."""
    if LogitsKernel.takes(logits) and (kernel := logits_kernel()) is not None:
        found = kernel.score(logits, tokens, top)
        return torch.from_numpy(found.logprobs), found.tops
    return score_in_torch(logits, tokens, top)


def score_in_torch(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, list[TopIds] | None]:
    """As :func:`score`, on any device."""
    normalisers = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalisers
    logprobs = torch.where(normalisers.isfinite(), logprobs, torch.nan)
    return logprobs, most_likely(logits, normalisers, top)


def most_likely(logits: torch.Tensor, normalisers: torch.Tensor, count: int) -> list[TopIds] | None:
    """The ``count`` most likely tokens of each row with their logprobs, best first; None when none are wanted."""
    if not count:
        return None
    values, ids = torch.topk(logits, min(count, logits.shape[1]))
    logprobs = values - normalisers[:, None]
    return [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _choose(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor, allowed: torch.Tensor) -> None:
    """Overwrite the tokens of the rows that are processed or drawn."""
    device = logits.device
    changed = torch.tensor(rows.changed, device=device, dtype=torch.long)
    processed = _processed(logits, rows) if rows.changed else logits
    if rows.changed:
        tokens[changed] = processed[changed].argmax(dim=-1)
        allowed[changed] = processed[changed].max(dim=-1).values > -torch.inf
    if not rows.drawn:
        return
    drawn = torch.tensor(rows.drawn, device=device)
    scaled = processed[drawn].double()
    scaled = scaled - scaled.max(dim=-1, keepdim=True).values
    scaled = (scaled / _column(rows.temperature, device)).clamp_(min=-1e30).nan_to_num_(nan=-1e30)
    point = _column(rows.point, device)
    top_k, top_p, min_p = (_column(values, device) for values in (rows.top_k, rows.top_p, rows.min_p))
    keeps_all = ((top_k >= logits.shape[1]) & (top_p == 1.0) & (min_p == 0.0))[:, 0]
    for some, draw in ((keeps_all, _draw_from_all), (~keeps_all, _draw_filtered)):
        if bool(some.any()):
            tokens[drawn[some]] = draw(scaled[some], point[some], top_k[some], top_p[some], min_p[some])


def _column(values: list[float] | list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device, dtype=torch.float64)[:, None]


def _processed(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    logits = logits.clone()
    if rows.repeated.rows:
        at, factors = _cells(rows.repeated, logits)
        values = logits[at]
        logits[at] = torch.where(values > 0, values / factors, values * factors)
    if rows.added.rows:
        at, shifts = _cells(rows.added, logits)
        logits[at] += shifts
    if rows.banned.rows:
        logits[_cells(rows.banned, logits)[0]] = -torch.inf
    if rows.masked:
        masked = torch.tensor(rows.masked, device=logits.device)
        bits = np.unpackbits(np.stack(rows.masks).view(np.uint8), axis=1, bitorder="little")
        allows = torch.from_numpy(bits[:, : logits.shape[1]]).to(logits.device).bool()
        logits[masked] = torch.where(allows, logits[masked], -torch.inf)
    return logits


def _cells(cells: Cells, logits: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows = np.repeat(np.arange(logits.shape[0]), cells.counts(logits.shape[0]))
    arrays = rows, np.concatenate(cells.tokens), np.concatenate(cells.values)
    at, tokens, values = (torch.from_numpy(array).to(logits.device) for array in arrays)
    return (at, tokens), values.to(logits.dtype)


def _draw_from_all(
    scaled: torch.Tensor, point: torch.Tensor, _top_k: torch.Tensor, _top_p: torch.Tensor, _min_p: torch.Tensor
) -> torch.Tensor:
    """Invert the cumulated probability in two levels: blocks, then the tokens of one block."""
    rows, vocabulary = scaled.shape
    weights = torch.nn.functional.pad(scaled.exp(), (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    sums = weights.sum(dim=-1).cumsum(dim=-1)  # [D, blocks]
    target = sums[:, -1:] * point
    block = _first_over(sums, target)  # [D, 1]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = weights[torch.arange(rows, device=scaled.device), block[:, 0]]  # [D, BLOCK]
    return (block * BLOCK + _first_over(before + within.cumsum(dim=-1), target))[:, 0]


def _draw_filtered(
    scaled: torch.Tensor, point: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Draw among the candidates that top-k, top-p and min-p leave, best first.

    top-p counts the mass that top-k left, as vLLM and transformers do. A short list answers exactly where the rest of
    the vocabulary is cut anyway; the other rows are sorted whole.
    """
    vocabulary = scaled.shape[1]
    size = min(SHORT_LIST, vocabulary)
    values, candidates = torch.topk(scaled, size)  # [D, size]
    chosen, is_exact = _draw_among(scaled, values, candidates, point, top_k, top_p, min_p)
    if size < vocabulary and not bool(is_exact.all()):
        rest = ~is_exact
        values, candidates = torch.sort(scaled[rest], descending=True, stable=True)
        parameters = (t[rest] for t in (point, top_k, top_p, min_p))
        chosen[rest] = _draw_among(scaled[rest], values, candidates, *parameters)[0]
    return chosen


def _draw_among(
    scaled: torch.Tensor,
    values: torch.Tensor,
    candidates: torch.Tensor,
    point: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draw a row from sorted ``candidates`` [D, S], and whether no candidate beyond them could have been kept."""
    rank = torch.arange(values.shape[1], device=values.device)
    weights = torch.where(rank < top_k, values.exp(), 0.0)
    limited = top_k <= values.shape[1]  # the list holds all that top-k leaves
    total = torch.where(limited, weights.sum(dim=-1, keepdim=True), scaled.exp().sum(dim=-1, keepdim=True))
    probabilities = weights / total
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    keep = (mass_before < top_p) & (probabilities >= min_p * probabilities[:, :1]) & (rank < top_k)
    keep[:, 0] = True
    # With a top-k beyond the list, the mass that top-k leaves is not known from the list: such a row is sorted whole.
    whole = values.shape[1] == scaled.shape[1]
    unknown = (top_k > values.shape[1]) & (top_k < scaled.shape[1])
    is_exact = (limited | ~(keep[:, -1:] | unknown))[:, 0] | whole
    kept = torch.where(keep, probabilities, 0.0)
    cumulated = kept.cumsum(dim=-1)
    return candidates.gather(1, _first_over(cumulated, cumulated[:, -1:] * point))[:, 0], is_exact


def _first_over(cumulated: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """By row the first index whose cumulated value exceeds the target, [D, 1].

    Rounding can carry the target to the very end: then the last index that adds anything is meant. Where nothing is
    left to choose, the values are no numbers; any index does.
    """
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous()).clamp_(max=cumulated.shape[1] - 1)
    return torch.minimum(torch.searchsorted(cumulated, target.contiguous(), right=True), last)
