"""Memory on a CUDA device: how much pages and steps take, pages that travel beside, steps that do not fit. Run by
`make test-gpu` where there is one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.models import VOCAB_SIZE, save_model
from workers.engine import Engine, EngineConfig, EngineOutput, SamplingParams
from workers.engine.memory import CudaMemory
from workers.engine.offload import Direction, PageCopy
from workers.engine.runner import Runner
from workers.engine.streams import streams_of

MIB = 2**20
DEVICE = torch.device("cuda", 0)
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, frequency_penalty=0.5)
EACH = [SAMPLING, SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=2, ignore_eos=True)] * 4


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def made(folder: Path, **settings: object) -> Engine:
    chosen = {"page_size": 4, "num_blocks": 300, "max_batch_tokens": 64, "max_requests_per_batch": 8} | settings
    return Engine(str(folder), EngineConfig(device="cuda", dtype="float32", **chosen))  # type: ignore[arg-type]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(10, 30))] for _ in range(count)]


def ids(outputs: list[EngineOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_the_peak_of_a_call_is_what_it_takes_for_a_while() -> None:
    memory = CudaMemory(DEVICE)

    def work() -> None:
        first = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
        del first
        kept = torch.empty(300 * MIB, dtype=torch.uint8, device=DEVICE)
        kept.zero_()

    before = memory.free_bytes()
    peak = memory.peak_bytes(work)
    assert peak is not None
    assert 300 * MIB <= peak <= 420 * MIB
    assert memory.peak_bytes(lambda: torch.empty(2 * before, dtype=torch.uint8, device=DEVICE)) is None
    assert abs(memory.free_bytes() - before) < 64 * MIB, "what was tried has been given back"


def test_pages_leave_room_for_the_largest_step(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    engine = made(folder, num_blocks=None, max_batch_tokens=None, max_memory_percent=0.05)
    assert 512 <= engine.scheduler.max_batch_tokens <= 8192
    # Each of the eight sequences can have 256 tokens at most.
    assert engine.pool.num_pages == 8 * 256 // 4 + 1
    assert ids(engine.generate(prompts(8), SAMPLING)) == ids(made(folder).generate(prompts(8), SAMPLING))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 10_000])
def test_who_gave_way_goes_on_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool, chunk: int
) -> None:
    folder = save_model("llama", tmp_path)
    undisturbed = ids(made(folder).generate(prompts(8), SAMPLING))
    page_bytes = made(folder).runner.cache.page_bytes
    monkeypatch.setattr("workers.engine.offload.CHUNK_BYTES", chunk * page_bytes)
    engine = made(folder, num_blocks=31, allow_block_sharing=False, use_async_batching=is_async)
    engine.scheduler.expected_answer_share = 0.0
    assert ids(engine.generate(prompts(8), SAMPLING)) == undisturbed
    stats = engine.stats()
    assert stats.offloaded_sequences > 3
    assert stats.recomputed_tokens == 0
    assert all(slab.is_pinned() for slab in engine.runner._host._slabs)  # type: ignore[attr-defined]
    assert (stats.offloaded_pages, engine.pool.free) == (0, engine.pool.capacity)


def test_copies_make_the_host_wait_for_nothing(tmp_path: Path) -> None:
    """Behind a long kernel, pages go out and come back while the host goes on."""
    engine = made(save_model("llama", tmp_path))
    pages = list(range(1, 9))
    before = [tensor[pages].clone() for tensor in engine.runner.cache.tensors]
    host = engine.runner._host
    host.copy([PageCopy(Direction.OUT, [9], [9])])  # memory is taken
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**9)
        host.copy([PageCopy(Direction.OUT, pages, pages)])
        for tensor in engine.runner.cache.tensors:
            tensor[1:9].fill_(-1)
        host.copy([PageCopy(Direction.IN, pages, pages)])
        assert not streams_of(DEVICE).compute.record().query(), "the device is still asleep"  # type: ignore[attr-defined]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for tensor, wanted in zip(engine.runner.cache.tensors, before, strict=True):
        assert torch.equal(tensor[pages], wanted)


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_lost_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """A forward of more than five rows asks for more memory than there is."""
    folder = save_model("llama", tmp_path)
    undisturbed = made(folder).generate(prompts(8), EACH)
    engine = made(folder, use_async_batching=is_async)
    compute = Runner._compute

    def limited(self: Runner, batch: object) -> torch.Tensor:
        logits = compute(self, batch)  # type: ignore[arg-type]
        if len(batch.input_ids) > 5:  # type: ignore[attr-defined]
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
        return logits

    monkeypatch.setattr(Runner, "_compute", limited)
    outputs = engine.generate(prompts(8), EACH)
    assert ids(outputs) == ids(undisturbed)
    for ours, theirs in zip(outputs, undisturbed, strict=True):
        if theirs.prompt_scores is not None:
            assert ours.prompt_scores is not None
            assert ours.prompt_scores.logprobs[1:] == pytest.approx(theirs.prompt_scores.logprobs[1:], abs=1e-4)
    assert engine.scheduler.max_batch_tokens <= 5
    assert engine.pool.free == engine.pool.capacity
