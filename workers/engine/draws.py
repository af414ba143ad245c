"""Tokens ranked and drawn, for many rows at once: the arithmetic that all ways of sampling in torch share.

What it keeps true:
- Tokens rank by their logits, equal ones by their number: so a ranking depends on its own row only, on any device.
- A token that nothing is left of is never drawn where another one is.
- Nothing here waits for the device: no shape and no branch depends on a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SHORT_LIST = 256  # candidates looked at first: enough for nearly every top-k and top-p, far cheaper than a full sort
BLOCK = 256  # tokens whose probabilities are summed first when a row draws from its whole distribution
LOWEST = -1e39  # below every finite logit of float32


class Parameters(NamedTuple):
    """What D rows ask of their draws, each [D, 1] float64. A ``top_k`` of the vocabulary's size or more keeps all."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    point: torch.Tensor  # in [0, 1), where the cumulated probability is cut


def ranked(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best tokens of each row of ``logits`` [R, V] float32, best first: [R, count] int64.

    ``torch.topk`` leaves the order of equal values open. Here each logit and its place become one whole number, of
    which no two are equal: the float's bits, made to grow with its value, above the place counted from the end.
    """
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it is equal to
    growing = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    places = torch.arange(last, -1, -1, device=logits.device)
    keys = torch.add(places, growing, alpha=1 << 32)
    return last - (torch.topk(keys, count).values & 0xFFFFFFFF)


def most_likely(logits: torch.Tensor, normalisers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` most likely tokens of each row with their logprobs, best first: [R, count] int64 and float32."""
    ids = ranked(logits, min(count, logits.shape[1]))
    return ids, logits.gather(1, ids) - normalisers[:, None]


def draw_from_all(logits: torch.Tensor, asked: Parameters) -> torch.Tensor:
    """A token a row of ``logits`` [D, V], of which nothing is cut: [D].

    The cumulated probability is inverted in two levels: blocks, then the tokens of one block.
    """
    rows, vocabulary = logits.shape
    weights = torch.empty(rows, -(-vocabulary // BLOCK) * BLOCK, dtype=torch.float64, device=logits.device)
    weights[:, vocabulary:].zero_()
    scaled = _scaled(logits, logits.amax(dim=-1, keepdim=True), asked.temperature)
    torch.exp(scaled, out=weights[:, :vocabulary])
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1).cumsum(dim=-1)  # [D, blocks]
    target = sums[:, -1:] * asked.point
    block = _first_over(sums, target)  # [D, 1]
    before = sums.gather(1, (block - 1).clamp(min=0)).masked_fill_(block == 0, 0.0)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]  # [D, BLOCK]
    return (block * BLOCK + _first_over(before + within.cumsum(dim=-1), target))[:, 0]


def draw_from_list(
    values: torch.Tensor, ids: torch.Tensor, asked: Parameters, mass: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row, drawn from what top-k, top-p and min-p leave of a ranking. top-p counts the mass that top-k left,
    as vLLM and transformers do.

    Args:
        values: The logits [D, S] of the best tokens ``ids`` [D, S], best first.
        mass: The weights' sum [D, 1] for rows whose top-k reaches beyond the list; None when no row's does, or
            nothing is beyond it.

    Returns:
        The tokens [D], and whether the last one of the list was kept [D]: then more would have been kept behind it.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    in_top_k = rank < asked.top_k
    weights = _scaled(values, values[:, :1], asked.temperature).exp_().mul_(in_top_k)
    total = weights.sum(dim=-1, keepdim=True)
    if mass is not None:
        total = torch.where(asked.top_k <= values.shape[1], total, mass)
    probabilities = weights.div_(total)
    mass_before = probabilities.cumsum(dim=-1).sub_(probabilities)
    keep = (mass_before < asked.top_p) & (probabilities >= asked.min_p * probabilities[:, :1]) & in_top_k
    keep[:, :1].fill_(True)
    cumulated = probabilities.mul(keep).cumsum(dim=-1)
    place = _first_over(cumulated, cumulated[:, -1:] * asked.point)
    return ids.gather(1, place)[:, 0], keep[:, -1]


def draw_from_sorted(logits: torch.Tensor, asked: Parameters) -> torch.Tensor:
    """A token a row of ``logits`` [D, V], sorted whole: right for whatever is asked."""
    values, ids = torch.sort(logits, descending=True, stable=True)
    return draw_from_list(values, ids, asked)[0]


def short_list(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best logits of each row and their tokens, best first; all of them where there are few."""
    ids = ranked(logits, min(SHORT_LIST, logits.shape[1]))
    return logits.gather(1, ids), ids


def mass_of(logits: torch.Tensor, asked: Parameters) -> torch.Tensor:
    """The sum of all weights of each row, [D, 1], that of its best token being 1."""
    return _scaled(logits, logits.amax(dim=-1, keepdim=True), asked.temperature).exp_().sum(dim=-1, keepdim=True)


def _scaled(logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """How far logits lie below the peak of their row, by temperature: float64, never NaN."""
    return torch.sub(logits, peaks.double().clamp_(min=LOWEST)).div_(temperature)


def _first_over(cumulated: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """By row the first index whose cumulated value exceeds the target, [D, 1].

    Rounding can carry the target to the very end: then the last index that adds anything is meant. Where nothing is
    left to choose, the values are no numbers; any index does.
    """
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous()).clamp_(max=cumulated.shape[1] - 1)
    return torch.minimum(torch.searchsorted(cumulated, target.contiguous(), right=True), last)
