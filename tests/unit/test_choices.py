"""Several choices of one request: streams of their own, one prompt computed for all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from batchjobs.types import FinishReason
from tests.support.cases import case
from tests.support.engines import make
from tests.support.models import VOCAB_SIZE, load_reference, solo_greedy
from workers.engine import EngineOutput, EngineRequest, SamplingParams


def prompt(length: int = 21, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def tokens(output: EngineOutput) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in output.choices]


SAMPLED = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=10, ignore_eos=True)


@case("A-sp-04")
def test_four_choices_differ_and_are_the_same_set_again(llama: Path) -> None:
    engine = make(llama)
    output = engine.generate([prompt()], SAMPLED)[0]
    assert [choice.choice for choice in output.choices] == [0, 1, 2, 3]
    assert len(set(tokens(output))) == 4
    assert tokens(make(llama, max_requests_per_batch=2).generate([prompt()], SAMPLED)[0]) == tokens(output)


@case("A-sp-04")
def test_the_first_choice_is_that_of_a_request_for_one_and_equal_requests_are_equal(llama: Path) -> None:
    one = SamplingParams(n=1, seed=7, temperature=1.0, max_tokens=10, ignore_eos=True)
    first, second, four = make(llama).generate([prompt()] * 3, [one, one, SAMPLED])
    assert first.token_ids == second.token_ids == four.token_ids
    assert first.other_choices == ()


def test_the_choices_share_the_pages_of_their_prompt(llama: Path) -> None:
    engine = make(llama)
    output = engine.generate([prompt(21)], SAMPLED)[0]
    assert [choice.cached_tokens for choice in output.choices] == [0, 20, 20, 20]
    assert engine.stats().prompt_tokens == 21 + 3  # each follower computes only the last, unfinished page
    alone = make(llama, allow_block_sharing=False)
    assert tokens(alone.generate([prompt(21)], SAMPLED)[0]) == tokens(output)
    assert alone.stats().prompt_tokens == 4 * 21


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("num_blocks", [12, 200])
def test_greedy_choices_equal_the_solo_run_also_when_they_give_way(
    llama: Path, async_batching: bool, num_blocks: int
) -> None:
    engine = make(llama, num_blocks=num_blocks, use_async_batching=async_batching, cpu_offload_space=0)
    engine.scheduler.expected_answer_share = 0.0
    output = engine.generate([prompt()], SamplingParams(n=3, temperature=0, max_tokens=20))[0]
    assert tokens(output) == [tuple(solo_greedy(load_reference(llama), prompt(), 20))] * 3
    assert engine.pool.free == engine.pool.capacity


def test_one_outcome_a_request_when_its_last_choice_has_ended(llama: Path) -> None:
    engine = make(llama, max_requests_per_batch=2)
    engine.add(EngineRequest("r", tuple(prompt()), SAMPLED))
    outcomes = []
    while engine.has_work:
        outcomes += engine.step()
    assert [o.request_id for o in outcomes] == ["r"]
    assert all(len(choice.token_ids) == 10 for choice in outcomes[0].choices)


@pytest.mark.parametrize("async_batching", [False, True])
@case("A-eng-05")
def test_cancelling_ends_every_choice_and_frees_every_page_again_and_again(llama: Path, async_batching: bool) -> None:
    """Waiting, prefilling and decoding choices alike, a hundred times."""
    engine = make(llama, max_requests_per_batch=3, use_async_batching=async_batching)
    endless = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=150, ignore_eos=True)
    rng = random.Random(4)
    for number in range(100):
        engine.add(EngineRequest(number, tuple(prompt(9)), endless))
        for _ in range(rng.randint(0, 5)):
            engine.step()
        output = engine.cancel(number)
        assert output is not None
        assert [c.finish_reason for c in output.choices] == [FinishReason.CANCELLED] * 4
        assert not engine.has_work
        assert (engine.pool.free, len(engine.scheduler.running)) == (engine.pool.capacity, 0)
    assert engine.step() == []
    assert engine._requests == {}
    assert engine.scheduler.num_waiting == 0


def test_a_cancelled_request_keeps_the_choices_that_had_ended(llama: Path) -> None:
    engine = make(llama, max_requests_per_batch=1)
    whole = engine.generate([prompt()], SAMPLED)[0]
    engine.add(EngineRequest("r", tuple(prompt()), SAMPLED))
    while not engine._requests["r"][0].is_finished:
        engine.step()
    for _ in range(3):
        engine.step()
    output = engine.cancel("r")
    assert output is not None
    reasons = [choice.finish_reason for choice in output.choices]
    assert reasons == [FinishReason.LENGTH, *[FinishReason.CANCELLED] * 3]
    assert output.token_ids == whole.token_ids
    assert output.choices[1].token_ids == whole.choices[1].token_ids[: len(output.choices[1].token_ids)]


def test_a_refused_request_has_all_its_choices_failed(llama: Path) -> None:
    output = make(llama).generate([prompt()], SamplingParams(n=3, logit_bias={10_000: 1.0}))[0]
    assert [choice.error.code for choice in output.choices if choice.error] == ["invalid_parameter"] * 3
