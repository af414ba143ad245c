"""Stand-ins, in plain torch, for the attention functions of other packages: their documented signatures, what they
refuse, and how they read pages.

They read keys and values in blocks, as the kernels do: past a sequence's length values count as zero, unless the kernel
loads whole blocks; a masked key weighs nothing, but nothing times NaN is NaN. So an adapter that lets a kernel come
upon stale slots shows here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from workers.engine.attention.flash_functions import (
    FlashFunctions,
    flash_attn_2,
    flash_attn_2_varlen,
    flash_attn_3,
    torch_varlen,
)

ROWS_OF_A_BLOCK = 64


@dataclass(frozen=True)
class Kernel:
    """``block`` keys are read at once, of the head size given; ``whole`` ones where a page holds some."""

    block: Callable[[int], int]
    page_multiple: int
    whole: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    same_dims: bool = True

    def __call__(
        self,
        query: torch.Tensor,  # [N, Hq, D]
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        starts: torch.Tensor,  # [S + 1]
        lengths: torch.Tensor,  # [S]
        tables: torch.Tensor,
        most_rows: int,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
        causal: bool,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self._check(query, keys, values, tables, lengths)
        counts = starts.diff().tolist()
        assert len(counts) == len(lengths) == len(tables)
        assert int(starts[-1]) == len(query)
        assert max(counts) <= most_rows
        assert int(lengths.max()) <= longest <= tables.shape[1] * keys.shape[1]
        out = torch.full((*query.shape[:2], values.shape[3]), torch.nan, dtype=query.dtype)  # as memory that nobody set
        scale = query.shape[2] ** -0.5 if scale is None else scale
        left, right = window[0], 0 if causal else window[1]
        for count, start, length, table in zip(counts, starts.tolist(), lengths.tolist(), tables, strict=False):
            for first in range(0, count, ROWS_OF_A_BLOCK):
                rows = slice(start + first, start + min(first + ROWS_OF_A_BLOCK, count))
                at = torch.arange(rows.stop - rows.start) + first + length - count
                span = self._span(at, length, left, query.shape[2], keys.shape[1])
                key, value = self._read(keys, table, *span, length), self._read(values, table, *span, length)
                seen = torch.arange(*span)
                mask = (seen < length) & (seen <= at[:, None] + right if right >= 0 else torch.tensor(True))
                mask = mask & (seen >= at[:, None] - left if left >= 0 else torch.tensor(True))
                out[rows] = _attention(query[rows], key, value, mask.expand(len(at), len(seen)), scale, softcap)
        return out

    def _span(self, at: torch.Tensor, length: int, left: int, head_dim: int, page_size: int) -> tuple[int, int]:
        """First key that is loaded, and the end: whole blocks, from the one of the first key that is seen."""
        block = self.block(head_dim)
        lowest = max(0, int(at[0]) - left) if left >= 0 else 0
        return lowest // block * block, -(-length // block) * block

    def _read(self, pages: torch.Tensor, table: torch.Tensor, first: int, end: int, length: int) -> torch.Tensor:
        """[end - first, H, D]; zeros past the length, unless whole blocks are loaded."""
        size = pages.shape[1]
        whole = self.whole and size % self.block(pages.shape[3]) == 0
        at = torch.arange(first, end)
        page = table.long()[(at // size).clamp(max=len(table) - 1)]
        read = pages[page, at % size]
        return read if whole else read.masked_fill((at >= length)[:, None, None], 0.0)

    def _check(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        _require(query.dtype in self.dtypes, f"only fp16 and bf16 data type, not {query.dtype}")
        _require(keys.dtype == values.dtype == query.dtype, "query, key and value must have the same dtype")
        _require(all(t.stride(-1) == 1 for t in (query, keys, values)), "contiguous last dimension")
        _require(query.dim() == 3 and keys.dim() == values.dim() == 4, "shapes")
        _require(keys.shape[:3] == values.shape[:3], "pages of keys and values must have the same shape")
        _require(query.shape[1] % keys.shape[2] == 0, "number of heads must divide")
        _require(query.shape[2] == keys.shape[3], "head size of queries and keys")
        _require(not self.same_dims or keys.shape[3] == values.shape[3], "head size of keys and values")
        _require(query.shape[2] <= 256 and query.shape[2] % 8 == 0, f"head size {query.shape[2]}")
        _require(keys.shape[1] % self.page_multiple == 0, f"page size must be divisible by {self.page_multiple}")
        for array in (tables, lengths):
            _require(array.dtype == torch.int32 and array.is_contiguous(), "int32, contiguous")
        _require(int(tables.min()) >= 0 and int(tables.max()) < len(keys), "page table")


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """query [N, Hq, D], key and value [L, Hkv, D], mask [N, L] -> [N, Hq, Dv]; rows that see nothing are zero."""
    if not key.shape[0]:
        return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    key, value = (t.float().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(mask, scores, -torch.inf)
    weights = scores.softmax(-1)
    weights = torch.where(mask.any(-1)[:, None], weights, 0.0)
    return torch.einsum("hnl,lhd->nhd", weights, value).to(query.dtype)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _lengths(ends: torch.Tensor) -> torch.Tensor:
    assert ends.dtype == torch.int32
    return ends.diff()


def _one_each(query: torch.Tensor) -> torch.Tensor:
    _require(query.dim() == 4 and query.shape[1] == 1, "queries of one row each here")
    return torch.arange(len(query) + 1, dtype=torch.int32)


KERNEL_2 = Kernel(lambda head_dim: 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64, page_multiple=256)
KERNEL_3 = Kernel(lambda head_dim: 128, page_multiple=1, whole=True, same_dims=False)
KERNEL_VARLEN = Kernel(lambda head_dim: 128 if head_dim <= 64 else 64, page_multiple=256)


def module_2(kernel: Kernel = KERNEL_2, *, waits: bool = False) -> SimpleNamespace:
    """As the package flash_attn, version 2; ``waits``: as the versions that wait for the device in one function."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        if waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        out = kernel(
            q[:, 0],
            k_cache,
            v_cache,
            starts=_one_each(q),
            lengths=cache_seqlens,
            tables=block_table,
            most_rows=1,
            longest=block_table.shape[1] * k_cache.shape[1],
            scale=softmax_scale,
            window=window_size,
            causal=causal,
            softcap=softcap,
        )
        return out[:, None]

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        return kernel(
            q,
            k,
            v,
            starts=cu_seqlens_q,
            lengths=_lengths(cu_seqlens_k),
            tables=block_table,
            most_rows=max_seqlen_q,
            longest=max_seqlen_k,
            scale=softmax_scale,
            window=window_size,
            causal=causal,
            softcap=softcap,
        )

    return SimpleNamespace(
        __version__="2.8.3",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


def module_3(kernel: Kernel = KERNEL_3) -> SimpleNamespace:
    """As the module flash_attn_interface, FlashAttention 3."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        is_packed = cu_seqlens_q is not None
        _require(not is_packed or max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        out = kernel(
            q if is_packed else q[:, 0],
            k_cache,
            v_cache,
            starts=cu_seqlens_q if is_packed else _one_each(q),
            lengths=cache_seqlens,
            tables=page_table,
            most_rows=max_seqlen_q if is_packed else 1,
            longest=page_table.shape[1] * k_cache.shape[1],
            scale=softmax_scale,
            window=window_size,
            causal=causal,
            softcap=softcap,
        )
        return out if is_packed else out[:, None]

    return SimpleNamespace(__version__="3.0.0", flash_attn_with_kvcache=flash_attn_with_kvcache)


def module_varlen(kernel: Kernel = KERNEL_VARLEN) -> SimpleNamespace:
    """As torch.nn.attention.varlen of torch 2.12 and later."""

    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        if not enable_gqa and query.size(1) != key.size(2):
            raise ValueError("Expect query and key/value to have the same number of heads")
        assert num_splits == 1, "keys of a paged sequence are split wrongly"
        assert torch.equal(_lengths(cu_seq_k), seqused_k)
        return kernel(
            query,
            key,
            value,
            starts=cu_seq_q,
            lengths=seqused_k,
            tables=block_table,
            most_rows=max_q,
            longest=max_k,
            scale=scale,
            window=window_size,
            causal=window_size == (-1, 0),
        )

    return SimpleNamespace(varlen_attn=varlen_attn)


_MADE: dict[str, tuple[Callable[[Any], FlashFunctions | None], Callable[[Kernel], SimpleNamespace], Kernel]] = {
    "flash-attn 2": (flash_attn_2, module_2, KERNEL_2),
    "flash-attn 2 varlen": (flash_attn_2_varlen, module_2, KERNEL_2),
    "FlashAttention 3": (flash_attn_3, module_3, KERNEL_3),
    "varlen_attn": (torch_varlen, module_varlen, KERNEL_VARLEN),
}
NAMES = tuple(_MADE)


def stand_in(name: str, *, exact: bool = False, page: int | None = None) -> FlashFunctions:
    """Our functions on a stand-in.

    Args:
        exact: They compute in float32 too.
        page: They take pages of a multiple of so many tokens, and read blocks of as many keys.
    """
    make, module, kernel = _MADE[name]
    if exact:
        kernel = replace(kernel, dtypes=(*kernel.dtypes, torch.float32))
    if page is not None:
        kernel = replace(kernel, block=lambda head_dim: page, page_multiple=page)
    functions = make(module(kernel))
    assert functions is not None
    if page is not None:
        functions = replace(functions, page_size=page, page_multiple=page)
    return replace(functions, dtypes=frozenset(kernel.dtypes))
