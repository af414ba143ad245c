"""How likely the model finds a prompt: each token's logprob, whatever the chunks, the cache and the neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchjobs.errors import InvalidParameter
from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.cases import case
from tests.support.engines import make
from tests.support.models import load_reference, recomputed_logprobs, solo_greedy
from workers.engine import EngineRequest, SamplingParams, scheduler
from workers.engine.requests import EngineOutput


def prompts(count: int = 6, seed: int = 1) -> list[list[int]]:
    return engines.prompts(count, seed, longest=40)


def assert_scored(outputs: list[EngineOutput], folder: Path, asked: list[list[int]]) -> None:
    reference = load_reference(folder)
    for output, prompt in zip(outputs, asked, strict=True):
        scores = output.prompt_scores
        assert scores is not None
        assert scores.token_ids == tuple(prompt)
        assert scores.logprobs[0] is None
        expected = recomputed_logprobs(reference, prompt[:1], prompt[1:])
        assert list(scores.logprobs[1:]) == pytest.approx(expected, abs=1e-4)


SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("max_batch_tokens", [5, 64])
@case("A-sp-09")
def test_scoring_makes_no_token(llama: Path, async_batching: bool, max_batch_tokens: int) -> None:
    engine = make(llama, use_async_batching=async_batching, max_batch_tokens=max_batch_tokens)
    outputs = engine.generate(prompts(), SCORE)
    assert_scored(outputs, llama, prompts())
    for output in outputs:
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.LENGTH)
        assert (output.first_token_at, output.error) == (None, None)
    assert (engine.stats().generated_tokens, engine.pool.free) == (0, engine.pool.capacity)


def test_scores_come_beside_an_answer_and_neighbours_that_want_none(llama: Path) -> None:
    both = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0)
    plain = SamplingParams(temperature=0, max_tokens=8)
    asked = prompts()
    outputs = make(llama, max_batch_tokens=16).generate(asked, [both, plain] * 3)
    assert_scored(outputs[::2], llama, asked[::2])
    assert [o.prompt_scores for o in outputs[1::2]] == [None] * 3
    reference = load_reference(llama)
    assert [list(o.token_ids) for o in outputs] == [solo_greedy(reference, p, 8) for p in asked]


def test_a_cached_prefix_is_computed_again_where_its_scores_are_wanted(llama: Path) -> None:
    engine = make(llama)
    for _ in range(2):
        assert_scored(engine.generate(prompts(), SCORE), llama, prompts())
    assert engine.stats().cached_tokens == 0
    assert engine.generate([prompts()[0]], SamplingParams(max_tokens=1))[0].cached_tokens > 0


@pytest.mark.parametrize("cpu_offload_space", [0, 1.0])
@pytest.mark.parametrize("async_batching", [False, True])
def test_scores_survive_giving_way(llama: Path, cpu_offload_space: float, async_batching: bool) -> None:
    both = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=2)
    engine = make(
        llama,
        num_blocks=20,
        max_batch_tokens=7,
        cpu_offload_space=cpu_offload_space,
        use_async_batching=async_batching,
    )
    engine.scheduler.expected_answer_share = 0.0
    asked = prompts(10)
    outputs = engine.generate(asked, both)
    assert engine.stats().preemptions > 0
    assert_scored(outputs, llama, asked)
    assert all(len(o.prompt_scores.top_logprobs) == len(p) for o, p in zip(outputs, asked, strict=True))  # type: ignore


def test_the_most_likely_tokens_of_each_position(llama: Path) -> None:
    prompt = prompts()[0]
    output = make(llama).generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=3))[0]
    assert output.prompt_scores is not None
    tops = output.prompt_scores.top_logprobs
    assert tops is not None
    assert tops[0] is None
    with torch.inference_mode():
        logits = load_reference(llama)(input_ids=torch.tensor([prompt])).logits[0]
    values, ids = torch.log_softmax(logits[:-1], -1).topk(3)
    for top, row_ids, row_values in zip(tops[1:], ids.tolist(), values.tolist(), strict=True):
        assert top is not None
        assert [token for token, _, _ in top] == row_ids
        assert [logprob for _, logprob, _ in top] == pytest.approx(row_values, abs=1e-4)


def test_a_single_token_has_nothing_to_score(llama: Path) -> None:
    output = make(llama).generate([[5]], SCORE)[0]
    assert output.prompt_scores is not None
    assert (output.prompt_scores.logprobs, output.finish_reason) == ((None,), FinishReason.LENGTH)


@case("A-ctx-02")
def test_a_prompt_of_the_whole_context_can_be_scored_but_not_continued(llama: Path) -> None:
    """16 is allowed for max_tokens 0."""
    engine = make(llama, max_model_len=16)
    prompt = [3 + i for i in range(16)]
    scored, continued = engine.generate([prompt, prompt], [SCORE, SamplingParams(max_tokens=1)])
    assert_scored([scored], llama, [prompt])
    assert continued.error is not None
    assert continued.error.code == "context_length_exceeded"


def test_only_so_many_rows_of_logits_are_kept_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_SCORED_ROWS", 9)
    engine = make(llama)
    forward, kept = engine.runner.forward, []

    def watched(*step: object) -> torch.Tensor:
        logits = forward(*step)  # type: ignore[arg-type]
        kept.append(len(logits))
        return logits

    monkeypatch.setattr(engine.runner, "forward", watched)
    assert_scored(engine.generate(prompts(), SCORE), llama, prompts())
    assert max(kept) <= 9


def test_choices_are_scored_once(llama: Path) -> None:
    prompt = prompts()[0]
    output = make(llama).generate([prompt], SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=0))[0]
    assert_scored([output], llama, [prompt])
    assert [choice.prompt_scores for choice in output.other_choices] == [None, None]


@pytest.mark.parametrize("async_batching", [False, True])
def test_all_choices_of_a_scored_prompt_end_together(llama: Path, async_batching: bool) -> None:
    engine = make(llama, use_async_batching=async_batching)
    several = SamplingParams(n=3, max_tokens=0, prompt_logprobs=0)
    for prompt in (prompts()[0], [5]):
        output = engine.generate([prompt], several)[0]
        assert_scored([output], llama, [prompt])
        assert [(c.finish_reason, c.token_ids) for c in output.choices] == [(FinishReason.LENGTH, ())] * 3
    engine.add(EngineRequest("r", tuple(prompts()[1]), several))
    cancelled = engine.cancel("r")
    assert cancelled is not None
    assert [c.finish_reason for c in cancelled.choices] == [FinishReason.CANCELLED] * 3
    assert (engine.has_work, engine.scheduler.has_work) == (False, False)


def test_no_tokens_without_scores_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="max_tokens must be 1 or more"):
        SamplingParams(max_tokens=0)
