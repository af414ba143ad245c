"""How many pages and rows a device's memory gives, by numbers that were worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from batchjobs.errors import UsageError
from tests.support.engines import make, prompts
from tests.support.models import save_model
from workers.engine import SamplingParams, memory, runner
from workers.engine.memory import Budget, CudaMemory, HostMemory, UntriedCudaMemory, Wanted, memory_of, plan_memory
from workers.engine.trial import TOP, trial_steps

MIB = 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Gpu:
    """A GPU of so many free bytes, on which a step takes some for each row and some for all of them."""

    share, batch_tokens = 0.9, 8192

    def __init__(self, free: int, per_row: int, fixed: int = 0) -> None:
        self.free, self.per_row, self.fixed = free, per_row, fixed
        self.tried: list[int] = []

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        rows = work()
        assert isinstance(rows, int)
        self.tried.append(rows)
        needed = self.fixed + rows * self.per_row
        return needed if needed <= self.free else None


def plan(gpu: Gpu, wanted: Wanted = Wanted(None, None, None), *, useful: int = 10**9, other: int = 0) -> Budget:  # noqa: B008
    """Pages of 1 MiB; trying a step of n rows gives n."""
    return plan_memory(gpu, wanted, page_bytes=MIB, useful_pages=useful, other_bytes=other, try_step=lambda rows: rows)


def test_pages_get_their_share_of_what_is_free_beside_the_largest_step() -> None:
    # 10,000 MiB free, a step of 8,192 rows takes 8192 * 0.25 MiB = 2,048 MiB: 0.9 * 7,952 MiB are for pages.
    gpu = Gpu(10_000 * MIB, MIB // 4)
    assert plan(gpu) == Budget(pages=7156, batch_tokens=8192)
    assert gpu.tried == [8192]
    assert plan(gpu, Wanted(None, None, 0.5)) == Budget(pages=3976, batch_tokens=8192)
    assert plan(gpu, useful=500) == Budget(pages=500, batch_tokens=8192)
    # 128 MiB for pages on their way to the host and back: 0.9 * 7,824 MiB.
    assert plan(gpu, other=128 * MIB) == Budget(pages=7041, batch_tokens=8192)


def test_rows_are_halved_until_a_step_fits_and_leaves_most_of_the_memory() -> None:
    # 2,000 MiB free, 0.5 MiB a row: 4,096 and more rows do not fit, 2,048 take half of it, 1,024 a quarter and a bit.
    gpu = Gpu(2000 * MIB, MIB // 2)
    assert plan(gpu) == Budget(pages=int(0.9 * (2000 - 256)), batch_tokens=512)
    assert gpu.tried == [8192, 4096, 2048, 1024, 512]
    # However little memory there is, only what does not fit makes a step smaller than 512 rows.
    assert plan(Gpu(400 * MIB, MIB // 2)) == Budget(pages=int(0.9 * (400 - 256)), batch_tokens=512)
    assert plan(Gpu(200 * MIB, MIB // 2)) == Budget(pages=int(0.9 * (200 - 128)), batch_tokens=256)


def test_a_number_of_rows_that_was_asked_for_is_lowered_only_if_it_does_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert plan(Gpu(2000 * MIB, MIB // 2), Wanted(None, 2048, None)) == Budget(int(0.9 * (2000 - 1024)), 2048)
    assert not caplog.records
    assert plan(Gpu(2000 * MIB, MIB // 2), Wanted(None, 6000, None)) == Budget(int(0.9 * (2000 - 1500)), 3000)
    assert "steps have 3000 rows at most: 6000 do not fit" in caplog.text


def test_a_number_of_pages_that_was_asked_for_stays_and_rows_fit_beside_it() -> None:
    gpu = Gpu(2000 * MIB, MIB // 2)
    assert plan(gpu, Wanted(1400, None, None)) == Budget(pages=1400, batch_tokens=1024)  # 1,400 and 512 MiB
    gpu.tried.clear()
    assert plan(gpu, Wanted(1400, 4096, 0.1)) == Budget(pages=1400, batch_tokens=4096)
    assert gpu.tried == [], "nothing is left to find out"


def test_without_room_the_reason_has_the_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"one page takes 1\.0 MiB, 100 MiB are free and a step of 512 rows takes 99 MiB"
    ):
        plan(Gpu(100 * MIB, 0, 99 * MIB))
    with pytest.raises(UsageError, match="no memory for a step of one row: 7 MiB are free"):
        plan(Gpu(7 * MIB, MIB, 7 * MIB))


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000 * MIB}))
    monkeypatch.setattr(memory, "memory_left", lambda: None)

    def plan_on_cpu() -> Budget:
        return plan_memory(
            HostMemory(), Wanted(None, None, None), page_bytes=MIB, useful_pages=10**6, try_step=lambda _: 1 / 0
        )

    assert plan_on_cpu() == Budget(pages=250, batch_tokens=2048)
    monkeypatch.setattr(memory, "memory_left", lambda: 400 * MIB)  # the limit of a container
    assert plan_on_cpu() == Budget(pages=100, batch_tokens=2048)


def test_a_step_is_tried_where_no_other_device_takes_part() -> None:
    device = torch.device("cuda", 0)
    assert type(memory_of(torch.device("cpu"), tries=True)) is HostMemory
    assert type(memory_of(device, tries=True)) is CudaMemory
    alone = memory_of(device, tries=False)
    assert type(alone) is UntriedCudaMemory
    assert alone.peak_bytes(lambda: 1 / 0) == 0


class TestTrial:
    def test_the_first_step_has_all_rows_and_the_second_the_longest_context(self) -> None:
        (prompts, wishes), (deep, _) = trial_steps(250, requests=8, context=100, page_size=16, groups=2, vocab_size=97)
        assert np.diff(prompts.rows[0].starts).tolist() == [100, 100, 50]
        assert prompts.positions[[0, 99, 100, 249]].tolist() == [0, 99, 0, 49]
        assert (len(prompts.sampled_rows), len(prompts.scored_rows), len(prompts.rows)) == (8, 250, 2)
        assert (wishes.count, wishes.drawn, wishes.top_k) == (8, list(range(8)), [97] * 8)
        assert np.diff(deep.rows[0].starts).tolist() == [16] + [1] * 7
        assert deep.rows[0].cached.tolist() == [84] + [99] * 7
        assert deep.positions[-1] == 99
        for batch in (prompts, deep):
            assert not batch.rows[0].tables.any(), "they live in the null page"
            assert set(batch.sampled_slots.tolist()) == {8}, "and in no sequence's slot"

    def test_one_row_is_a_step_too(self) -> None:
        for batch, _ in trial_steps(1, requests=8, context=100, page_size=16, groups=1, vocab_size=97):
            assert len(batch.input_ids) == len(batch.sampled_rows) == len(batch.scored_rows) == 1

    @pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
    def test_a_model_that_was_tried_answers_as_one_that_was_not(
        self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_model(family, tmp_path)
        usual = make(folder, native_forward=False).generate(prompts(4), GREEDY)
        tried = []

        class Tried(HostMemory):
            def peak_bytes(self, work: Callable[[], object]) -> int:
                work()
                tried.append(True)
                return 3 * MIB

        monkeypatch.setattr(runner, "memory_of", lambda device, tries: Tried())
        engine = make(folder, native_forward=False, max_batch_tokens=600, num_blocks=None)
        assert tried == [True]
        assert engine.runner.cache.num_pages == engine.pool.num_pages > 2
        assert [o.token_ids for o in engine.generate(prompts(4), GREEDY)] == [o.token_ids for o in usual]
        assert engine.vocab_size > TOP
