"""Both attention backends against dense attention in float64, over seeded random packed steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import workers.engine.attention as attention
from workers.engine.attention.compiler import KernelError, load_kernel
from workers.engine.attention.cpu import CpuPagedAttention
from workers.engine.attention.interface import LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    from workers.engine.attention.interface import AttentionBackend

SOURCE = Path(attention.__file__).with_name("paged_attention.cpp")
BACKENDS = ("torch", "cpu")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHJOBS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("BATCHJOBS_NO_COMPILE", raising=False)
        try:
            yield load_kernel(SOURCE)
        except KernelError as reason:
            pytest.skip(f"the C++ kernel cannot be built here: {reason}")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "torch":
        return TorchPagedAttention()
    return CpuPagedAttention(request.getfixturevalue("kernel"))


@pytest.fixture
def cpu(kernel: ctypes.CDLL) -> CpuPagedAttention:
    return CpuPagedAttention(kernel)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread: these tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(threads: None) -> None:
    torch.set_num_threads(2)


@dataclass
class Story:
    """One sequence's queries, keys and values at every position."""

    query: torch.Tensor  # [Hq, L, D]
    key: torch.Tensor  # [Hkv, L, D]
    value: torch.Tensor  # [Hkv, L, Dv]

    @property
    def length(self) -> int:
        return self.key.shape[1]


