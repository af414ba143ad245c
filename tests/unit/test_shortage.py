"""A step that does not fit the device's memory runs in parts, and nobody notices but by the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engines import make, prompts
from tests.support.models import save_model
from tests.support.rehearsal import rehearse
from workers.engine import Engine, EngineOutput, SamplingParams, shortage
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.runner import Runner
from workers.engine.shortage import Shortage, twice

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, frequency_penalty=0.4)
SCORED = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, ignore_eos=True)
EACH = [GREEDY, DRAWN, SCORED] * 4


def batch_of(counts: list[int], cached: list[int], *, page_size: int = 4) -> PackedBatch:
    """Every sequence samples after its last row; the second row of each is scored, the last one is fed."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    first = np.array(cached, np.int32)
    total = int(starts[-1])
    width = -(-int((first + counts).max()) // page_size)
    last, second = starts[1:].astype(np.int64) - 1, starts[:-1].astype(np.int64) + 1
    second = second[np.array(counts) > 1]
    return PackedBatch(
        input_ids=np.arange(100, 100 + total),
        positions=np.arange(total) - np.repeat(starts[:-1] - first, counts),
        fed_rows=last,
        fed_slots=np.arange(len(counts)) + 50,
        sampled_rows=last,
        sampled_slots=np.arange(len(counts)) + 50,
        scored_rows=second,
        scored_tokens=second + 1000,
        rows=[PackedRows(starts, first, np.arange(len(counts) * width, dtype=np.int32).reshape(-1, width), page_size)],
    )


class TestParts:
    def test_a_sequence_is_cut_in_two(self) -> None:
        whole = batch_of([1, 6, 2], [9, 3, 0])
        left, right = whole.part(0, 4), whole.part(4, 9)
        assert (left.input_ids.tolist(), right.input_ids.tolist()) == ([100, 101, 102, 103], [104, 105, 106, 107, 108])
        assert (left.positions.tolist(), right.positions.tolist()) == ([9, 3, 4, 5], [6, 7, 8, 0, 1])
        assert (left.rows[0].starts.tolist(), left.rows[0].cached.tolist()) == ([0, 1, 4], [9, 3])
        assert (right.rows[0].starts.tolist(), right.rows[0].cached.tolist()) == ([0, 3, 5], [6, 0])
        assert left.rows[0].tables.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert right.rows[0].tables.tolist() == [[3, 4, 5], [6, 7, 8]]
        assert (left.sampled_rows.tolist(), right.sampled_rows.tolist()) == ([0], [2, 4])
        assert (left.fed_slots.tolist(), right.fed_slots.tolist()) == ([50], [51, 52])
        assert (left.scored_rows.tolist(), right.scored_rows.tolist()) == ([2], [4])
        assert (left.scored_tokens.tolist(), right.scored_tokens.tolist()) == ([1002], [1008])
        assert {array.dtype for part in (left, right) for array in (part.rows[0].starts, part.rows[0].cached)} == {
            np.dtype(np.int32)
        }

    def test_tables_end_with_the_last_row(self) -> None:
        part = batch_of([12], [0]).part(0, 5)
        assert (part.rows[0].cached.tolist(), part.rows[0].tables.tolist()) == ([0], [[0, 1]])

    @pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
    def test_logits_come_in_the_order_of_the_whole(self, most: int) -> None:
        """The logits of a row are its token and its position, so that each tells whose they are."""
        sizes = []

        def compute(batch: PackedBatch) -> torch.Tensor:
            if len(batch.input_ids) > most:
                raise torch.OutOfMemoryError("no")
            sizes.append(len(batch.input_ids))
            wanted = np.concatenate((batch.sampled_rows, batch.scored_rows))
            return torch.from_numpy(np.stack((batch.input_ids[wanted], batch.positions[wanted]), 1)).float()

        batch, limit = batch_of([1, 6, 2, 1], [9, 3, 0, 30]), Shortage(64)
        found = limit.run(compute, batch)
        assert found.tolist() == [[100, 9], [106, 8], [108, 1], [109, 30], [102, 4], [108, 1]]
        assert sum(sizes) == 10
        assert limit.most_rows == max(sizes) <= most

    def test_a_step_that_was_planned_before_lowers_nothing_more(self) -> None:
        def compute(batch: PackedBatch) -> torch.Tensor:
            if len(batch.input_ids) > 5:
                raise torch.OutOfMemoryError("no")
            return torch.zeros(len(batch.sampled_rows) + len(batch.scored_rows), 3)

        limit = Shortage(64)
        limit.run(compute, batch_of([10], [0]))
        assert limit.most_rows == 5
        limit.run(compute, batch_of([8], [0]))  # in halves of four
        assert limit.most_rows == 5

    def test_there_is_a_step_that_is_too_large_even_so(self) -> None:
        def compute(batch: PackedBatch) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB.\nmore")

        wanted = "no memory left for a step of a single row: .*max_memory_percent.* Tried to allocate 5 GiB.$"
        with pytest.raises(torch.OutOfMemoryError, match=wanted):
            Shortage(64).run(compute, batch_of([3, 4], [0, 0]))

    def test_another_error_goes_up_as_it_is(self) -> None:
        def compute(batch: PackedBatch) -> torch.Tensor:
            raise RuntimeError("a fault of its own")

        with pytest.raises(RuntimeError, match=r"^a fault of its own$"):
            Shortage(64).run(compute, batch_of([3], [0]))


def short(monkeypatch: pytest.MonkeyPatch, most: Callable[[], int]) -> list[int]:
    """From now on no forward can have more than ``most()`` rows. One that fails has written its keys and values by
    then. Gives the sizes of the forwards that ran."""
    compute, sizes = Runner._compute, []

    def limited(self: Runner, batch: PackedBatch) -> torch.Tensor:
        logits = compute(self, batch)
        if len(batch.input_ids) > most():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        sizes.append(len(batch.input_ids))
        return logits

    monkeypatch.setattr(Runner, "_compute", limited)
    return sizes


def told(outputs: list[EngineOutput]) -> list[object]:
    return [(o.token_ids, o.finish_reason, o.error) for o in outputs]


def assert_same(ours: list[EngineOutput], theirs: list[EngineOutput]) -> None:
    assert told(ours) == told(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (one.prompt_scores is None) == (other.prompt_scores is None)
        if one.prompt_scores is not None and other.prompt_scores is not None:
            assert one.prompt_scores.logprobs[1:] == pytest.approx(other.prompt_scores.logprobs[1:], abs=1e-4)


@pytest.mark.parametrize("is_rehearsed", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_lost_when_memory_runs_out(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_rehearsed: bool,
    is_async: bool,
) -> None:
    undisturbed = make(llama).generate(prompts(12), EACH)
    if is_rehearsed:
        rehearse(monkeypatch)
    engine = make(llama, max_batch_tokens=64, num_blocks=60, use_async_batching=is_async)
    limits = iter([64, 64, 20, 20, 20, 20, 20, 20])
    sizes = short(monkeypatch, lambda: next(limits, 5))
    assert_same(engine.generate(prompts(12), EACH), undisturbed)
    assert engine.pool.free == engine.pool.capacity
    assert max(sizes[-20:]) <= 5, "later steps are planned smaller"
    assert engine.scheduler.max_batch_tokens == engine.runner.shortage.most_rows <= 5
    lines = [record.getMessage() for record in caplog.records if record.name == shortage.__name__]
    limits_told = [int(line.split(" rows at most")[0].split()[-1]) for line in lines]
    assert limits_told == sorted(set(limits_told), reverse=True), "each lowering is told once"
    assert limits_told[-1] == engine.scheduler.max_batch_tokens
    engine.close()


def test_windows_and_a_single_row_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("gemma2", tmp_path)
    undisturbed = make(folder).generate(prompts(5), GREEDY)
    engine = make(folder, num_blocks=60)
    sizes = short(monkeypatch, lambda: 1)
    assert told(engine.generate(prompts(5), GREEDY)) == told(undisturbed)
    assert set(sizes) == {1}
    assert engine.pool.free == engine.pool.capacity


def test_without_memory_for_a_row_the_engine_says_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(llama)
    short(monkeypatch, lambda: 0)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left for a step of a single row"):
        engine.generate(prompts(2), GREEDY)


class TestSampling:
    def test_tokens_are_chosen_once_more(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        undisturbed = make(llama).generate(prompts(4), DRAWN)
        rehearse(monkeypatch)
        engine, failing = make(llama), iter([False, True] * 3)
        choose = Runner._choose

        def limited(self: Runner, *arguments: object) -> object:
            chosen = choose(self, *arguments)  # type: ignore[arg-type]
            if next(failing, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return chosen

        monkeypatch.setattr(Runner, "_choose", limited)
        assert told(engine.generate(prompts(4), DRAWN)) == told(undisturbed)
        assert sum("chosen once more" in record.getMessage() for record in caplog.records) == 3

    def test_a_second_time_is_the_last(self) -> None:
        calls = []

        def fail() -> None:
            calls.append(1)
            raise torch.OutOfMemoryError("no")

        with pytest.raises(torch.OutOfMemoryError):
            twice(fail)
        assert len(calls) == 2


def test_what_memory_taught_outlives_an_update_of_the_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make(llama, max_batch_tokens=64)
    with monkeypatch.context() as patch:
        short(patch, lambda: 8)
        engine.generate(prompts(6), GREEDY)
    lowered = engine.scheduler.max_batch_tokens
    assert lowered <= 8
    engine.update_model(str(llama))
    engine.generate(prompts(6), GREEDY)
    assert engine.scheduler.max_batch_tokens == lowered
