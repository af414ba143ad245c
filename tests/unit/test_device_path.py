"""The GPU's way of working, rehearsed on a CPU: packed copies, the device's sampler, results that arrive late."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.engines import prompts
from tests.support.giving_way import run_giving_way
from tests.support.models import load_reference, recomputed_logprobs, save_chat_model, save_model, solo_greedy
from tests.support.recording import NoWaiting
from tests.support.rehearsal import LateStream, rehearse
from tests.support.updates import greedy, made, request, run, step_until
from workers.engine import Engine, EngineOutput, SamplingParams

DEPTHS = [pytest.param(False, id="depth 1"), pytest.param(True, id="depth 2")]

MIXED = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=14, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=4, max_tokens=11, min_tokens=6, top_k=20, stop_token_ids=(7, 8, 9)),
    SamplingParams(temperature=0, max_tokens=1, logit_bias={5: 3.0, 9: -100.0}),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, min_p=0.02, max_tokens=9, n=2, top_logprobs=3),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2),
]


@pytest.fixture(autouse=True)
def _rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse(monkeypatch)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape as ``llama``."""
    return save_model("llama", tmp_path_factory.mktemp("new"), seed=1)


def make(folder: Path, **settings: Any) -> Engine:
    engine = engines.make(folder, **({"max_requests_per_batch": 4} | settings))
    assert engine.runner.path.works_beside
    return engine


@cache
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


def alone(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    return solo_greedy(reference(folder), prompt, count)


def is_settled(engine: Engine) -> bool:
    """Whether nothing is on its way from the device."""
    return engine._in_flight is None and is_idle(engine)


def is_idle(engine: Engine) -> bool:
    copies = engine.runner.path.streams.copies
    assert isinstance(copies, LateStream)
    return copies.is_idle


@pytest.fixture(scope="module")
def on_the_host(llama: Path) -> list[EngineOutput]:
    """What the CPU's own way gives: made before anything is rehearsed."""
    return engines.make(llama, max_requests_per_batch=4).generate(prompts(len(MIXED)), MIXED)


def decided(outputs: Sequence[EngineOutput]) -> list[Any]:
    """All that was chosen, without its numbers."""
    return [
        (c.token_ids, c.finish_reason, [[entry[0] for entry in top] for top in c.top_logprobs or ()])
        for output in outputs
        for c in output.choices
    ]


def numbers(outputs: Sequence[EngineOutput]) -> list[float]:
    found: list[float] = []
    for output in outputs:
        for c in output.choices:
            found += c.logprobs
            found += [entry[1] for top in c.top_logprobs or () for entry in top]
        if output.prompt_scores is not None:
            found += [logprob for logprob in output.prompt_scores.logprobs if logprob is not None]
            found += [entry[1] for top in output.prompt_scores.top_logprobs or () for entry in top or ()]
    return found


@pytest.mark.parametrize("is_async", DEPTHS)
def test_answers_are_those_of_generate(llama: Path, is_async: bool) -> None:
    """Also in chunks of prompts, and where one answer ends beside others."""
    asked = prompts(8)
    engine = make(llama, use_async_batching=is_async, max_batch_tokens=13)
    outputs = engine.generate(asked, SamplingParams(temperature=0, max_tokens=10))
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.token_ids) == alone(llama, prompt, 10)
        expected = recomputed_logprobs(reference(llama), prompt, output.token_ids)
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert engine.pool.free == engine.pool.capacity
    assert is_settled(engine)


@pytest.mark.parametrize("is_async", DEPTHS)
def test_all_kinds_of_requests_give_what_the_host_gives(
    llama: Path, on_the_host: list[EngineOutput], is_async: bool
) -> None:
    """Penalties, biases, filters, seeds, stop tokens, several choices, scored prompts."""
    outputs = make(llama, use_async_batching=is_async).generate(prompts(len(MIXED)), MIXED)
    assert decided(outputs) == decided(on_the_host)
    assert numbers(outputs) == pytest.approx(numbers(on_the_host), abs=1e-4)
    assert outputs[-1].prompt_scores is not None


