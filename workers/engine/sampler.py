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

from workers.engine import draws
from workers.engine.draws import Parameters
from workers.engine.native.logits import LogitsKernel, logits_kernel

if TYPE_CHECKING:
    from workers.engine.sampling_rows import Cells, SamplingRows
    from workers.engine.sequence import TopIds


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
    """As :func:`sample`, on any device. It waits for the device; :mod:`workers.engine.device_sampler` does not."""
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
    ids, logprobs = draws.most_likely(logits, normalisers, count)
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
    values = [rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.point]
    parameters = torch.tensor(values, device=device, dtype=torch.float64)[:, :, None]
    asked = Parameters(*parameters)
    keeps_all = ((asked.top_k >= logits.shape[1]) & (asked.top_p == 1.0) & (asked.min_p == 0.0))[:, 0]
    for some, draw in ((keeps_all, draws.draw_from_all), (~keeps_all, _draw_filtered)):
        if bool(some.any()):
            tokens[drawn[some]] = draw(processed[drawn[some]], Parameters(*parameters[:, some]))


def _draw_filtered(logits: torch.Tensor, asked: Parameters) -> torch.Tensor:
    """Draw among the candidates that top-k, top-p and min-p leave, best first.

    A short list answers exactly where the rest of the vocabulary is cut anyway; the other rows are sorted whole.
    """
    vocabulary = logits.shape[1]
    values, ids = draws.short_list(logits)
    size = values.shape[1]
    mass = draws.mass_of(logits, asked) if size < vocabulary else None
    chosen, reaches_end = draws.draw_from_list(values, ids, asked, mass)
    # With a top-k beyond the list, the mass that top-k leaves is not known from the list: such a row is sorted whole.
    rest = ((asked.top_k > size) & ((asked.top_k < vocabulary) | reaches_end[:, None]))[:, 0]
    if size < vocabulary and bool(rest.any()):
        chosen[rest] = draws.draw_from_sorted(logits[rest], Parameters(*(values[rest] for values in asked)))
    return chosen


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
