"""Pages travel beside the forward passes of a device that works beside the host: right bytes, fenced both ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engines import make
from tests.support.models import VOCAB_SIZE
from tests.support.rehearsal import EarlyStream, LateStream, rehearse
from workers.engine import EngineOutput, SamplingParams, offload
from workers.engine.attention.interface import LayerSpec
from workers.engine.attention.torch_paged import TorchPagedAttention
from workers.engine.cache import KVCache, group_layers
from workers.engine.device_path import DevicePath
from workers.engine.offload import BesideHostCache, Direction, HostCache, HostPool, PageCopy, host_cache, staging_bytes
from workers.engine.streams import Event, Stream, Streams, streams_of

CPU = torch.device("cpu")
IN, OUT = Direction.IN, Direction.OUT
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, frequency_penalty=0.5)
# A page has 4 positions of 2 layers: keys of 3 and values of 5 numbers in each of 2 heads, in bfloat16.
PAGE_BYTES = 2 * 4 * 2 * (3 + 5) * 2


def cache_of(pages: int) -> KVCache:
    """Every page has other numbers."""
    specs = [LayerSpec(i, 2, 2, 3, 5, 1.0) for i in range(2)]
    cache = KVCache(
        specs,
        group_layers(specs),
        TorchPagedAttention(),
        num_pages=pages,
        page_size=4,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for number, tensor in enumerate(cache.tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    assert cache.page_bytes == PAGE_BYTES
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.tensors]


class Rig:
    """A cache whose forward passes write pages on the compute stream, between the copies."""

    def __init__(self, compute: Stream, copies: Stream, *, chunk: int, pages: int = 24, capacity: int = 16) -> None:
        self.cache, self.compute = cache_of(pages), compute
        self.expected = contents(self.cache)
        self.copies = copies
        offload.CHUNK_BYTES = chunk * PAGE_BYTES
        self.host = BesideHostCache(self.cache, capacity, DevicePath(CPU, Streams(compute, copies), works_beside=True))

    def write(self, pages: list[int], value: float) -> None:
        """What a forward pass does to pages."""

        def work() -> None:
            for tensor in self.cache.tensors:
                tensor[pages] = value

        self.compute.run(work)

    def finish(self) -> None:
        for stream in (self.copies, self.compute, self.copies):
            stream.record().synchronize()

    def assert_pages(self, now: list[int], as_were: list[int]) -> None:
        for tensor, before in zip(self.cache.tensors, self.expected, strict=True):
            assert torch.equal(tensor[now], before[as_were])


STREAMS: dict[str, Callable[[], tuple[Stream, Stream]]] = {
    "copies are late": lambda: (EarlyStream(), LateStream()),
    "forwards are late": lambda: (LateStream(), EarlyStream()),
    "both are late": lambda: (LateStream(), LateStream()),
    "all is done at once": lambda: (streams_of(CPU).compute, streams_of(CPU).copies),
}


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", offload.CHUNK_BYTES)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("streams", sorted(STREAMS))
def test_what_went_out_comes_back_elsewhere(streams: str, chunk: int) -> None:
    """Each page is overwritten right after it was copied out, and its host page is used again right after it was
    copied in."""
    rig = Rig(*STREAMS[streams](), chunk=chunk)
    rig.host.copy([PageCopy(OUT, [3, 9, 4, 12, 1], [1, 2, 3, 7, 6]), PageCopy(OUT, [2], [4])])
    rig.write([1, 2, 3, 4, 9, 12], -7.0)
    rig.host.copy([PageCopy(IN, [20, 1, 21], [7, 2, 1]), PageCopy(OUT, [15, 16, 17], [1, 2, 7])])
    rig.write([15, 16, 17], -8.0)
    rig.host.copy([PageCopy(IN, [5, 22, 6], [3, 4, 6])])
    rig.host.copy([PageCopy(IN, [7, 8], [1, 7])])
    rig.finish()
    rig.assert_pages([20, 1, 21], [12, 9, 3])
    rig.assert_pages([5, 22, 6], [4, 2, 1])
    rig.assert_pages([7, 8], [15, 17])
    rig.assert_pages([0, 10, 11, 23], [0, 10, 11, 23])


@pytest.mark.parametrize("streams", sorted(STREAMS))
def test_many_random_moves(streams: str) -> None:
    """Against a cache that copies at once."""
    rng = random.Random(streams)
    rig, pool = Rig(*STREAMS[streams](), chunk=3, capacity=11), HostPool(11)
    plain = cache_of(24)
    reference = HostCache(plain, 11)
    kept: list[list[int]] = []
    for step in range(120):
        copies = []
        for _ in range(rng.randint(0, 3)):
            if kept and rng.random() < 0.5:
                host = kept.pop(rng.randrange(len(kept)))
                copies.append(PageCopy(IN, rng.sample(range(1, 24), len(host)), host))
                pool.give_back(host)
            elif pool.free:
                host = pool.take(rng.randint(1, pool.free))
                kept.append(host)
                copies.append(PageCopy(OUT, rng.sample(range(1, 24), len(host)), host))
        rig.host.copy(copies)
        reference.copy(copies)
        written = rng.sample(range(1, 24), 2)
        rig.write(written, float(step))
        for tensor in plain.tensors:
            tensor[written] = float(step)
    rig.finish()
    for ours, theirs in zip(rig.cache.tensors, plain.tensors, strict=True):
        assert torch.equal(ours, theirs)


class Deaf:
    """A stream that does not wait: for the fences that a test takes away."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.run, self.record = stream.run, stream.record

    def wait(self, event: Event) -> None:
        pass


