"""From logits to tokens, for rows with different parameters.

What it keeps true: a token depends on its own row of logits and on (seed, choice, position) only, whatever the other
rows ask for; logprobs are those of the model's own distribution, before any of the processing here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from batchjobs.types import SamplingParams
from workers.engine.sequence import Sequence

SHORT_LIST = 256  # candidates looked at first: enough for nearly every top-k and top-p, far cheaper than a full sort
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled token. ``logprob`` is NaN when the row's logits were not finite; then ``token`` means nothing."""

    token: int
    logprob: float
    top: list[tuple[int, float]] | None


def draw_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[Draw]:
    """Draw the next token of each sequence from its row of ``logits`` [R, V] float32."""
    normalisers = torch.logsumexp(logits, dim=-1)  # [R]
    tokens = logits.argmax(dim=-1)  # [R]
    for row, sequence in enumerate(sequences):
        if _needs_more_than_argmax(sequence.request.sampling, sequence) and bool(normalisers[row].isfinite()):
            tokens[row] = _choose(logits[row], sequence)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalisers
    tops = _most_likely(logits, normalisers, sequences)
    return [Draw(t, p, top) for t, p, top in zip(tokens.tolist(), logprobs.tolist(), tops, strict=True)]


def _needs_more_than_argmax(sampling: SamplingParams, sequence: Sequence) -> bool:
    return not sampling.is_greedy or _has_processing(sampling) or sequence.generated < sampling.min_tokens


def _has_processing(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def _choose(logits: torch.Tensor, sequence: Sequence) -> int:
    """Process one row [V] as its request asks, then take the best token or draw one."""
    sampling = sequence.request.sampling
    row = _processed(logits, sequence)
    if sampling.is_greedy:
        return int(row.argmax())
    # Subtracting the maximum first keeps the smallest temperatures from overflowing.
    scaled = ((row - row.max()).double() / sampling.temperature).clamp_(min=-1e30)
    point = uniform(sequence.seed, 0, sequence.generated)
    if _keeps_all(sampling, scaled.shape[0]):
        return _invert(torch.softmax(scaled, dim=-1), point)
    candidates, probabilities = _filtered(scaled, sampling)
    return int(candidates[_invert(probabilities, point)])


def _processed(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Penalties, bias and the ban on early ends, on a copy. Definitions as in vLLM and the OpenAI API."""
    sampling = sequence.request.sampling
    row = logits.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(sequence.tokens[sequence.prompt_len :])
        if counts:
            ids = torch.tensor(list(counts), device=row.device)
            uses = torch.tensor(list(counts.values()), device=row.device, dtype=row.dtype)
            row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * uses
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if sequence.generated < sampling.min_tokens and sequence.stop_ids:
        row[torch.tensor(sorted(sequence.stop_ids), device=row.device)] = -torch.inf
    return row


def _keeps_all(sampling: SamplingParams, vocabulary: int) -> bool:
    return (sampling.top_k <= 0 or sampling.top_k >= vocabulary) and sampling.top_p == 1.0 and sampling.min_p == 0.0


def _filtered(scaled: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates that top-k, top-p and min-p leave, best first, with their (unnormalised) probabilities.

    ``scaled`` [V] are logits over temperature. top-p counts the mass that top-k left, as vLLM and transformers do. A
    short list answers exactly whenever the rest of the vocabulary is cut anyway; otherwise everything is sorted.
    """
    vocabulary = scaled.shape[0]
    limited = 0 < sampling.top_k < vocabulary
    size = sampling.top_k if limited else min(SHORT_LIST, vocabulary)
    while True:
        values, candidates = torch.topk(scaled, size)
        weights = values.exp()
        probabilities = weights / (weights.sum() if limited else scaled.exp().sum())
        mass_before = probabilities.cumsum(0) - probabilities
        keep = (mass_before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
        keep[0] = True
        if limited or size == vocabulary or not bool(keep[-1]):
            return candidates[keep], probabilities[keep]
        size = vocabulary


def _invert(probabilities: torch.Tensor, point: float) -> int:
    """The first index at which the cumulated probability exceeds ``point`` (0 to 1) of the whole."""
    cumulated = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulated, cumulated[-1] * point, right=True))
    # Rounding can carry the point past the end: then the last candidate that has any probability is meant.
    return min(index, int(probabilities.nonzero()[-1]))


def _most_likely(
    logits: torch.Tensor, normalisers: torch.Tensor, sequences: list[Sequence]
) -> list[list[tuple[int, float]] | None]:
    """The ``top_logprobs`` of each row that asks for them."""
    wanted = [s.request.sampling.top_logprobs for s in sequences]
    rows = [i for i, n in enumerate(wanted) if n]
    tops: list[list[tuple[int, float]] | None] = [None] * len(sequences)
    if not rows:
        return tops
    values, ids = torch.topk(logits[rows], min(max(wanted), logits.shape[1]))
    logprobs = (values - normalisers[rows][:, None]).tolist()
    for row, row_ids, row_logprobs in zip(rows, ids.tolist(), logprobs, strict=True):
        tops[row] = list(zip(row_ids, row_logprobs, strict=True))[: wanted[row]]
    return tops


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