def make_story(spec: LayerSpec, length: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Story:
    def randn(heads: int, size: int) -> torch.Tensor:
        return torch.randn(heads, length, size, generator=generator).to(dtype)

    return Story(
        randn(spec.num_heads, spec.head_dim),
        randn(spec.num_kv_heads, spec.head_dim),
        randn(spec.num_kv_heads, spec.value_dim),
    )


def make_sinks(spec: LayerSpec, generator: torch.Generator) -> torch.Tensor | None:
    return torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None


def dense(spec: LayerSpec, story: Story, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of every position of one sequence, the plainest way there is: [L, Hq, Dv] in float64."""
    at = torch.arange(story.length)
    seen = at <= at[:, None]
    if spec.sliding_window is not None:
        seen &= at > at[:, None] - spec.sliding_window
    out = torch.empty(story.length, spec.num_heads, spec.value_dim, dtype=torch.float64)
    for head in range(spec.num_heads):
        shared = head // (spec.num_heads // spec.num_kv_heads)
        scores = story.query[head].double() @ story.key[shared].double().T * spec.scaling  # [L, L]
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores[~seen] = -torch.inf
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(story.length, 1)), dim=1)
        weights = torch.softmax(scores, dim=1)[:, : story.length]
        out[:, head] = weights @ story.value[shared].double()
    return out


class Pool:
    """Poisoned pages of one layer, handed out in a shuffled order and never page 0."""

    def __init__(self, backend: AttentionBackend, spec: LayerSpec, page_size: int, dtype: torch.dtype, seed: int = 0):
        self.backend, self.spec, self.page_size = backend, spec, page_size
        pages = 1 + 3000 // page_size
        self.cache = backend.allocate(spec, pages, page_size, dtype, "cpu")
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        self.free = (np.random.default_rng(seed).permutation(pages - 1) + 1).tolist()
        self.tables: dict[int, list[int]] = {}  # by sequence

    def rows(self, parts: Sequence[tuple[int, int, int]]) -> PackedRows:
        """A step in which each (sequence, first, end) brings the rows at positions first .. end."""
        for sequence, _, end in parts:
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.page_size < end:
                table.append(self.free.pop())
        tables = np.zeros((len(parts), max(len(self.tables[s]) for s, _, _ in parts)), np.int32)
        for i, (sequence, _, _) in enumerate(parts):
            tables[i, : len(self.tables[sequence])] = self.tables[sequence]
        starts = np.cumsum([0, *(end - first for _, first, end in parts)]).astype(np.int32)
        return PackedRows(starts, np.array([first for _, first, _ in parts], np.int32), tables, self.page_size)

    def step(
        self, stories: Sequence[Story], parts: Sequence[tuple[int, int, int]], sinks: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Run one packed step; each part's rows, [N, Hq, Dv]."""
        rows = self.rows(parts)
        query, key, value = (
            torch.cat([getattr(stories[s], name)[:, first:end] for s, first, end in parts], dim=1)[None]
            for name in ("query", "key", "value")
        )
        self.backend.begin(rows)
        out = self.backend.attend(self.spec, self.cache, *self.strided(query, key, value), sinks)
        assert out.shape == (1, rows.num_rows, self.spec.num_heads, self.spec.value_dim)
        assert out.is_contiguous()
        assert out.dtype == query.dtype
        return list(out[0].split(np.diff(rows.starts).tolist()))

    def strided(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same numbers in the ways models bring them: as they are, heads behind rows, slices of one projection."""
        kind = len(self.free) % 4
        if kind == 0:
            return query, key, value
        if kind == 1:
            return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
        if kind == 2:
            return tuple(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (query, key, value))
        parts = [t[0].transpose(0, 1).flatten(1) for t in (query, key, value)]  # [T, H * D]
        fused = torch.cat(parts, dim=1).split([p.shape[1] for p in parts], dim=1)
        heads = (query.shape[1], key.shape[1], value.shape[1])
        return tuple(p.unflatten(1, (h, -1)).transpose(0, 1)[None] for p, h in zip(fused, heads, strict=True))


def run_all(
    pool: Pool, stories: Sequence[Story], plan: Sequence[Sequence[tuple[int, int, int]]], sinks: torch.Tensor | None
) -> list[torch.Tensor]:
    """Run the planned steps; each sequence's rows joined again, [L, Hq, Dv]."""
    parts: dict[int, list[torch.Tensor]] = {}
    for step in plan:
        for (sequence, _, _), rows in zip(step, pool.step(stories, step, sinks), strict=True):
            parts.setdefault(sequence, []).append(rows)
    return [torch.cat(parts[s]) for s in range(len(stories))]


def ragged_plan(lengths: Sequence[int], rng: np.random.Generator) -> list[list[tuple[int, int, int]]]:
    """Random steps, decode rows and prefill chunks mixed, that take every sequence from nothing to its length."""
    done = [0] * len(lengths)
    plan = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = []
        for s in rng.permutation(len(lengths)).tolist():
            left = lengths[s] - done[s]
            if left == 0 or (step and rng.random() < 0.2):
                continue
            count = 1 if rng.random() < 0.3 else int(rng.integers(1, left + 1))
            step.append((s, done[s], done[s] + count))
            done[s] += count
        if step:
            plan.append(step)
    return plan


def random_spec(rng: np.random.Generator) -> LayerSpec:
    head_dim = int(rng.choice((8, 16, 64, 80, 128)))
    kv_heads = int(rng.choice((1, 2)))
    return LayerSpec(
        index=0,
        num_heads=kv_heads * int(rng.choice((1, 3, 4, 8))),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if rng.random() < 0.7 else int(rng.choice((8, 20, 64))),
        scaling=float(rng.choice((head_dim**-0.5, 0.3))),
        sliding_window=None if rng.random() < 0.5 else int(rng.choice((1, 5, 17, 64, 100))),
        softcap=None if rng.random() < 0.6 else float(rng.choice((5.0, 50.0))),
        has_sinks=bool(rng.random() < 0.4),
    )


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """float32 within 1e-5; bfloat16 within its own rounding of the right value."""
    relative, absolute = (2**-8, 2e-5) if found.dtype == torch.bfloat16 else (1e-5, 5e-6)
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=absolute)


PLAIN = LayerSpec(0, num_heads=6, num_kv_heads=2, head_dim=64, value_dim=64, scaling=0.125)
GEMMA = replace(PLAIN, head_dim=80, value_dim=80, scaling=0.11, sliding_window=37, softcap=30.0)
GPT_OSS = replace(PLAIN, num_heads=16, sliding_window=50, has_sinks=True)
SPECS = pytest.mark.parametrize("spec", [PLAIN, GEMMA, GPT_OSS], ids=["plain", "capped window", "sinks"])


@pytest.mark.parametrize("seed", range(120))
def test_equals_dense_attention_over_random_steps(backend: AttentionBackend, seed: int) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    spec = random_spec(rng)
    dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float32
    longest = int(rng.choice((20, 70, 150)))
    stories = [make_story(spec, int(n), generator, dtype) for n in rng.integers(1, longest, rng.integers(1, 6))]
    sinks = make_sinks(spec, generator)
    pool = Pool(backend, spec, int(rng.choice((1, 4, 16, 24, 32))), dtype, seed)
    found = run_all(pool, stories, ragged_plan([s.length for s in stories], rng), sinks)
    for story, rows in zip(stories, found, strict=True):
        assert_close(rows, dense(spec, story, sinks))


@pytest.mark.parametrize("group", [1, 2, 5, 7, 12, 71])
def test_every_group_of_heads_is_served(backend: AttentionBackend, group: int) -> None:
    spec = LayerSpec(0, num_heads=group, num_kv_heads=1, head_dim=16, value_dim=16, scaling=0.25)
    story = make_story(spec, 70, torch.Generator().manual_seed(group))
    whole = Pool(backend, spec, 16, torch.float32).step([story], [(0, 0, 70)])[0]
    assert_close(whole, dense(spec, story))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_keys_and_values_are_in_their_pages_right_after_the_step(
    backend: AttentionBackend, page_size: int, dtype: torch.dtype
) -> None:
    spec = LayerSpec(0, num_heads=2, num_kv_heads=2, head_dim=8, value_dim=20, scaling=1.0)
    generator = torch.Generator().manual_seed(1)
    stories = [make_story(spec, n, generator, dtype) for n in (40, 9)]
    pool = Pool(backend, spec, page_size, dtype)
    pool.step(stories, [(0, 0, 33), (1, 0, 8)])
    pool.step(stories, [(1, 8, 9), (0, 33, 40)])
    keys, values = slots_of(backend, spec, pool.cache, page_size)
    used = set()
    for sequence, story in enumerate(stories):
        for position in range(story.length):
            slot = pool.tables[sequence][position // page_size] * page_size + position % page_size
            used.add(slot)
            assert torch.equal(keys[slot], story.key[:, position])
            assert torch.equal(values[slot], story.value[:, position])
    others = [slot for slot in range(len(keys)) if slot not in used]
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


def slots_of(
    backend: AttentionBackend, spec: LayerSpec, cache: LayerCache, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of either backend as keys and values by slot, [pages * page_size, Hkv, D]."""
    if backend.name == "torch":
        return cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
    lanes = 16 if page_size % 16 == 0 else page_size
    assert cache.keys.shape[1:] == (spec.num_kv_heads, page_size // lanes, spec.head_dim, lanes)
    keys = cache.keys.permute(0, 2, 4, 1, 3).flatten(0, 2)
    return keys, cache.values.transpose(1, 2).flatten(0, 1)[..., : spec.value_dim]


@SPECS
def test_chunks_of_any_split_give_the_same_rows(backend: AttentionBackend, spec: LayerSpec) -> None:
    generator = torch.Generator().manual_seed(2)
    story, sinks = make_story(spec, 200, generator), make_sinks(spec, generator)
    whole = Pool(backend, spec, 16, torch.float32).step([story], [(0, 0, 200)], sinks)[0]
    for cuts in ([1], [64], [63, 64, 65], [17, 18, 130], list(range(150, 200)), list(range(1, 200, 7))):
        edges = [0, *cuts, 200]
        plan = [[(0, a, b)] for a, b in pairwise(edges)]
        found = run_all(Pool(backend, spec, 16, torch.float32, seed=len(cuts)), [story], plan, sinks)[0]
        if backend.name == "cpu":
            assert torch.equal(found, whole)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


@SPECS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("two_threads")
def test_batch_mates_change_no_bit(cpu: CpuPagedAttention, spec: LayerSpec, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 5, 40, 64, 65, 130, 333)
    stories, sinks = [make_story(spec, n, generator, dtype) for n in lengths], make_sinks(spec, generator)
    together = run_all(
        Pool(cpu, spec, 16, dtype, seed=1), stories, ragged_plan(lengths, np.random.default_rng(4)), sinks
    )
    for story, rows in zip(stories, together, strict=True):
        alone = Pool(cpu, spec, 16, dtype, seed=2).step([story], [(0, 0, story.length)], sinks)[0]
        assert torch.equal(rows, alone)


@SPECS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_size_and_threads_change_no_bit(
    cpu: CpuPagedAttention, spec: LayerSpec, dtype: torch.dtype, two_threads: None
) -> None:
    generator = torch.Generator().manual_seed(5)
    story, sinks = make_story(spec, 180, generator, dtype), make_sinks(spec, generator)
    plan = [[(0, 0, 100)], [(0, 100, 101)], [(0, 101, 180)]]
    wanted = run_all(Pool(cpu, spec, 16, dtype), [story], plan, sinks)[0]
    for page_size in (1, 4, 7, 32, 48, 256):
        assert torch.equal(run_all(Pool(cpu, spec, page_size, dtype), [story], plan, sinks)[0], wanted)
    torch.set_num_threads(1)
    assert torch.equal(run_all(Pool(cpu, spec, 16, dtype), [story], plan, sinks)[0], wanted)


@SPECS
@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_sick_sequence_keeps_it_to_itself(
    backend: AttentionBackend, spec: LayerSpec, place: str, poison: float
) -> None:
    generator = torch.Generator().manual_seed(6)
    stories, sinks = [make_story(spec, n, generator) for n in (30, 50, 20, 61)], make_sinks(spec, generator)
    plan = [[(0, 0, 29), (1, 0, 49), (2, 0, 19), (3, 0, 60)], [(0, 29, 30), (1, 49, 50), (2, 19, 20), (3, 60, 61)]]
    healthy = run_all(Pool(backend, spec, 4, torch.float32), stories, plan, sinks)
    getattr(stories[1], place)[:, 45] = poison
    found = run_all(Pool(backend, spec, 4, torch.float32), stories, plan, sinks)
    for sequence in (0, 2, 3):
        assert torch.equal(found[sequence], healthy[sequence])
    assert not found[1][45].isfinite().any(dim=-1).all()
    if poison != poison and place != "query":
        assert found[1][49].isnan().all()  # the decode row sees position 45


@pytest.mark.parametrize("sick", [69, 70, 71])
def test_a_row_is_untouched_by_what_comes_after_it(cpu: CpuPagedAttention, sick: int) -> None:
    story = make_story(PLAIN, 90, torch.Generator().manual_seed(7))
    healthy = Pool(cpu, PLAIN, 16, torch.float32).step([story], [(0, 0, 90)])[0]
    story.key[:, sick], story.value[:, sick] = torch.nan, torch.nan
    found = Pool(cpu, PLAIN, 16, torch.float32).step([story], [(0, 0, 90)])[0]
    assert torch.equal(found[:sick], healthy[:sick])
    assert found[sick:].isnan().all()


def test_sequences_that_share_prefix_pages_see_rows_of_the_same_step(backend: AttentionBackend) -> None:
    generator = torch.Generator().manual_seed(8)
    leader = make_story(PLAIN, 40, generator)
    follower = make_story(PLAIN, 40, generator)
    follower.key[:, :32], follower.value[:, :32] = leader.key[:, :32], leader.value[:, :32]
    pool = Pool(backend, PLAIN, 16, torch.float32)
    pool.rows([(0, 0, 40)])
    pool.tables[1] = pool.tables[0][:2]
    _, found = pool.step([leader, follower], [(0, 0, 40), (1, 32, 40)])
    assert_close(found, dense(PLAIN, follower)[32:])


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_before_the_window_may_be_gone(backend: AttentionBackend, page_size: int) -> None:
    spec = replace(PLAIN, sliding_window=20)
    story = make_story(spec, 150, torch.Generator().manual_seed(9))
    pool = Pool(backend, spec, page_size, torch.float32)
    pool.step([story], [(0, 0, 100)])
    wanted = dense(spec, story)
    for first, end in ((100, 140), (140, 141), (141, 150)):
        gone = (first - 20 + 1) // page_size
        pool.tables[0][:gone] = [0] * gone
        assert_close(pool.step([story], [(0, first, end)])[0], wanted[first:end])


@pytest.mark.parametrize("sink", [-torch.inf, -30.0, 0.0, 60.0])
def test_sinks_of_any_size(backend: AttentionBackend, sink: float) -> None:
    spec = replace(PLAIN, has_sinks=True)
    story = make_story(spec, 70, torch.Generator().manual_seed(10))
    sinks = torch.full((spec.num_heads,), sink, dtype=torch.bfloat16)
    found = Pool(backend, spec, 16, torch.float32).step([story], [(0, 0, 70)], sinks)[0]
    assert_close(found, dense(spec, story, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_that_is_not_a_number_shows(backend: AttentionBackend, dtype: torch.dtype) -> None:
    spec = replace(PLAIN, has_sinks=True)
    story = make_story(spec, 20, torch.Generator().manual_seed(16), dtype)
    sinks = torch.full((spec.num_heads,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert Pool(backend, spec, 16, dtype).step([story], [(0, 0, 20)], sinks)[0].isnan().all()


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0, 1e4])
def test_scores_of_any_size(backend: AttentionBackend, size: float, softcap: float | None) -> None:
    """Large scores are exact in float32 here: whole numbers, so that only the softmax itself is in question."""
    spec = LayerSpec(0, num_heads=3, num_kv_heads=1, head_dim=16, value_dim=16, scaling=1.0, softcap=softcap)
    story = make_story(spec, 130, torch.Generator().manual_seed(11))
    story.query = (story.query * 4).round() * size
    story.key = (story.key * 4).round()
    found = Pool(backend, spec, 16, torch.float32).step([story], [(0, 0, 130)])[0]
    torch.testing.assert_close(found.double(), dense(spec, story), rtol=2e-5, atol=2e-5)


def test_a_row_whose_scores_all_overflow_is_not_a_number_and_alone(backend: AttentionBackend) -> None:
    generator = torch.Generator().manual_seed(12)
    stories = [make_story(PLAIN, 20, generator) for _ in range(2)]
    stories[0].query[:, 10:] = 3e38
    found = Pool(backend, PLAIN, 16, torch.float32).step(stories, [(0, 0, 20), (1, 0, 20)])
    assert_close(found[0][:10], dense(PLAIN, stories[0])[:10])
    assert_close(found[1], dense(PLAIN, stories[1]))


def test_sequences_without_rows_are_passed_over(backend: AttentionBackend) -> None:
    story = make_story(PLAIN, 20, torch.Generator().manual_seed(13))
    pool = Pool(backend, PLAIN, 16, torch.float32)
    first, nothing, second = pool.step([story, story], [(0, 0, 20), (1, 0, 0), (1, 0, 20)])
    assert nothing.shape[0] == 0
    assert torch.equal(first, second)


def test_decode_of_many_sequences_is_cut_into_bounded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.attention.torch_paged._CPU_POSITIONS", 100)
    monkeypatch.setattr("workers.engine.attention.torch_paged._MAX_MASK_CELLS", 300)
    generator = torch.Generator().manual_seed(14)
    stories = [make_story(PLAIN, n, generator) for n in (20, 140, 3, 60, 33)]
    plan = [[(s, 0, story.length - 1) for s, story in enumerate(stories)]]
    plan.append([(s, story.length - 1, story.length) for s, story in enumerate(stories)])
    found = run_all(Pool(TorchPagedAttention(), PLAIN, 16, torch.float32), stories, plan, None)
    for story, rows in zip(stories, found, strict=True):
        assert_close(rows, dense(PLAIN, story))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_torch_serves_other_dtypes(dtype: torch.dtype) -> None:
    story = make_story(GEMMA, 60, torch.Generator().manual_seed(15), dtype)
    found = Pool(TorchPagedAttention(), GEMMA, 16, dtype).step([story], [(0, 0, 60)])[0]
    tolerance = 1e-3 if dtype == torch.float16 else 1e-12
    torch.testing.assert_close(found.double(), dense(GEMMA, story), rtol=tolerance, atol=tolerance)


def test_attend_needs_a_step(backend: AttentionBackend) -> None:
    cache = backend.allocate(PLAIN, 2, 16, torch.float32, "cpu")
    story = make_story(PLAIN, 1, torch.Generator())
    with pytest.raises(RuntimeError, match="attend before begin"):
        backend.attend(PLAIN, cache, story.query[None], story.key[None], story.value[None])


def packed(starts: list[int], cached: list[int], tables: list[list[int]], page_size: int = 16) -> PackedRows:
    return PackedRows(*(np.array(a, np.int32) for a in (starts, cached, tables)), page_size)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (packed([0, 1, 2], [0], [[1]]), "disagree"),
        (packed([0, 2, 1], [0, 0], [[1], [2]]), "disagree"),
        (packed([0, 17], [0], [[1]]), "more positions than its page table"),
        (packed([0, 1], [16], [[1]]), "more positions than its page table"),
        (packed([0, 1], [-1], [[1]]), "negative position"),
        (packed([0, 1], [0], [[-1]]), "negative position or page"),
    ],
)
def test_the_kernel_is_never_given_a_step_that_points_outside(
    cpu: CpuPagedAttention, rows: PackedRows, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.begin(rows)


def test_the_kernel_is_never_given_tensors_of_other_shapes(cpu: CpuPagedAttention) -> None:
    story = make_story(PLAIN, 3, torch.Generator())
    query, key, value = story.query[None], story.key[None], story.value[None]
    cache = cpu.allocate(PLAIN, 2, 16, torch.float32, "cpu")
    cpu.begin(packed([0, 3], [0], [[1]]))
    with pytest.raises(ValueError, match=r"expected \(1, 2, 3, 64\)"):
        cpu.attend(PLAIN, cache, query, key[:, :, :2], value)
    with pytest.raises(ValueError, match=r"expected \(2, 2, 1, 64, 16\)"):
        cpu.attend(PLAIN, cpu.allocate(PLAIN, 2, 4, torch.float32, "cpu"), query, key, value)
    scattered = LayerCache(cache.keys.transpose(3, 4).contiguous().transpose(3, 4), cache.values)
    with pytest.raises(ValueError, match="not in one piece"):
        cpu.attend(PLAIN, scattered, query, key, value)
    with pytest.raises(ValueError, match="expected 6 sinks"):
        cpu.attend(PLAIN, cache, query, key, value, torch.zeros(2))
    cpu.begin(packed([0, 3], [0], [[2]]))
    with pytest.raises(ValueError, match="page 2 is past the cache's 2 pages"):
        cpu.attend(PLAIN, cache, query, key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_kv_heads": 4}, "cannot be grouped"), ({"sliding_window": 0}, "window"), ({"softcap": 0.0}, "capped")],
)
def test_a_layer_that_makes_no_sense_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **change)  # type: ignore[arg-type]