@pytest.mark.parametrize(
    ("compute", "copies"),
    [(LateStream(), Deaf(EarlyStream())), (Deaf(EarlyStream()), LateStream())],
    ids=["copies do not wait", "forwards do not wait"],
)
def test_without_a_fence_the_bytes_are_wrong(compute: Stream, copies: Stream) -> None:
    """Else these tests would prove nothing."""
    rig = Rig(compute, copies, chunk=3)
    rig.host.copy([PageCopy(OUT, [3, 4, 5, 6], [1, 2, 3, 4])])
    rig.write([3, 4, 5, 6], -7.0)
    rig.host.copy([PageCopy(IN, [10, 11, 12, 13], [4, 3, 2, 1])])  # in another order than the staging buffers have
    rig.finish()
    with pytest.raises(AssertionError):
        rig.assert_pages([10, 11, 12, 13], [6, 5, 4, 3])


def test_pages_that_lie_side_by_side_travel_together() -> None:
    carried: list[int] = []

    class Counting(EarlyStream):
        def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
            carried.append(len(work.args[0]))  # type: ignore[attr-defined]
            super().run(work, *tensors)

    rig = Rig(EarlyStream(), Counting(), chunk=8)
    rig.host.copy([PageCopy(OUT, [3, 4, 5, 6, 7, 8], [1, 2, 3, 5, 6, 4])])
    assert carried == [3, 2, 1]
    carried.clear()
    rig.host.copy([PageCopy(OUT, list(range(1, 13)), list(range(5, 17)))])  # a chunk of eight, and one of four
    assert carried == [4, 4, 4], "the second piece of host memory begins with page 9"


def test_memory_on_the_device_is_bounded_and_on_the_host_taken_as_it_is_needed() -> None:
    rig = Rig(EarlyStream(), LateStream(), chunk=3, capacity=8)
    assert sum(staging.pages.nbytes for staging in rig.host._stagings) == 2 * 3 * PAGE_BYTES
    assert staging_bytes(8, PAGE_BYTES) == 2 * 3 * PAGE_BYTES
    assert staging_bytes(2, PAGE_BYTES) == 2 * 2 * PAGE_BYTES
    assert (staging_bytes(0, PAGE_BYTES), staging_bytes(9, 100 * PAGE_BYTES)) == (0, 2 * 100 * PAGE_BYTES)
    assert rig.host._slabs == []
    rig.host.copy([PageCopy(OUT, [1, 2], [1, 4])])
    assert [len(slab) for slab in rig.host._slabs] == [3, 3]
    rig.host.copy([PageCopy(OUT, [1], [8])])
    assert [len(slab) for slab in rig.host._slabs] == [3, 3, 2]
    rig.host.release()
    assert (rig.host._slabs, rig.host._stagings) == ([], [])


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    memory = offload._host_memory((3, 5), is_pinned=True)
    assert memory.shape == (3, 5)
    assert "they travel more slowly" in caplog.text


def test_a_device_that_has_done_its_work_needs_no_streams() -> None:
    path = DevicePath(CPU, streams_of(CPU), works_beside=False)
    assert type(host_cache(cache_of(4), 3, path)) is HostCache


def kept(outputs: list[EngineOutput]) -> list[object]:
    return [(o.token_ids, o.finish_reason) for o in outputs]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
def test_who_gave_way_goes_on_with_the_same_tokens(
    llama: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool, sharing: bool
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(10, 30))] for _ in range(8)]
    undisturbed = make(llama, num_blocks=300).generate(prompts, SAMPLING)
    rehearse(monkeypatch)
    engine = make(llama, num_blocks=31, allow_block_sharing=sharing, use_async_batching=is_async)
    assert type(engine.runner._host) is BesideHostCache
    engine.scheduler.expected_answer_share = 0.0
    outputs = engine.generate(prompts, SAMPLING)
    assert kept(outputs) == kept(undisturbed)
    for ours, theirs in zip(outputs, undisturbed, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    stats = engine.stats()
    assert stats.offloaded_sequences > 3
    assert (stats.offloaded_pages, engine.pool.free) == (0, engine.pool.capacity)
    assert sharing or stats.recomputed_tokens == 0
