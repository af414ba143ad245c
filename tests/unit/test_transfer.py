"""Arrays reach the device and come back as they were, however late the copies are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.rehearsal import EarlyStream, LateStream
from workers.engine.results import Chosen, Clock, Pending
from workers.engine.streams import HostStream, Stream, Streams
from workers.engine.transfer import ALIGNMENT, Download, Layout, Upload

CPU = torch.device("cpu")
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
SHAPES = [(), (0,), (1,), (3,), (17,), (0, 5), (5, 0), (2, 3), (3, 1, 5)]


def array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> NDArray[Any]:
    return np.asarray(np.random.default_rng(seed).integers(0, 100, shape) % (2 if dtype == "bool" else 100)).astype(
        dtype
    )


def everything(seed: int = 0) -> list[NDArray[Any]]:
    """Every dtype in every shape, in any order."""
    arrays = [array(dtype, shape, seed) for dtype in DTYPES for shape in SHAPES]
    random.Random(seed).shuffle(arrays)
    return arrays


def at_once() -> Streams:
    return Streams(HostStream(), HostStream())


def assert_equal(found: list[NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fixed", [False, True])
def test_every_dtype_and_shape_goes_there_and_back(seed: int, fixed: bool) -> None:
    arrays = everything(seed)
    into = torch.empty(2 * Layout.of(arrays).size, dtype=torch.uint8) if fixed else None
    there = Upload(CPU, at_once(), packed=True)(arrays, into=into)
    assert [str(t.dtype).removeprefix("torch.") for t in there] == [str(a.dtype) for a in arrays]
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in there if t.numel())
    assert_equal(Download(CPU, at_once())(there).wait(), arrays)


def test_arrays_that_lie_in_any_way_and_may_not_be_written() -> None:
    turned, every_second, repeated = np.arange(6).reshape(2, 3).T, np.arange(9)[::2], np.broadcast_to(np.int32(7), (4,))
    there = Upload(CPU, at_once(), packed=True)([turned, every_second, repeated])
    assert [t.tolist() for t in there] == [turned.tolist(), every_second.tolist(), repeated.tolist()]
    back = Download(CPU, at_once())([there[0].T, there[1][1:], torch.zeros(1).expand(3)]).wait()
    assert [a.tolist() for a in back] == [[[0, 1, 2], [3, 4, 5]], [2, 4, 6, 8], [0, 0, 0]]


def test_nothing_at_all_and_empty_arrays_alone() -> None:
    upload, download = Upload(CPU, at_once(), packed=True), Download(CPU, at_once())
    assert upload([]) == []
    assert download([]).wait() == []
    assert [t.shape for t in upload([array("int64", (0, 3))])] == [(0, 3)]
    assert [a.shape for a in download([torch.zeros(0, 4), torch.zeros(0)]).wait()] == [(0, 4), (0,)]


def test_on_the_host_itself_tensors_are_the_arrays() -> None:
    given = np.arange(4)
    (tensor,) = Upload(CPU, at_once(), packed=False)([given])
    given[2] = 9
    assert tensor.tolist() == [0, 1, 9, 3]


def test_arrays_at_a_fixed_place_write_no_further_and_stay_there() -> None:
    upload, place = Upload(CPU, at_once(), packed=True), torch.full((64,), 255, dtype=torch.uint8)
    first = upload([np.arange(3), np.zeros(1, np.bool_)], into=place)
    second = upload([np.arange(3) + 5, np.ones(1, np.bool_)], into=place)
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert first[0].tolist() == [5, 6, 7]
    assert first[1].tolist() == [True]
    assert place[48:].tolist() == [255] * 16


def test_arrays_that_do_not_fit_into_their_place_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes do not fit into 16"):
        Upload(CPU, at_once(), packed=True)([np.arange(3)], into=torch.empty(16, dtype=torch.uint8))


def test_a_dtype_that_numpy_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        Download(CPU, at_once())([torch.zeros(2, dtype=torch.bfloat16)])


def sizes_of(seed: int) -> list[int]:
    """Of one step after the other: most alike, some far larger, so that buffers grow while others are in use."""
    rng = random.Random(seed)
    return [rng.choice([3, 3, 3, 4, 0, 50, 400 * rng.randint(1, 3)]) for _ in range(20)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixed", [False, True])
def test_a_buffer_is_not_written_while_its_copy_is_under_way(seed: int, fixed: bool) -> None:
    """No copy is done before somebody waits for it, and nobody but the buffers does."""
    stream = LateStream()
    upload = Upload(CPU, Streams(stream, HostStream()), packed=True)
    steps = [[np.full(size, number), np.full(2, number, np.int32)] for number, size in enumerate(sizes_of(seed))]
    places = [torch.zeros(Layout.of(arrays).size, dtype=torch.uint8) if fixed else None for arrays in steps]
    there = [upload(arrays, into=place) for arrays, place in zip(steps, places, strict=True)]
    stream.record().synchronize()
    for tensors, arrays in zip(there, steps, strict=True):
        assert_equal([t.numpy() for t in tensors], arrays)


def test_at_most_two_copies_are_under_way() -> None:
    """Else the last test would show nothing: a third one waits for the first."""
    stream = LateStream()
    upload = Upload(CPU, Streams(stream, HostStream()), packed=True)
    first, second = (upload([np.full(3, number), np.ones(1)])[0] for number in (7, 8))
    first.zero_()
    second.zero_()
    upload([np.full(3, 9), np.ones(1)])
    assert (first.tolist(), second.tolist()) == ([7, 7, 7], [0, 0, 0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", [list, lambda steps: list(reversed(steps)), lambda steps: steps[::3]])
def test_results_are_those_of_their_step_whenever_they_are_read(
    seed: int, order: Callable[[list[Any]], list[Any]]
) -> None:
    download = Download(CPU, Streams(EarlyStream(), LateStream()))
    on_device, arriving = torch.zeros(1200, dtype=torch.long), []
    for number, size in enumerate(sizes_of(seed)):
        on_device.fill_(number)
        arriving.append((number, size, download([on_device[:size], on_device[:1].float()])))
        on_device.fill_(-1)  # as the next step does
    for number, size, arrays in order(arriving):
        assert [a.tolist() for a in arrays.wait()] == [[number] * size, [number]]
        assert [a.tolist() for a in arrays.wait()] == [[number] * size, [number]]


def test_results_that_were_read_outlive_the_buffer() -> None:
    download = Download(CPU, Streams(EarlyStream(), LateStream()))
    (first,) = download([torch.arange(3)]).wait()
    for number in range(4):
        download([torch.full((3,), number)]).wait()
    assert first.tolist() == [0, 1, 2]


def test_a_result_is_fetched_behind_the_forward_that_makes_it_and_its_memory_kept_so_long() -> None:
    """On CUDA a tensor that a second stream reads has to be named to it, else its memory is given away meanwhile."""
    done: list[str] = []
    kept: list[torch.Tensor] = []

    class Copies(LateStream):
        def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
            kept.extend(tensors)
            super().run(work)
            if tensors:
                super().run(lambda: done.append("copy"))

    compute: Stream = LateStream()
    download = Download(CPU, Streams(compute, Copies()))
    compute.run(lambda: done.append("forward"))
    arriving = download([torch.arange(3), torch.ones(1, dtype=torch.bool)])
    compute.run(lambda: done.append("next forward"))
    assert done == []
    assert [a.tolist() for a in arriving.wait()] == [[0, 1, 2], [True]]
    assert done == ["forward", "copy"]
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 48)]


def pending(
    clock: Clock, launched: float, *, rows: int = 2, tops: int = 0, scored: int = 0, of_each: int = 0
) -> Pending:
    def pairs(count: int, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        ids = torch.arange(count * most).view(count, most)
        return (ids, -ids.float()) if most else None

    chosen = Chosen(
        tokens=torch.arange(rows) + 5,
        logprobs=torch.full((rows,), -0.5),
        allowed=torch.arange(rows) == 0,
        tops=pairs(rows, tops),
        scores=torch.full((scored,), -2.0),
        score_tops=pairs(scored, of_each),
    )
    return Pending(chosen, Download(CPU, Streams(EarlyStream(), LateStream())), clock, launched)


@pytest.mark.parametrize("tops", [0, 2])
@pytest.mark.parametrize("of_each", [0, 1])
def test_a_result_tells_tokens_and_those_beside_them_by_row(tops: int, of_each: int) -> None:
    result = pending(Clock(), 0.0, tops=tops, scored=1, of_each=of_each).wait()
    assert (result.tokens, result.logprobs, result.allowed) == ([5, 6], [-0.5, -0.5], [True, False])
    assert result.tops == ([[(0, 0.0), (1, -1.0)], [(2, -2.0), (3, -3.0)]] if tops else None)
    assert (result.scores, result.score_tops) == ([-2.0], [[(0, 0.0)]] if of_each else None)


def test_a_result_of_no_rows() -> None:
    result = pending(Clock(), 0.0, rows=0, tops=2).wait()
    assert (result.tokens, result.allowed, result.tops, result.scores) == ([], [], [], [])


def test_steps_ran_one_after_the_other() -> None:
    """The second was launched while the first one ran; the third when both had ended."""
    clock = Clock()
    first = pending(clock, 1.0).wait()
    second = pending(clock, 1.5)
    result = second.wait()
    assert (first.started, result.started) == (1.0, first.ended)
    assert second.wait() is result
    assert pending(clock, result.ended + 1).wait().started == result.ended + 1
