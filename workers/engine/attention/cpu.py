"""Paged attention on a CPU by the C++ kernel in `paged_attention.cpp`, called on raw pointers.

Kept true here:
- The kernel never sees a size, stride or page id that was not checked against the tensors it points into.
- Every tensor behind a pointer outlives the call that uses it.
- Layouts: keys [num_pages, Hkv, page_size / lanes, D, lanes] with lanes = 16 where 16 divides the page size, else the
  page size; values [num_pages, Hkv, page_size, Dv rounded up to 16].
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workers.engine.attention.compiler import check_layouts
from workers.engine.attention.interface import DEFAULT_PAGE_SIZE, LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import row_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    _Int32s = NDArray[np.int32]

_LANES = 16  # positions side by side in the keys, and the multiple that a value's length is rounded up to
_MOST = 1 << 13  # heads, and dimensions of one: keeps every product of two in the kernel's 32-bit integers
NO_WINDOW = 2**31 - 1
_FUNCTIONS = {torch.float32: "batchjobs_attend_float32", torch.bfloat16: "batchjobs_attend_bfloat16"}


class Call(ctypes.Structure):
    """Mirrors `Call` in paged_attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "keys", "values", "sinks")),
        *((name, ctypes.c_void_p) for name in ("starts", "cached", "tables", "order", "slots")),
        *((name, ctypes.c_int64) for name in ("query_head", "query_row", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row")),
        *((name, ctypes.c_int32) for name in ("sequences", "rows", "table_width", "page_size")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "value_dim", "value_width")),
        *((name, ctypes.c_int32) for name in ("lanes", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class CpuPagedAttention:
    """The C++ backend, for float32 and bfloat16."""

    name = "cpu"
    page_size = DEFAULT_PAGE_SIZE

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind the functions of a loaded kernel; ValueError if it was built from a source with another `Call`."""
        check_layouts(library, "the attention kernel", call=Call)
        self._functions = {dtype: getattr(library, name) for dtype, name in _FUNCTIONS.items()}
        for function in self._functions.values():
            function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int
        self._rows: PackedRows | None = None
        self._shared = Call()
        self._alive: tuple[object, ...] = ()  # the arrays that `_shared` points into
        self._last_page = 0

    @staticmethod
    def supports(spec: LayerSpec, dtype: torch.dtype) -> bool:
        """Whether the kernel serves this layer in this dtype: any sizes that its own working space can hold."""
        return dtype in _FUNCTIONS and max(spec.num_heads, spec.head_dim, spec.value_dim) <= _MOST

    def allocate(
        self, spec: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        """Make a layer's pages; see `AttentionBackend.allocate`."""
        lanes = _lanes(page_size)
        width = -(-spec.value_dim // _LANES) * _LANES
        shape = (num_pages, spec.num_kv_heads)
        return LayerCache(
            keys=torch.empty((*shape, page_size // lanes, spec.head_dim, lanes), dtype=dtype, device=device),
            values=torch.empty((*shape, page_size, width), dtype=dtype, device=device),
        )

    def host_arrays(self, rows: PackedRows) -> list[NDArray[Any]]:
        """None: the kernel reads the host's own."""
        return []

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None:
        """Check the step and work out where each row goes and which sequences come first."""
        starts, cached, tables = (np.ascontiguousarray(a, np.int32) for a in (rows.starts, rows.cached, rows.tables))
        _check_rows(starts, cached, tables, rows.page_size)
        order = np.lexsort((-cached, -np.diff(starts))).astype(np.int32)
        slots = row_slots(rows)
        step = self._shared
        step.starts, step.cached, step.tables, step.order, step.slots = (
            array.ctypes.data for array in (starts, cached, tables, order, slots)
        )
        step.sequences, step.rows, step.table_width = len(cached), rows.num_rows, tables.shape[1]
        step.page_size, step.lanes = rows.page_size, _lanes(rows.page_size)
        self._rows, self._alive = rows, (starts, cached, tables, order, slots)
        self._last_page = int(tables.max(initial=0))

    def step(self, pages: int) -> Call:
        """The step as the kernel sees it, for layers with so many pages; what belongs to a layer is not filled in."""
        if self._rows is None:
            raise RuntimeError("attend before begin: no packed step is known")
        if self._last_page >= pages:
            raise ValueError(f"page {self._last_page} is past the cache's {pages} pages")
        return self._shared

    def attend(
        self,
        spec: LayerSpec,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend; see `AttentionBackend.attend`."""
        wanted, dtype = query.dtype, cache.keys.dtype
        query, key, value = (_readable(t, dtype) for t in (query, key, value))
        sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
        self._check(spec, cache, query, key, value, sinks)
        out = torch.empty((1, query.shape[2], spec.num_heads, spec.value_dim), dtype=dtype)
        call = self._shared
        call.query, call.key, call.value, call.out = (t.data_ptr() for t in (query, key, value, out))
        call.keys, call.values = cache.keys.data_ptr(), cache.values.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        _, call.query_head, call.query_row, _ = query.stride()
        _, call.key_head, call.key_row, _ = key.stride()
        _, call.value_head, call.value_row, _ = value.stride()
        call.heads, call.kv_heads = spec.num_heads, spec.num_kv_heads
        call.head_dim, call.value_dim, call.value_width = spec.head_dim, spec.value_dim, cache.values.shape[-1]
        call.window = NO_WINDOW if spec.sliding_window is None else min(spec.sliding_window, NO_WINDOW)
        call.scaling, call.softcap = spec.scaling, spec.softcap or 0.0
        call.threads = torch.get_num_threads()
        if self._functions[dtype](ctypes.byref(call)):
            raise MemoryError("no memory for the attention kernel's working space")
        return out.to(wanted)

    def _check(
        self,
        spec: LayerSpec,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        rows = self._rows
        if rows is None:
            raise RuntimeError("attend before begin: no packed step is known")
        count, lanes = rows.num_rows, _lanes(rows.page_size)
        width = -(-spec.value_dim // _LANES) * _LANES
        pages = cache.keys.shape[0]
        expected = (
            (query, (1, spec.num_heads, count, spec.head_dim)),
            (key, (1, spec.num_kv_heads, count, spec.head_dim)),
            (value, (1, spec.num_kv_heads, count, spec.value_dim)),
            (cache.keys, (pages, spec.num_kv_heads, rows.page_size // lanes, spec.head_dim, lanes)),
            (cache.values, (pages, spec.num_kv_heads, rows.page_size, width)),
        )
        for tensor, shape in expected:
            if tensor.shape != shape or tensor.dtype not in _FUNCTIONS or tensor.device.type != "cpu":
                raise ValueError(
                    f"layer {spec.index}: expected {shape} in float32 or bfloat16 on the CPU, "
                    f"got {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
                )
        if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
            raise ValueError(f"layer {spec.index}: the cache's pages are not in one piece")
        if sinks is not None and sinks.shape != (spec.num_heads,):
            raise ValueError(f"layer {spec.index}: expected {spec.num_heads} sinks, got {tuple(sinks.shape)}")
        if self._last_page >= pages:
            raise ValueError(f"layer {spec.index}: page {self._last_page} is past the cache's {pages} pages")


def _readable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the cache's dtype, and with its last axis in one piece; any other stride the kernel can follow."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_rows(starts: _Int32s, cached: _Int32s, tables: _Int32s, page_size: int) -> None:
    counts = np.diff(starts)
    if not len(starts) - 1 == len(cached) == len(tables) or starts[0] != 0 or counts.min(initial=0) < 0:
        raise ValueError("starts, cached and tables of a packed step disagree about its sequences")
    if page_size < 1 or cached.min(initial=0) < 0 or tables.min(initial=0) < 0:
        raise ValueError("a packed step has a page size below one, or a negative position or page")
    if (cached + counts)[counts > 0].max(initial=0) > tables.shape[1] * page_size:
        raise ValueError("a sequence of the packed step has more positions than its page table covers")


def _lanes(page_size: int) -> int:
    return _LANES if page_size % _LANES == 0 else page_size
