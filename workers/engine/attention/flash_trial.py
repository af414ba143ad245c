"""A short trial of attention functions, on the device and with a layer's own shapes, before anything relies on them.

A package can be built for other devices, without some head sizes, or have a fault of its own; one can make the host
wait. What was read of a kernel's source holds for the version that was read. So a small step runs through them and
through plain torch, over pages whose stale slots, and the null page, hold what is not a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from workers.engine.attention.flash import FlashPagedAttention, decode_rows
from workers.engine.attention.flash_functions import FlashFunctions
from workers.engine.attention.interface import LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention, row_slots

MOST_SEEN = 4096  # tokens; of a wider window only the beginning is tried
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of values that are drawn from a normal distribution
COARSE_TOLERANCE = 0.06  # in float16 and bfloat16
WAITS = "called a synchronizing CUDA operation"  # what torch says then


def fault(
    functions: FlashFunctions, spec: LayerSpec, dtype: torch.dtype, page_size: int, device: torch.device
) -> str | None:
    """What is wrong with them for such a layer; None if nothing is."""
    rows = _rows(spec, page_size)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, size: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, rows.num_rows, size, generator=generator)
        return drawn.to(dtype).to(device)

    cache = _poisoned(spec, rows, dtype, device, generator)
    asked = (
        draw(spec.num_heads, spec.head_dim) / (spec.scaling * spec.head_dim**0.5),
        draw(spec.num_kv_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.value_dim),
    )
    plain = TorchPagedAttention()
    plain.begin(rows)
    wanted = plain.attend(spec, cache, *asked)
    try:
        found = _mixed(functions, spec, cache, rows, asked)
        again, where = _padded(functions, spec, cache, rows, asked)
        pairs = ((found, wanted), (again, wanted[:, where]))
        apart = float(torch.cat([ours.float() - theirs.float() for ours, theirs in pairs], dim=1).abs().max())
    except Exception as error:  # noqa: BLE001 - whatever a foreign package raises
        if WAITS in str(error):
            return "it makes the host wait for the device"
        return f"it fails on this device: {_first_line(error)}"
    if not apart <= TOLERANCE.get(dtype, COARSE_TOLERANCE):
        return f"its results are not those of plain torch (they differ by {apart:.3g})"
    return None


def _mixed(
    functions: FlashFunctions, spec: LayerSpec, cache: LayerCache, rows: PackedRows, asked: Sequence[torch.Tensor]
) -> torch.Tensor:
    """All rows in one step: [1, T, Hq, Dv]."""
    ours, device = FlashPagedAttention(functions), cache.keys.device
    ours.begin(rows, [torch.from_numpy(array).to(device) for array in ours.host_arrays(rows)])
    with without_waiting(device):
        return ours.attend(spec, cache, *asked)


def _padded(
    functions: FlashFunctions, spec: LayerSpec, cache: LayerCache, rows: PackedRows, asked: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decode rows once more, in a step with a padding row: [1, R, Hq, Dv], and which rows they are, [R]."""
    ours, device = FlashPagedAttention(functions), cache.keys.device
    single = np.flatnonzero(np.diff(rows.starts) == 1)
    count, width = len(single), rows.tables.shape[1]
    starts = np.arange(count + 1, dtype=np.int32)
    decode = PackedRows(starts, rows.cached[single], rows.tables[single], rows.page_size)
    arrays = ours.decode_arrays(decode, count + 1, width)
    ours.begin(decode_rows(count + 1, width, rows.page_size), [torch.from_numpy(a).to(device) for a in arrays])
    where = torch.from_numpy(rows.starts[[*single, 0]].astype(np.int64)).to(device)
    padded = [tensor.index_select(2, where) for tensor in asked]
    with without_waiting(device):
        out = ours.attend(spec, cache, *padded)
    return out[:, :count], where[:count]


def _rows(spec: LayerSpec, page_size: int) -> PackedRows:
    """Decode rows and chunks, short and long, in no order; page tables as the engine has them, windows included."""
    window = spec.sliding_window
    far = page_size + 5 + min(window or 0, MOST_SEEN)
    counts = np.array([1, 3, 1, page_size + 2, 1], np.int32)
    cached = np.array([far, far, 0, 0, page_size - 1], np.int32)
    needs = -(-(cached + counts) // page_size)
    tables = np.zeros((len(counts), int(needs.max())), np.int32)
    free = iter(np.random.default_rng(0).permutation(int(needs.sum())) + 1)
    for sequence, needed in enumerate(needs):
        first_seen = 0 if window is None else max(0, int(cached[sequence]) - window + 1) // page_size
        for page in range(first_seen, int(needed)):
            tables[sequence, page] = next(free)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return PackedRows(starts, cached, tables, page_size)


def _poisoned(
    spec: LayerSpec, rows: PackedRows, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> LayerCache:
    """Pages in which the slots before each sequence's rows hold numbers, and no others do."""
    cache = TorchPagedAttention().allocate(spec, int(rows.tables.max()) + 1, rows.page_size, dtype, device)
    starts = np.append(0, np.cumsum(rows.cached)).astype(np.int32)
    slots = row_slots(PackedRows(starts, 0 * rows.cached, rows.tables, rows.page_size))
    where = torch.from_numpy(slots[slots >= rows.page_size]).to(device)  # those of the null page were let go of
    for pages in (cache.keys, cache.values):
        pages.fill_(torch.nan)
        numbers = torch.randn(len(where), *pages.shape[2:], generator=generator)
        pages.flatten(0, 1).index_copy_(0, where, numbers.to(dtype).to(device))
    return cache


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Within it, whatever makes the host wait for the device raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
