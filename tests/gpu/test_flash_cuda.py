"""The installed attention functions on CUDA, against plain torch. Run by `make test-gpu` where there is a device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.test_attention import PLAIN, make_story, ragged_plan
from tests.unit.test_flash_attention import FlashPool, Uploading
from workers.engine.attention.cuda import choose
from workers.engine.attention.flash import FlashPagedAttention, decode_rows
from workers.engine.attention.flash_functions import FlashFunctions
from workers.engine.attention.flash_search import find_functions
from workers.engine.attention.flash_trial import fault, without_waiting
from workers.engine.attention.interface import AttentionBackend, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

CUDA = torch.device("cuda")
TOLERANCE = 0.06
SPECS = {
    "Llama 3.1 8B": LayerSpec(0, num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128, scaling=128**-0.5),
    "Qwen3 0.6B": LayerSpec(0, num_heads=16, num_kv_heads=8, head_dim=128, value_dim=128, scaling=128**-0.5),
    "one key/value head a head": LayerSpec(0, num_heads=8, num_kv_heads=8, head_dim=64, value_dim=64, scaling=0.125),
    "small heads": LayerSpec(0, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, scaling=0.3),
    "a window": LayerSpec(0, 32, 8, 128, 128, 128**-0.5, sliding_window=400),
    "Gemma 2": LayerSpec(0, 8, 4, 256, 256, 0.0625, sliding_window=300, softcap=50.0),
}


def usable(spec: LayerSpec) -> list[FlashFunctions]:
    """Those that are installed, serve the layer and pass the trial."""
    finds = list(find_functions(CUDA))
    missing = [found.missing for found in finds if found.missing is not None]
    named = []
    for functions in (functions for found in finds for functions in found.functions):
        reason = functions.refuses(spec, torch.bfloat16) or fault(
            functions, spec, torch.bfloat16, functions.page_size, CUDA
        )
        print(f"{functions.name}: {reason or 'is usable'}")
        named += [functions] if reason is None else []
    if not named:
        pytest.skip("no attention functions for this layer: " + "; ".join(missing))
    return named


class OnDevice(Uploading):
    def begin(self, rows: PackedRows) -> None:
        self.backend.begin(rows, [torch.from_numpy(array).to(CUDA) for array in self.backend.host_arrays(rows)])


class CudaPool(FlashPool):
    def __init__(self, backend: AttentionBackend, spec: LayerSpec, page_size: int, seed: int) -> None:
        super().__init__(OnDevice(backend), spec, page_size, torch.bfloat16, seed)  # type: ignore[arg-type]
        self.cache = backend.allocate(spec, len(self.cache.keys), page_size, torch.bfloat16, CUDA)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)

    def strided(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(CUDA) for tensor in super().strided(*tensors))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_give_what_plain_torch_gives(name: str, seed: int) -> None:
    spec, generator = SPECS[name], torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    for functions in usable(spec):
        lengths = rng.integers(1, 700, 3).tolist()
        stories = [make_story(spec, n, generator, torch.bfloat16) for n in lengths]
        ours = CudaPool(FlashPagedAttention(functions), spec, functions.page_size, seed)
        plain = CudaPool(TorchPagedAttention(), spec, functions.page_size, seed)
        for step in ragged_plan(lengths, rng):
            for found, wanted in zip(ours.step(stories, step), plain.step(stories, step), strict=True):
                assert float((found.float() - wanted.float()).abs().max()) <= TOLERANCE, functions.name


@pytest.mark.parametrize("window", [None, 300])
def test_a_captured_decode_step_serves_later_ones(window: int | None) -> None:
    spec = replace(SPECS["Llama 3.1 8B"], sliding_window=window)
    generator = torch.Generator().manual_seed(5)
    stories = [make_story(spec, n, generator, torch.bfloat16) for n in (620, 40, 257)]
    for functions in usable(spec):
        size = functions.page_size
        pages, plain = (
            CudaPool(backend, spec, size, 0) for backend in (FlashPagedAttention(functions), TorchPagedAttention())
        )
        for pool in (pages, plain):
            pool.step(stories, [(s, 0, story.length - 3) for s, story in enumerate(stories)])
        backend, empty = FlashPagedAttention(functions), decode_rows(4, -(-620 // size), size)
        fixed = [torch.from_numpy(array).to(CUDA) for array in backend.decode_arrays(empty, 4, empty.tables.shape[1])]
        inputs = [
            torch.zeros(1, heads, 4, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        backend.begin(empty, fixed)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            backend.attend(spec, pages.cache, *inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = backend.attend(spec, pages.cache, *inputs)
        for back in (3, 2, 1):
            parts = [(s, story.length - back, story.length - back + 1) for s, story in enumerate(stories)]
            filled = backend.decode_arrays(pages.rows(parts), 4, empty.tables.shape[1])
            for array, new in zip(fixed, filled, strict=True):
                array.copy_(torch.from_numpy(new))
            for tensor, kind in zip(inputs, ("query", "key", "value"), strict=True):
                tensor[0, :, :3] = torch.stack([getattr(s, kind)[:, -back] for s in stories], dim=1).to(CUDA)
            graph.replay()
            for row, wanted in enumerate(plain.step(stories, parts)):
                assert float((out[0, row].float() - wanted[0].float()).abs().max()) <= TOLERANCE, functions.name
            assert not out[0, 3].any()


@pytest.mark.parametrize("mixed", [False, True])
def test_no_step_waits_for_the_device(mixed: bool) -> None:
    choice = choose(CUDA, torch.bfloat16, [PLAIN])
    backend = choice.backend
    if isinstance(backend, TorchPagedAttention):
        pytest.skip(choice.notes[0][1])
    counts = [1, 40, 1] if mixed else [1, 1, 1]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    tables = np.arange(1, 1 + 3 * 4, dtype=np.int32).reshape(3, 4)
    rows = PackedRows(starts, np.array([5, 0, 15], np.int32), tables, backend.page_size)
    cache = backend.allocate(PLAIN, 13, backend.page_size, torch.bfloat16, CUDA)
    shape = (1, PLAIN.num_kv_heads, rows.num_rows, PLAIN.head_dim)
    asked = [
        torch.randn(1, PLAIN.num_heads, rows.num_rows, PLAIN.head_dim, dtype=torch.bfloat16, device=CUDA),
        torch.randn(shape, dtype=torch.bfloat16, device=CUDA),
        torch.randn(shape, dtype=torch.bfloat16, device=CUDA),
    ]
    arrays = [torch.from_numpy(array).to(CUDA) for array in backend.host_arrays(rows)]
    with without_waiting(CUDA):
        backend.begin(rows, arrays)
        out = backend.attend(PLAIN, cache, *asked)
    assert out.isfinite().all()
