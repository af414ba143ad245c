"""Draws follow the distribution that each request asks for, whatever the rows beside it."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from batchjobs.types import SamplingParams
from workers.engine import EngineRequest
from workers.engine.sampler import SHORT_LIST, _filtered, draw_tokens, uniform
from workers.engine.sequence import Sequence


def sequence(sampling: SamplingParams, tokens: list[int] | None = None, seed: int = 0) -> Sequence:
    request = EngineRequest("r", tuple(tokens or [3, 4]), sampling)
    return Sequence(request, limit=sampling.max_tokens, seed=seed, stop_ids=frozenset(), stop_matcher=None)


def naive_candidates(scaled: torch.Tensor, sampling: SamplingParams) -> dict[int, float]:
    """Sort everything, then cut: the textbook order top-k, top-p, min-p. Normalised probabilities by id."""
    probabilities = torch.softmax(scaled, -1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    total = sum(probabilities[i] for i in ranked)
    kept, before = [], 0.0
    for i in ranked:
        if before < sampling.top_p:
            kept.append(i)
        before += probabilities[i] / total
    kept = [i for i in kept if probabilities[i] >= sampling.min_p * probabilities[ranked[0]]]
    mass = sum(probabilities[i] for i in kept)
    return {i: probabilities[i] / mass for i in kept}


@pytest.mark.parametrize("vocabulary", [50, SHORT_LIST, 3000])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=40),
        SamplingParams(top_k=2000),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=30, top_p=0.7, min_p=0.01),
        SamplingParams(top_k=10_000_000, top_p=0.8),
    ],
)
def test_filters_keep_what_the_textbook_keeps(vocabulary: int, sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, generator=generator).double() * 3
    scaled = logits - logits.max()
    candidates, weights = _filtered(scaled, sampling)
    got = dict(zip(candidates.tolist(), (weights / weights.sum()).tolist(), strict=True))
    expected = naive_candidates(scaled, sampling)
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected, abs=1e-9)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])).clamp(min=-1e9)
    counts: Counter[int] = Counter()
    for seed in range(4000):
        counts[draw_tokens(logits[None], [sequence(SamplingParams(), seed=seed)])[0].token] += 1
    assert counts[4] == 0
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    rows = logits.repeat(3, 1)
    mine = SamplingParams(temperature=1.0)
    first = draw_tokens(logits, [sequence(mine, seed=9)])[0]
    others = [sequence(SamplingParams(temperature=0)), sequence(SamplingParams(top_k=3), seed=1)]
    assert draw_tokens(rows, [others[0], sequence(mine, seed=9), others[1]])[1].token == first.token
    later = sequence(mine, seed=9)
    drawn = set()
    for _ in range(20):
        draw = draw_tokens(logits, [later])[0]
        drawn.add(draw.token)
        later.start()
        later.accept(draw.token, draw.logprob, None, 0.0)
    assert len(drawn) > 5


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(2))
    asked = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.1),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=0, logit_bias={7: 100.0}, repetition_penalty=1.3),
    ]
    draws = draw_tokens(logits, [sequence(s) for s in asked])
    expected = torch.log_softmax(logits.double(), -1)
    assert draws[0].token == int(logits[0].argmax())
    assert draws[3].token == 7
    for row, draw in enumerate(draws):
        assert draw.logprob == pytest.approx(float(expected[row, draw.token]), abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-12, 1e-300])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3)) * 20
    assert draw_tokens(logits, [sequence(SamplingParams(temperature=temperature))])[0].token == int(logits.argmax())


def test_presence_and_frequency_penalties_see_the_answer_and_repetition_penalty_the_prompt_too() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5, -1.0]])
    fresh = sequence(SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2), tokens=[0, 0])
    assert draw_tokens(logits, [fresh])[0].token == 0  # nothing generated yet
    fresh.start()
    fresh.accept(0, 0.0, None, 0.0)
    assert draw_tokens(logits, [fresh])[0].token == 1
    repeated = sequence(SamplingParams(temperature=0, repetition_penalty=1.2), tokens=[0, 0])
    assert draw_tokens(logits, [repeated])[0].token == 1


def test_a_row_that_is_not_finite_has_no_logprob() -> None:
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(2, 10)
        logits[0, 3] = value
        for sampling in (SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
            bad, good = draw_tokens(logits, [sequence(sampling), sequence(sampling)])
            assert math.isnan(bad.logprob)
            assert good.logprob == pytest.approx(-math.log(10))


def test_uniform_numbers_are_even_and_differ_by_every_argument() -> None:
    rng = random.Random(0)
    numbers = [uniform(rng.getrandbits(64) - 2**63, 0, n) for n in range(20000)]
    assert all(0 <= n < 1 for n in numbers)
    tenths = Counter(int(n * 10) for n in numbers)
    assert all(abs(count - 2000) < 200 for count in tenths.values())
    assert len({uniform(1, 0, 0), uniform(2, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 4
