"""Recorded decode steps: the engine's answers through them, and that they read and write what they may and no more."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.engines import make, prompts
from tests.support.models import load_reference, save_model, solo_greedy
from tests.support.recording import Recorded, Recording
from tests.support.updates import made, request, run, step_until
from workers.engine import Engine, EngineOutput, SamplingParams, swap
from workers.engine.attention.flash import FlashPagedAttention
from workers.engine.graphs import ladder

MIXED = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=11, presence_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=6, top_logprobs=3),
]


@cache
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


def alone(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    return solo_greedy(reference(folder), prompt, count)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (200, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200]),
    ],
)
def test_the_ladder_ends_with_the_largest_step(most: int, sizes: list[int]) -> None:
    assert ladder(most) == sizes


@pytest.mark.parametrize(("family", "is_async"), [("llama", True), ("qwen3", False), ("mistral", True)])
def test_recorded_steps_give_the_tokens_of_generate(
    family: str, is_async: bool, tmp_path: Path, recorded: Recorded
) -> None:
    folder = save_model(family, tmp_path)
    engine = recorded.make(folder, max_requests_per_batch=3, use_async_batching=is_async, max_batch_tokens=16)
    engine.warmup()
    assert len(recorded.maker.made) == 2 * len(ladder(3))
    asked = prompts(4)
    outputs = engine.generate(asked, greedy(7))
    assert [list(o.token_ids) for o in outputs] == [alone(folder, prompt, 7) for prompt in asked]
    assert recorded.replays > engine.stats().steps, "few steps were replayed, or tokens chosen without a graph"
    assert engine.pool.free == engine.pool.capacity


def test_rows_that_ask_for_more_are_sampled_from_recorded_logits(llama: Path, recorded: Recorded) -> None:
    plain = make(llama, native_forward=False, max_requests_per_batch=4).generate(prompts(4), MIXED)
    engine = recorded.make(llama, max_requests_per_batch=4)
    found = engine.generate(prompts(4), MIXED)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert found[3].top_logprobs is not None
    assert len(found[3].top_logprobs) == len(found[3].token_ids)
    assert recorded.replays > 5


def test_without_a_warm_up_the_first_decode_step_records(llama: Path, recorded: Recorded) -> None:
    engine = recorded.make(llama, max_requests_per_batch=2)
    engine.add(request("a", (5, 6, 7), greedy(4)))
    engine.step()
    assert recorded.maker.made == []
    engine.step()
    assert len(recorded.maker.made) == 4
    assert list(run(engine)["a"].token_ids) == alone(llama, (5, 6, 7), 4)


def test_padding_changes_nothing_that_anybody_reads(llama: Path, recorded: Recorded) -> None:
    """Three rows in a step of four, with NaN in the null page and in every page that is free."""
    engine = recorded.make(llama, max_requests_per_batch=4)
    engine.warmup()
    for number, prompt in enumerate(prompts(3)):
        engine.add(request(number, prompt, greedy(8)))
    step_until(engine, lambda: made(engine, 2) >= 1)
    engine.settle()
    held = {page for s in engine.scheduler.running for group in s.pages for page in group if page}
    free = [page for page in range(engine.runner.num_pages) if page not in held]
    spare = next(s for s in range(4) if s not in {sequence.slot for sequence in engine.scheduler.running})
    with torch.inference_mode():
        for tensor in engine.runner.cache.tensors:
            tensor[free] = torch.nan
        engine.runner._last_tokens[spare] = 77
    before, used = recorded.replays, set[int]()
    outputs: dict[Hashable, EngineOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        used |= {page for s in engine.scheduler.running for group in s.pages for page in group}
    assert recorded.replays > before
    for number, prompt in enumerate(prompts(3)):
        assert list(outputs[number].token_ids) == alone(llama, prompt, 8)
    assert int(engine.runner._last_tokens[spare]) == 77
    untouched = [page for page in free if page not in used and page != 0]
    assert len(untouched) > 100
    for tensor in engine.runner.cache.tensors:
        assert bool(tensor[untouched].isnan().all())
        assert bool(tensor[0, 1:].isnan().all()), "padding rows write into the first slot of the null page"


def said(log: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of graphs."""
    return [record.getMessage() for record in log.records if record.name == "workers.engine.graphs"]


