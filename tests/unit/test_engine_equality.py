"""Batching is invisible: tokens equal ``generate`` of each prompt alone, logprobs those of a full recompute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support.giving_way import run_giving_way
from tests.support.models import FAMILIES, VOCAB_SIZE, load_reference, recomputed_logprobs, save_model, solo_greedy
from workers.engine import Engine, EngineConfig, SamplingParams

ANSWER_TOKENS = 12
UNLIMITED = 4096
GROUPS = 2  # of layers with a page table of their own, at most


class Family:
    """A tiny random model, 20 random prompts, and what each of them gives alone."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = save_model(name, folder)
        self.reference: PreTrainedModel = load_reference(folder)
        rng = random.Random(name)
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(20)]
        self.answers = [solo_greedy(self.reference, prompt, ANSWER_TOKENS) for prompt in self.prompts]
        self.logprobs = [
            recomputed_logprobs(self.reference, prompt, answer)
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def test_the_answers_vary_with_the_prompt(family: Family) -> None:
    """Otherwise the comparisons below would say little."""
    assert len({tuple(answer) for answer in family.answers}) > 10


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("max_batch_tokens", [3, 16, UNLIMITED])
def test_greedy_tokens_and_logprobs_equal_the_solo_run(family: Family, page_size: int, max_batch_tokens: int) -> None:
    for sequences in (1, 8) if max_batch_tokens > 3 else (3,):
        config = EngineConfig(
            device="cpu",
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=sequences,
            num_blocks=1 + sequences * GROUPS * -(-60 // page_size),
        )
        engine = Engine(str(family.folder), config)
        outputs = engine.generate(family.prompts, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
        assert [list(o.token_ids) for o in outputs] == family.answers
        assert engine.pool.free == engine.pool.capacity
        for output, expected in zip(outputs, family.logprobs, strict=True):
            assert output.logprobs == pytest.approx(expected, abs=1e-4)


def test_preemption_changes_nothing(family: Family) -> None:
    """Every few steps the youngest sequence has to give way."""
    config = EngineConfig(device="cpu", page_size=4, max_batch_tokens=32, max_requests_per_batch=8)
    engine = Engine(str(family.folder), config)
    outputs = run_giving_way(engine, family.prompts, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
    assert [list(o.token_ids) for o in outputs] == family.answers
    assert engine.stats().preemptions > 10
    assert 0 < engine.stats().offloaded_sequences < engine.stats().preemptions
    assert engine.pool.free == engine.pool.capacity
    for output in outputs:
        assert len(output.token_times) == len(output.token_ids) == len(output.logprobs)
        assert list(output.token_times) == sorted(output.token_times)
