"""A sequence that gives way goes on later with the same tokens, from CPU memory where there was room."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from batchjobs.types import FinishReason
from tests.support.models import VOCAB_SIZE
from workers.engine import Engine, EngineConfig, EngineOutput, EngineRequest, SamplingParams
from workers.engine.offload import HostPool, host_pages

SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, frequency_penalty=0.5)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(10, 30))] for _ in range(count)]


def tight(folder: Path, **settings: object) -> Engine:
    """A cache of about a quarter of what its eight sequences need, and nobody waits for room in advance."""
    chosen = {"page_size": 4, "num_blocks": 31, "max_requests_per_batch": 8, "allow_block_sharing": False} | settings
    engine = Engine(str(folder), EngineConfig(device="cpu", **chosen))  # type: ignore[arg-type]
    engine.scheduler.expected_answer_share = 0.0
    return engine


def kept(outputs: list[EngineOutput]) -> list[object]:
    return [(o.token_ids, o.finish_reason) for o in outputs]


@pytest.mark.parametrize("async_batching", [False, True])
def test_offload_gives_the_same_tokens_without_computing_any_again(llama: Path, async_batching: bool) -> None:
    ample = Engine(str(llama), EngineConfig(device="cpu", page_size=4, num_blocks=300)).generate(prompts(8), SAMPLING)
    on = tight(llama, cpu_offload_space=1.0, use_async_batching=async_batching)
    off = tight(llama, cpu_offload_space=0, use_async_batching=async_batching)
    with_space, without = on.generate(prompts(8), SAMPLING), off.generate(prompts(8), SAMPLING)
    assert kept(with_space) == kept(without) == kept(ample)
    for ours, theirs in zip(with_space + without, ample * 2, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert list(ours.token_times) == sorted(ours.token_times)
    assert on.stats().preemptions > 3
    assert on.stats().offloaded_sequences == on.stats().preemptions
    assert (on.stats().recomputed_tokens, off.stats().offloaded_sequences) == (0, 0)
    assert off.stats().recomputed_tokens > 50
    for engine in (on, off):
        assert (engine.stats().offloaded_pages, engine.pool.free) == (0, engine.pool.capacity)


def test_where_the_space_is_full_the_rest_is_computed_again(llama: Path) -> None:
    engine = tight(llama, cpu_offload_space=1.0)
    engine.scheduler.host = HostPool(12)
    outputs = engine.generate(prompts(8), SAMPLING)
    assert kept(outputs) == kept(tight(llama, cpu_offload_space=0).generate(prompts(8), SAMPLING))
    stats = engine.stats()
    assert 0 < stats.offloaded_sequences < stats.preemptions
    assert stats.recomputed_tokens > 0
    assert engine.scheduler.host.free == 12


@pytest.mark.parametrize("async_batching", [False, True])
def test_a_sequence_can_be_cancelled_while_its_pages_are_in_cpu_memory(llama: Path, async_batching: bool) -> None:
    engine = tight(llama, cpu_offload_space=1.0, use_async_batching=async_batching)
    whole = kept(engine.generate(prompts(8), SAMPLING))
    engine = tight(llama, cpu_offload_space=1.0, use_async_batching=async_batching)
    for name, prompt in enumerate(prompts(8)):
        engine.add(EngineRequest(name, tuple(prompt), SAMPLING))
    while not (held := [s for choices in engine._requests.values() for s in choices if s.offloaded]):
        engine.step()
    used = engine.stats().offloaded_pages
    assert used > 0
    name = held[0].request.request_id
    output = engine.cancel(name)
    assert output is not None
    assert output.finish_reason is FinishReason.CANCELLED
    assert 0 < len(output.token_ids) < 30
    assert output.token_ids == whole[name][0][: len(output.token_ids)]  # type: ignore[index]
    assert engine.stats().offloaded_pages < used
    while engine.has_work:
        engine.step()
    assert (engine.stats().offloaded_pages, engine.pool.free) == (0, engine.pool.capacity)


def test_pages_of_a_shared_prefix_are_not_brought_back_twice(llama: Path) -> None:
    head = prompts(1, seed=9)[0][:8]
    shared = [head + prompt for prompt in prompts(8)]
    engine = tight(llama, cpu_offload_space=1.0, allow_block_sharing=True)
    ample = Engine(str(llama), EngineConfig(device="cpu", page_size=4, num_blocks=300))
    assert kept(engine.generate(shared, SAMPLING)) == kept(ample.generate(shared, SAMPLING))
    assert engine.stats().offloaded_sequences > 0
    assert (engine.stats().offloaded_pages, engine.pool.free) == (0, engine.pool.capacity)


def test_the_space_is_clamped_to_the_machine_and_to_what_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 2**30}))
    assert host_pages(0, threshold=0.8, page_bytes=1024, useful=100) == 0
    assert host_pages(2**-10, threshold=0.8, page_bytes=1024, useful=5000) == 1024
    assert host_pages(500, threshold=0.5, page_bytes=1024, useful=10**9) == 2**29 // 1024
    assert host_pages(500, threshold=0.5, page_bytes=1024, useful=77) == 77


def test_no_memory_is_taken_before_a_sequence_gives_way(llama: Path) -> None:
    engine = Engine(str(llama), EngineConfig(device="cpu", page_size=4, num_blocks=300, cpu_offload_space=1.0))
    engine.generate(prompts(4), SAMPLING)
    assert engine.runner._host._tensors == []
    busy = tight(llama, cpu_offload_space=1.0)
    busy.generate(prompts(8), SAMPLING)
    assert [t.device for t in busy.runner._host._tensors] == [torch.device("cpu")] * len(busy.runner.cache.tensors)
