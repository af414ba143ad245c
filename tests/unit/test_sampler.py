"""Draws follow the distribution that each request asks for, whatever the rows beside it."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from batchjobs.types import SamplingParams
from tests.support.cases import case
from workers.engine import EngineRequest, sampler
from workers.engine.draws import BLOCK, SHORT_LIST
from workers.engine.native.logits import logits_kernel
from workers.engine.sampler import sample, score
from workers.engine.sampling_rows import sampling_rows, uniform
from workers.engine.sequence import Sequence


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the kernel and without it."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "logits_kernel", lambda: None)
    elif logits_kernel() is None:
        pytest.skip("no C++ compiler")


def sequence(
    sampling: SamplingParams,
    tokens: list[int] | None = None,
    seed: int = 0,
    choice: int = 0,
    stop_ids: frozenset[int] = frozenset(),
) -> Sequence:
    request = EngineRequest("r", tuple(tokens or [3, 4]), sampling)
    return Sequence(request, limit=sampling.max_tokens, seed=seed, stop_ids=stop_ids, choice=choice)


@dataclass(frozen=True)
class Draw:
    token: int
    logprob: float
    top: list[tuple[int, float]] | None
    allowed: bool


def draw_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[Draw]:
    """The next token of each sequence from its row of ``logits``, as a step of the engine draws it."""
    got = sample(logits, sampling_rows(sequences, logits.shape[1]))
    tops: list[list[tuple[int, float]] | None] = [*got.tops] if got.tops else [None] * len(sequences)
    columns = (got.tokens.tolist(), got.logprobs.tolist(), tops, got.allowed.tolist())
    return [Draw(*row) for row in zip(*columns, strict=True)]


def draws(logits: torch.Tensor, sampling: SamplingParams, count: int) -> Counter[int]:
    """Tokens by how often they come in ``count`` draws with different seeds from one row."""
    made = draw_tokens(logits.repeat(count, 1), [sequence(sampling, seed=seed) for seed in range(count)])
    return Counter(draw.token for draw in made)


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
    """Points spread evenly over [0, 1) must fall on the kept tokens, in proportion to their probability.

    Kept tokens stand best first; where nothing is cut, in the order of the vocabulary.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, generator=generator) * 3
    expected = naive_candidates(logits.double() - logits.double().max(), sampling)
    if len(expected) == vocabulary:
        expected = dict(sorted(expected.items()))
    points = 2000
    rows = sampling_rows([sequence(sampling)] * points, vocabulary)
    rows.point = [(i + 0.5) / points for i in range(points)]
    tokens = sample(logits.repeat(points, 1), rows).tokens.tolist()
    edges = list(itertools.accumulate(expected.values()))
    ranked = list(expected)
    for point, token in zip(rows.point, tokens, strict=True):
        if min(abs(point - edge) for edge in edges) > 1e-6:  # not on the border of two tokens
            assert token == ranked[bisect.bisect(edges, point)]


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 3 * BLOCK + 7])
def test_draws_from_everything_follow_the_probabilities(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    logits[vocabulary - 2] = -torch.inf
    probabilities = torch.softmax(logits.double(), -1).tolist()
    counts = draws(logits, SamplingParams(), 4000)
    likely = sorted(range(vocabulary), key=lambda i: -probabilities[i])[:8]
    for token in likely:
        share = probabilities[token]
        assert counts[token] / 4000 == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / 4000))
    assert counts[vocabulary - 2] == 0


@pytest.mark.parametrize("point", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=700)])
def test_the_ends_of_the_unit_interval_fall_on_tokens_that_have_a_probability(
    point: float, sampling: SamplingParams
) -> None:
    logits = torch.full((1, 2 * BLOCK), -torch.inf)
    logits[0, [5, BLOCK + 3]] = 0.0
    rows = sampling_rows([sequence(sampling)], logits.shape[1])
    rows.point = [point]
    assert int(sample(logits, rows).tokens) in (5, BLOCK + 3)


@case("A-sp-12", "A-sp-13")
def test_rows_of_a_step_obey_their_own_settings_only() -> None:
    """One row each, then all together in every order."""
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(4)) * 2
    asked = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=1),
        SamplingParams(temperature=1.3, top_k=50, top_p=0.5),
        SamplingParams(temperature=0.7, min_p=0.1),
        SamplingParams(temperature=1, top_p=0.99, logit_bias={3: 5.0}),
        SamplingParams(temperature=0, presence_penalty=1.0, top_logprobs=4),
        SamplingParams(temperature=2, top_k=600, repetition_penalty=1.5),
    ]
    alone = [draw_tokens(logits, [sequence(s, seed=i)])[0] for i, s in enumerate(asked)]
    assert alone[0].token == alone[1].token == int(logits.argmax())
    order = list(range(len(asked)))
    for shuffle in range(5):
        random.Random(shuffle).shuffle(order)
        together = draw_tokens(logits.repeat(len(asked), 1), [sequence(asked[i], seed=i) for i in order])
        assert [d.token for d in together] == [alone[i].token for i in order]


def test_choices_have_streams_of_their_own() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(5))
    first = [draw_tokens(logits, [sequence(SamplingParams(), seed=7, choice=c)])[0].token for c in range(6)]
    again = draw_tokens(logits.repeat(6, 1), [sequence(SamplingParams(), seed=7, choice=c) for c in range(6)])
    assert [d.token for d in again] == first
    assert len(set(first)) > 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_where_nothing_is_left_to_choose_the_row_says_so(top_p: float) -> None:
    logits = torch.zeros(2, 3)
    banned = sequence(SamplingParams(temperature=0.5, top_p=top_p, min_tokens=5), stop_ids=frozenset({0, 1, 2}))
    free = sequence(SamplingParams(temperature=0.5, top_p=top_p))
    assert [d.allowed for d in draw_tokens(logits, [banned, free])] == [False, True]


def test_scores_are_the_logprobs_of_given_tokens() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(6))
    expected = torch.log_softmax(logits.double(), -1)
    logprobs, tops = score(logits, torch.tensor([1, 2, 39]), 2)
    assert logprobs.tolist() == pytest.approx([float(expected[i, t]) for i, t in enumerate([1, 2, 39])], abs=1e-5)
    assert tops is not None
    assert [[i for i, _ in top] for top in tops] == expected.topk(2).indices.tolist()
    logits[1, 0] = float("nan")
    assert [math.isnan(p) for p in score(logits, torch.tensor([1, 2, 39]), 0)[0].tolist()] == [False, True, False]


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


def test_a_stored_seed_stands_for_the_same_numbers_for_ever() -> None:
    assert uniform(7, 0, 0) == 0.609394524568175
    assert uniform(-1, 3, 41) == 0.6498563573240895
