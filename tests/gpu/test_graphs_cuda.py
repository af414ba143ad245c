"""Recorded decode steps and steady steps on a CUDA device. Run by `make test-gpu` where there is one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import prompts
from workers.engine import Engine, EngineConfig, EngineRequest, SamplingParams
from workers.engine.attention.flash_trial import without_waiting
from workers.engine.graph_maker import CudaGraphMaker

CUDA = torch.device("cuda")
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=60, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=1, max_tokens=60, ignore_eos=True),
    "penalised": SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=60, ignore_eos=True),
    "with others": SamplingParams(temperature=0, top_logprobs=3, max_tokens=60, ignore_eos=True),
}


def make(folder: Path, **settings: Any) -> Engine:
    engine = Engine(str(folder), EngineConfig(device="cuda", dtype="bfloat16", **settings))
    engine.warmup()
    return engine


def needs_graphs(engine: Engine) -> None:
    if engine.runner._graphs is None:
        pytest.skip("the attention that is installed cannot be recorded")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_steady_step_never_waits_for_the_device(llama: Path, kind: str, graphs: bool) -> None:
    """But for the event of a result, which is waited for without being counted as one of these."""
    engine = make(llama, use_cuda_graph=graphs, max_requests_per_batch=8)
    if graphs:
        needs_graphs(engine)
    elif engine.runner.backends[0].name == "torch":
        pytest.skip("plain torch makes its indices on the host")
    for number, prompt in enumerate(prompts(8)):
        engine.add(EngineRequest(number, tuple(prompt), KINDS[kind]))
    for _ in range(8):  # buffers have grown by then
        engine.step()
    with without_waiting(CUDA):
        for _ in range(20):
            assert engine.step() == []


def test_steps_are_recorded_and_tokens_chosen_in_them(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.engine.graphs"):
        engine = make(llama, max_requests_per_batch=8)
    needs_graphs(engine)
    assert any(message.startswith("recorded decode steps of 1, 2, 4, 8 rows") for message in caplog.messages)
    outputs = engine.generate(prompts(8), KINDS["greedy"])
    for output in outputs:
        assert len(output.token_ids) == 60
        assert all(logprob <= 0 for logprob in output.logprobs)


def test_a_model_that_waits_is_not_recorded_and_runs(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(str(llama), EngineConfig(device="cuda", dtype="bfloat16"))
    needs_graphs(engine)
    norm = engine.runner.model.model.norm
    forward = norm.forward

    def waits(hidden: torch.Tensor) -> Any:
        assert float(hidden.sum()) < float("inf")
        return forward(hidden)

    monkeypatch.setattr(norm, "forward", waits)
    with caplog.at_level(logging.WARNING, "workers.engine.graphs"):
        engine.warmup()
    assert [message for message in caplog.messages if "run without graphs" in message] != []
    assert [len(output.token_ids) for output in engine.generate(prompts(3), KINDS["greedy"])] == [60] * 3


def test_after_a_recording_that_failed_others_are_made_and_memory_comes_back() -> None:
    """The failure is one that only the recording itself meets: the device is waited for by a call that torch's mode
    does not see."""
    maker, place = CudaGraphMaker(CUDA), torch.zeros(4, device=CUDA)
    calls: list[None] = []

    def fails_in_the_third_call() -> None:
        calls.append(None)
        place.add_(1)
        if len(calls) == 3:
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        maker.capture(fails_in_the_third_call)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    place.zero_()
    graph = CudaGraphMaker(CUDA).capture(lambda: place.add_(1))
    place.zero_()
    for _ in range(3):
        graph.replay()
    assert place.tolist() == [3.0] * 4
    before = torch.cuda.memory_allocated()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(
        50
    ):  # what another stream used is free only when the allocator looks: not while it thinks it records
        tensor = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
        tensor.record_stream(side)
        del tensor
    torch.cuda.synchronize()
    torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated() - before < 4 << 20
