"""Attention functions of other packages, each behind one signature of ours, with what it can and cannot do as data.

What is known of them from their sources, and kept true here:
- Pages are read in blocks of keys. Past a sequence's length values count as zero; a block's beginning, before a
  window, is read as it lies there and weighs nothing, so it has to hold numbers. `flash_rows` sees to that; see
  `page_multiple`, `largest_page` and `crosses_pages`.
- None of these calls makes the host wait for the device, but for `flash_attn_with_kvcache` in some versions of
  flash-attn (2.8.4), which compares lengths and page table there. The trial finds out, and the other is next.
- torch's `varlen_attn` loses rows where it splits the keys of paged sequences (pytorch issue 194167): it may not split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workers.engine.attention.interface import LayerSpec

HALVES = frozenset({torch.float16, torch.bfloat16})
ALL_SEEN = (-1, -1)  # a window without bounds


@dataclass(frozen=True, slots=True)
class FlashRows:
    """Sequences that attend in one call, over packed queries [N, Hq, D]. The tensors lie on the device.

    Sequence s owns the queries ``starts[s]:starts[s + 1]``, the last of its ``lengths[s]`` positions. A length of 0
    stands for a row that sees nothing and whose result nobody reads.
    """

    starts: torch.Tensor  # [S + 1] int32
    lengths: torch.Tensor  # [S] int32
    ends: torch.Tensor  # [S + 1] int32, sums of the lengths
    tables: torch.Tensor  # [S, W] int32
    most_rows: int  # of a sequence
    longest: int  # no length is over this


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FlashRows, "LayerSpec"], torch.Tensor]
"""Queries [N, Hq, D], pages of keys and values [pages, page_size, Hkv, D], rows, layer -> [N, Hq, Dv]."""


def _no_other(head_dim: int, value_dim: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class FlashFunctions:
    """A pair of functions: ``decode`` for sequences with one row each, ``prefill`` for any number of rows."""

    name: str
    decode: Attend
    prefill: Attend
    page_size: int  # what it is best at
    page_multiple: int
    largest_page: int | None = None
    crosses_pages: bool = False  # a block of keys may reach into the page before
    dtypes: frozenset[torch.dtype] = HALVES
    largest_head: int = 256
    has_softcap: bool = True
    other_value_dims: Callable[[int, int], bool] = _no_other

    def refuses_pages(self, page_size: int) -> str | None:
        """Why pages of so many tokens are not for it."""
        if page_size % self.page_multiple == 0 and page_size <= (self.largest_page or page_size):
            return None
        most = "" if self.largest_page is None else f", {self.largest_page} at most"
        return f"it takes pages of a multiple of {self.page_multiple} tokens{most}, not of {page_size}"

    def refuses(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """Why it does not serve this layer in this dtype."""
        if dtype not in self.dtypes:
            return f"it does not compute in {_name(dtype)}"
        if spec.has_sinks:
            return "it has no attention sinks"
        if max(spec.head_dim, spec.value_dim) > self.largest_head or spec.head_dim % 8 or spec.value_dim % 8:
            return f"it takes heads of a multiple of 8 up to {self.largest_head}, not of {_heads(spec)}"
        if spec.value_dim != spec.head_dim and not self.other_value_dims(spec.head_dim, spec.value_dim):
            return f"it does not take heads of {_heads(spec)} for keys and values"
        if spec.softcap is not None and not self.has_softcap:
            return "it does not cap scores"
        if self.crosses_pages and spec.sliding_window is not None and spec.sliding_window <= self._widest_page:
            return f"it takes windows of more than {self._widest_page} tokens, not of {spec.sliding_window}"
        return None

    @property
    def _widest_page(self) -> int:
        return self.largest_page or self.page_size


def flash_attn_2(module: Any) -> FlashFunctions | None:
    """The package flash-attn, version 2: decode rows by `flash_attn_with_kvcache`. None if it has no page tables."""
    varlen = flash_attn_2_varlen(module)
    if varlen is None or not _takes(getattr(module, "flash_attn_with_kvcache", None), "block_table", "softcap"):
        return None
    function = module.flash_attn_with_kvcache

    def decode(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FlashRows, spec: LayerSpec
    ) -> torch.Tensor:
        out: torch.Tensor = function(
            query[:, None],  # [S, 1, Hq, D]
            keys,
            values,
            cache_seqlens=rows.lengths,
            block_table=rows.tables,
            softmax_scale=spec.scaling,
            causal=True,
            window_size=_window(spec),
            softcap=spec.softcap or 0.0,
        )
        return out[:, 0]

    name = f"flash-attn {_version(module, 'flash-attn')}"
    return FlashFunctions(name, decode, varlen.prefill, page_size=256, page_multiple=256)


def flash_attn_2_varlen(module: Any) -> FlashFunctions | None:
    """The same package, with `flash_attn_varlen_func` for all rows: it never waits for the device."""
    function: Any = getattr(module, "flash_attn_varlen_func", None)
    if not _takes(function, "block_table", "softcap"):
        return None

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FlashRows, spec: LayerSpec
    ) -> torch.Tensor:
        out: torch.Tensor = function(
            query,
            keys,
            values,
            cu_seqlens_q=rows.starts,
            cu_seqlens_k=rows.ends,
            max_seqlen_q=rows.most_rows,
            max_seqlen_k=rows.longest,
            softmax_scale=spec.scaling,
            causal=True,
            window_size=_window(spec),
            softcap=spec.softcap or 0.0,
            block_table=rows.tables,
        )
        return out

    name = f"flash-attn {_version(module, 'flash-attn')} (varlen)"
    return FlashFunctions(name, attend, attend, page_size=256, page_multiple=256)


def flash_attn_3(module: Any) -> FlashFunctions | None:
    """FlashAttention 3, of the module flash_attn_interface. None if its functions do not take page tables.

    Whole blocks are loaded at once where a page holds some, stale slots included; with pages smaller than the smallest
    block (64 keys) each key is loaded by itself, and values past the length count as zero.
    """
    function: Any = getattr(module, "flash_attn_with_kvcache", None)
    if not _takes(function, "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softcap"):
        return None

    def call(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: FlashRows,
        spec: LayerSpec,
        **packed: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = function(
            query,
            keys,
            values,
            cache_seqlens=rows.lengths,
            page_table=rows.tables,
            softmax_scale=spec.scaling,
            causal=True,
            window_size=_window(spec),
            softcap=spec.softcap or 0.0,
            **packed,
        )
        return out

    def decode(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FlashRows, spec: LayerSpec
    ) -> torch.Tensor:
        return call(query[:, None], keys, values, rows, spec)[:, 0]

    def prefill(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FlashRows, spec: LayerSpec
    ) -> torch.Tensor:
        return call(query, keys, values, rows, spec, cu_seqlens_q=rows.starts, max_seqlen_q=rows.most_rows)

    def value_dims(head_dim: int, value_dim: int) -> bool:
        return (128 < head_dim <= 192 and 96 < value_dim <= 128) or head_dim <= 64

    return FlashFunctions(
        f"FlashAttention 3 ({_version(module, 'flash_attn_3')})",
        decode,
        prefill,
        page_size=16,
        page_multiple=16,
        largest_page=48,
        crosses_pages=True,
        other_value_dims=value_dims,
    )


def torch_varlen(module: Any) -> FlashFunctions | None:
    """torch's own `varlen_attn`, of the module torch.nn.attention.varlen; None before it took page tables (2.12)."""
    function: Any = getattr(module, "varlen_attn", None)
    if not _takes(function, "block_table", "seqused_k", "num_splits", "enable_gqa"):
        return None

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FlashRows, spec: LayerSpec
    ) -> torch.Tensor:
        window = _window(spec)
        if window == ALL_SEEN and rows.most_rows > 1:  # for one row, the last one, it is the same, and faster
            window = (-1, 0)
        out: torch.Tensor = function(
            query,
            keys,
            values,
            rows.starts,
            rows.ends,
            rows.most_rows,
            rows.longest,
            scale=spec.scaling,
            window_size=window,
            enable_gqa=True,
            seqused_k=rows.lengths,
            block_table=rows.tables,
            num_splits=1,
        )
        return out

    name = f"torch {torch.__version__}'s varlen_attn"
    return FlashFunctions(name, attend, attend, page_size=256, page_multiple=256, has_softcap=False)


def _window(spec: LayerSpec) -> tuple[int, int]:
    """Positions before and behind a row that it sees beside its own."""
    return ALL_SEEN if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def _takes(function: Any, *names: str) -> bool:
    if function is None:
        return False
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin, which tells nothing
        return False
    return all(name in known for name in names)


def _version(module: Any, package: str) -> str:
    try:
        return str(getattr(module, "__version__", None) or metadata.version(package))
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _heads(spec: LayerSpec) -> str:
    return f"{spec.head_dim}" if spec.head_dim == spec.value_dim else f"{spec.head_dim} and {spec.value_dim}"