class TestThatCannotBeRecorded:
    def check(self, engine: Engine, folder: Path, log: pytest.LogCaptureFixture, reason: str) -> None:
        with log.at_level(logging.WARNING, "workers.engine.graphs"):
            engine.warmup()
            found = engine.generate(prompts(3), greedy(6))
        assert [list(o.token_ids) for o in found] == [alone(folder, prompt, 6) for prompt in prompts(3)]
        (message,) = said(log)
        assert reason in message
        assert engine.pool.free == engine.pool.capacity

    def test_a_model_that_waits_runs_as_it_is(
        self, llama: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = recorded.make(llama, max_requests_per_batch=4)
        norm = engine.runner.model.model.norm
        forward = norm.forward

        def waits(hidden: torch.Tensor) -> torch.Tensor:
            assert float(hidden.sum()) < float("inf")
            normed: torch.Tensor = forward(hidden)
            return normed

        monkeypatch.setattr(norm, "forward", waits)
        self.check(engine, llama, caplog, "the host would wait for the device")
        assert recorded.replays == 0

    def test_numbers_of_the_host_are_not_frozen_unseen(
        self, llama: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = recorded.make(llama, max_requests_per_batch=4)
        norm = engine.runner.model.model.norm
        forward = norm.forward
        held = torch.ones(1)
        monkeypatch.setattr(norm, "forward", lambda hidden: forward(hidden) * held)
        self.check(engine, llama, caplog, "must not read")

    def test_a_device_that_fails_in_the_middle_is_used_as_before(
        self, llama: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        capture = recorded.maker.capture

        def fails(work: Callable[[], object]) -> Recording:
            if len(recorded.maker.made) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.\nmore about it")
            return capture(work)

        monkeypatch.setattr(recorded.maker, "capture", fails)
        engine = recorded.make(llama, max_requests_per_batch=4)
        self.check(engine, llama, caplog, "OutOfMemoryError: CUDA out of memory.")
        assert len(recorded.maker.made) == 3
        assert recorded.replays == 0


class TestAnotherModel:
    def test_of_the_same_shape_runs_through_the_same_graphs(
        self, llama: Path, new: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(swap, "exchange_memory", swap.exchange_contents)  # as on a GPU, where addresses stay
        engine = recorded.make(llama, max_requests_per_batch=2)
        prompt = prompts(1)[0]
        engine.add(request("a", prompt, greedy(12)))
        step_until(engine, lambda: made(engine, "a") >= 5)
        graphs_before = list(recorded.maker.made)
        engine.update_model(str(new))
        output = run(engine)["a"]
        begun = output.version_spans[1].from_token
        tokens = list(output.token_ids)
        assert tokens[:begun] == alone(llama, prompt, 12)[:begun]
        assert tokens[begun:] == alone(new, prompt + tokens[:begun], 12 - begun)
        assert recorded.maker.made == graphs_before

    def test_of_another_shape_is_recorded_anew_and_the_old_graphs_are_gone(
        self, llama: Path, tmp_path: Path, recorded: Recorded
    ) -> None:
        other = save_model("qwen3", tmp_path)
        engine = recorded.make(llama, max_requests_per_batch=2)
        engine.warmup()
        old = [weakref.ref(recording) for recording in recorded.maker.made]
        recorded.maker.made.clear()
        assert engine.update_model(str(other), inflight="restart").is_reload
        gc.collect()
        assert [ref() for ref in old] == [None] * len(old)
        prompt = prompts(1)[0]
        assert list(engine.generate([prompt], greedy(6))[0].token_ids) == alone(other, prompt, 6)
        assert recorded.replays > 0


def test_graphs_are_made_where_they_are_wanted_and_can_be(
    llama: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "workers.engine.graphs")
    made = {wanted: recorded.make(llama, use_cuda_graph=wanted).runner._graphs for wanted in (None, True, False)}
    assert [graphs is not None for graphs in made.values()] == [True, True, False]
    assert said(caplog) == []
    monkeypatch.setattr(FlashPagedAttention, "in_graphs", False)
    made = {wanted: recorded.make(llama, use_cuda_graph=wanted).runner._graphs for wanted in (None, True, False)}
    assert list(made.values()) == [None] * 3
    name = recorded.engine.runner.backends[0].name
    assert said(caplog) == [f"decode steps run without graphs: attention by {name} cannot be recorded"] * 2


def test_a_cpu_makes_none_and_says_so_where_they_are_asked_for(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.engine.graphs"):
        assert make(llama).runner._graphs is None
        assert said(caplog) == []
        assert make(llama, use_cuda_graph=True).runner._graphs is None
    assert said(caplog) == ["decode steps run without graphs: cpu is no CUDA device"]