@pytest.mark.parametrize("is_async", DEPTHS)
def test_stop_strings_and_formats_hold(chat: Path, is_async: bool) -> None:
    engine = make(chat, use_async_batching=is_async, num_blocks=400)
    free = SamplingParams(temperature=1.0, seed=2, max_tokens=25)
    text = engine.generate(["once upon"], free)[0].text
    end = next(c for c in text[3:] if c.isascii())
    schema = {"type": "array", "items": {"enum": ["north", "south"]}, "minItems": 3, "maxItems": 3}
    held = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    stopped = SamplingParams(temperature=1.0, seed=2, max_tokens=25, stop=(end,))
    first, second = engine.generate(["once upon", "where"], [stopped, held])
    assert (first.text, first.finish_reason) == (text[: text.index(end)], FinishReason.STOP)
    assert set(json.loads(second.text)) <= {"north", "south"}
    assert len(json.loads(second.text)) == 3


@pytest.mark.parametrize("is_async", DEPTHS)
def test_an_end_of_sequence_costs_one_row_where_a_step_runs_ahead(llama: Path, is_async: bool) -> None:
    prompt = prompts(1)[0]
    whole = alone(llama, prompt, 9)
    stop = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(whole[3],))
    engine = make(llama, use_async_batching=is_async)
    end = whole.index(whole[3]) + 1
    assert list(engine.generate([prompt], stop)[0].token_ids) == whole[:end]
    assert engine.stats().steps == end + is_async
    engine.settle()
    assert is_settled(engine)
    assert engine.pool.free == engine.pool.capacity


@pytest.mark.parametrize("is_async", DEPTHS)
def test_giving_way_changes_nothing(llama: Path, is_async: bool) -> None:
    engine = make(llama, use_async_batching=is_async, max_batch_tokens=32, max_requests_per_batch=6)
    asked = prompts(8)
    outputs = run_giving_way(engine, asked, SamplingParams(temperature=0, max_tokens=10))
    assert [list(o.token_ids) for o in outputs] == [alone(llama, prompt, 10) for prompt in asked]
    assert 0 < engine.stats().offloaded_sequences < engine.stats().preemptions
    assert engine.pool.free == engine.pool.capacity


def test_a_pause_and_an_update_leave_nothing_on_its_way(llama: Path, new: Path) -> None:
    engine, prompt = make(llama, use_async_batching=True), prompts(1)[0]
    engine.add(request("a", prompt, SamplingParams(temperature=0, max_tokens=14)))
    step_until(engine, lambda: made(engine, "a") >= 3)
    assert not is_settled(engine)
    assert engine.settle() == []
    assert is_settled(engine)
    assert made(engine, "a") == 4
    step_until(engine, lambda: made(engine, "a") >= 6)
    engine.update_model(str(new))
    assert is_settled(engine)
    output = run(engine)["a"]
    begun, tokens = output.version_spans[1].from_token, list(output.token_ids)
    assert tokens[:begun] == alone(llama, prompt, 14)[:begun]
    assert tokens[begun:] == alone(new, prompt + tokens[:begun], 14 - begun)


def test_the_next_forward_is_launched_before_a_result_has_arrived(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(llama, use_async_batching=True)
    forward, waited = engine.runner.forward, []

    def watched(*step: Any) -> torch.Tensor:
        waited.append(is_idle(engine))
        return forward(*step)

    monkeypatch.setattr(engine.runner, "forward", watched)
    engine.generate(prompts(1), greedy(6))
    assert waited == [True] + [False] * 5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_no_step_waits_for_the_device(family: str, tmp_path: Path) -> None:
    """Neither transformers' modules nor what is around them asks for a value that the device has yet to compute."""
    engine = make(save_model(family, tmp_path), native_forward=False, max_batch_tokens=20)
    engine.warmup()
    with NoWaiting():  # type: ignore[no-untyped-call]
        outputs = engine.generate(prompts(len(MIXED)), MIXED)
    assert all(output.error is None for output in outputs)
