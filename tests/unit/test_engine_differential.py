"""300 random cases of the engine against a solo reference (`tests/fuzz`), and that reference against ``generate``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchjobs.types import FinishReason
from tests.fuzz.choosing import LOGIT_NOISE, choose, within_rounding
from tests.fuzz.engine_cases import BLOCK, CHAT, draw_case
from tests.fuzz.models import Models
from tests.fuzz.reference import Solo
from tests.fuzz.run import run_cases
from tests.support.models import FAMILIES, solo_greedy
from workers.engine import SamplingParams

BLOCKS = 4  # of 50 cases each
MET = (
    "chunks",
    "preemptions",
    "offloads",
    "prefix hits",
    "zombies",
    "cancelled",
    "refused",
    "failed",
    "scores",
    "suspended",
    "updated answers",
    "steps of a device",
)
"""What every block has to have met, so that it cannot pass by doing nothing hard."""


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with Models() as made:
        yield made


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_block_of_random_cases_gives_what_each_prompt_gives_alone(block: int, models: Models) -> None:
    summary = run_cases(range(block * BLOCK, (block + 1) * BLOCK), models)
    failed = {report.case.seed: report.problems[0] for report in summary.failures}
    assert not failed, f"{failed}; to repeat one: python -m tests.fuzz.run --case NUMBER"
    assert summary.counts["cases"] == BLOCK
    assert [name for name in MET if not summary.counts[name]] == []
    assert summary.counts["forgiven"] * 100 < summary.counts["choices"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", CHAT])
def test_the_reference_gives_the_tokens_of_generate(family: str, models: Models) -> None:
    solo = models.get(family, 0).solo
    for prompt in ([5, 6, 7], [60] * 9, list(range(3, 60))):
        answer = solo.answer(prompt, SamplingParams(temperature=0, max_tokens=30), 30)
        assert list(answer.tokens) == solo_greedy(solo.model, prompt, 30)
        ended = answer.tokens[-1] in solo.eos_ids
        assert answer.reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_the_reference_draws_as_often_as_the_probabilities_say(models: Models) -> None:
    """4,000 draws from one distribution: each share within four standard errors."""
    solo, prompt, draws = models.get("llama", 0).solo, [5, 6, 7], 4000
    sampling = [SamplingParams(temperature=1.0, top_k=5, seed=seed) for seed in range(draws)]
    row = solo.logits(prompt)[-1]
    drawn = [choose(row, s, 0, 0) for s in sampling]
    best = sorted(range(len(row)), key=lambda token: -row[token])[:5]
    weights = [float(2.718281828459045 ** (row[token] - row[best[0]])) for token in best]
    assert set(drawn) <= set(best)
    for token, weight in zip(best, weights, strict=True):
        share = weight / sum(weights)
        assert drawn.count(token) / draws == pytest.approx(share, abs=4 * (share * (1 - share) / draws) ** 0.5)


def test_only_what_rounding_can_decide_is_forgiven(models: Models) -> None:
    solo: Solo = models.get("llama", 0).solo
    row = solo.logits([5, 6, 7])[-1].copy()
    first, second = sorted(range(len(row)), key=lambda token: -row[token])[:2]
    greedy = SamplingParams(temperature=0)
    assert within_rounding(row, greedy, 0, 0) == {first}
    row[second] = row[first] - LOGIT_NOISE
    assert within_rounding(row, greedy, 0, 0) == {first, second}
    drawn = [within_rounding(row, SamplingParams(temperature=1.0, top_p=0.9, seed=seed), 0, 0) for seed in range(300)]
    alone = [tokens for tokens in drawn if len(tokens) == 1]
    assert len(alone) > 150


def test_a_number_names_one_case() -> None:
    assert draw_case(12345) == draw_case(12345)
    assert draw_case(12345) != draw_case(12346)
    assert {draw_case(seed).family for seed in range(0, 4000, 10)} == {*FAMILIES, CHAT}
