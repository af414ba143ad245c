"""Paged attention in plain torch: every device, every dtype, every layer. The reference, and the fallback.

Kept true here:
- Scores, softmax and sums are float32 (float64 for a float64 cache), whatever the dtype of the cache.
- Keys and values are gathered by position, from a layer's window to the sequence's last row. Padding repeats that last
  position, so a stale slot is never read: masking alone would not do, since 0 * NaN is NaN.
- Decode rows (one row a sequence) share a few padded calls; a prefill chunk has calls of its own. No mask ever spans
  two sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.attention.interface import DEFAULT_PAGE_SIZE, LayerCache, LayerSpec, PackedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    _Group = tuple[NDArray[np.int64], int, int]  # sequences, and the rows `first .. first + count` of each

# Positions gathered by one decode call, padding included: on a CPU what its caches hold, elsewhere what memory holds.
_CPU_POSITIONS, _OTHER_POSITIONS = 1 << 12, 1 << 18
_MAX_MASK_CELLS = 1 << 22  # rows x positions of one prefill call


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that attend together: B sequences with N rows each over L gathered positions."""

    rows: torch.Tensor  # [B * N] int64, indices into the packed row
    slots: torch.Tensor  # [B, L] int64, indices into the flattened cache
    mask: torch.Tensor  # [B, N, L] bool, True where the row sees the position


class TorchPagedAttention:
    """The torch backend. Caches are [num_pages, page_size, Hkv, D]."""

    name = "torch"
    page_size = DEFAULT_PAGE_SIZE

    def __init__(self) -> None:
        self._rows: PackedRows | None = None
        self._slots: torch.Tensor | None = None  # [T], where each row's key and value go
        self._calls: dict[int | None, list[_Call]] = {}  # by window

    def allocate(
        self, spec: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        """Make a layer's pages; see `AttentionBackend.allocate`."""
        shape = (num_pages, page_size, spec.num_kv_heads)
        return LayerCache(
            keys=torch.zeros((*shape, spec.head_dim), dtype=dtype, device=device),
            values=torch.zeros((*shape, spec.value_dim), dtype=dtype, device=device),
        )

    def host_arrays(self, rows: PackedRows) -> list[NDArray[Any]]:
        """None: what a window needs follows on first use."""
        return []

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None:
        """Remember the step; index tensors follow on first use, one set for each window among the layers."""
        self._rows = rows
        self._slots = None
        self._calls = {}

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
        rows = self._rows
        if rows is None:
            raise RuntimeError("attend before begin: no packed step is known")
        keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)  # [pages * page_size, Hkv, D]
        self._write(rows, keys, key)
        self._write(rows, values, value)
        out = query.new_empty(1, rows.num_rows, spec.num_heads, spec.value_dim)
        packed = query[0].transpose(0, 1)  # [T, Hq, D]
        for call in self._calls_for(rows, spec.sliding_window, query.device):
            out[0].index_copy_(0, call.rows, _attend_call(call, spec, packed, keys, values, sinks))
        return out

    def _write(self, rows: PackedRows, flat_cache: torch.Tensor, new: torch.Tensor) -> None:
        if self._slots is None:
            self._slots = torch.from_numpy(row_slots(rows)).to(flat_cache.device)
        flat_cache.index_copy_(0, self._slots, new[0].transpose(0, 1).to(flat_cache.dtype))

    def _calls_for(self, rows: PackedRows, window: int | None, device: torch.device) -> list[_Call]:
        if window not in self._calls:
            positions = _CPU_POSITIONS if device.type == "cpu" else _OTHER_POSITIONS
            groups = _decode_groups(rows, window, positions) + _prefill_groups(rows)
            self._calls[window] = [_make_call(rows, window, device, *group) for group in groups]
        return self._calls[window]


def row_slots(rows: PackedRows) -> NDArray[np.int64]:
    """Where each packed row's key and value go: page * page_size + place in the page, [T]."""
    counts = np.diff(rows.starts)
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(rows.num_rows) - rows.starts[owners] + rows.cached[owners]
    return _slots_at(rows, owners, positions)


def _slots_at(rows: PackedRows, owners: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    pages = rows.tables[owners, positions // rows.page_size].astype(np.int64)
    return pages * rows.page_size + positions % rows.page_size


def _decode_groups(rows: PackedRows, window: int | None, positions: int) -> list[_Group]:
    """Sequences with one row, in groups of like length that gather at most so many positions, or one sequence's."""
    decoding = np.flatnonzero(np.diff(rows.starts) == 1)
    lengths = rows.cached[decoding].astype(np.int64) + 1
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while order.size:
        longest = int(min(lengths[order[0]], window or lengths[order[0]]))
        size = max(1, positions // longest)
        groups.append((decoding[order[:size]], 0, 1))
        order = order[size:]
    return groups


def _prefill_groups(rows: PackedRows) -> list[_Group]:
    """One sequence with many rows at a time; very long chunks in pieces, so that masks stay bounded."""
    groups = []
    for owner in np.flatnonzero(np.diff(rows.starts) > 1).tolist():
        count = int(rows.starts[owner + 1] - rows.starts[owner])
        piece = max(1, _MAX_MASK_CELLS // int(rows.cached[owner] + count))
        groups += [(np.array([owner]), first, min(piece, count - first)) for first in range(0, count, piece)]
    return groups


def _make_call(
    rows: PackedRows, window: int | None, device: torch.device, owners: NDArray[np.int64], first: int, count: int
) -> _Call:
    """Rows `first .. first + count` of each owner, and the positions from the earliest that they see."""
    indices = rows.starts[owners, None].astype(np.int64) + first + np.arange(count)  # [B, N]
    at = rows.cached[owners, None].astype(np.int64) + first + np.arange(count)  # [B, N], position of each row
    lowest = np.maximum(at - window + 1, 0) if window else np.zeros_like(at)  # [B, N]
    length = int((at[:, -1] + 1 - lowest[:, 0]).max())
    seen = lowest[:, :1] + np.arange(length)  # [B, L]
    slots = _slots_at(rows, owners[:, None], np.minimum(seen, at[:, -1:]))
    mask = (seen[:, None] <= at[:, :, None]) & (seen[:, None] >= lowest[:, :, None])  # [B, N, L]
    return _Call(*(torch.from_numpy(array).to(device) for array in (indices.reshape(-1), slots, mask)))


def _attend_call(
    call: _Call,
    spec: LayerSpec,
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One call's rows: packed [T, Hq, D], keys and values [pages * page_size, Hkv, D] -> [B * N, Hq, Dv]."""
    exact = torch.promote_types(keys.dtype, torch.float32)
    grouped = (-1, spec.num_kv_heads, spec.group_size, spec.head_dim)
    query = packed[call.rows].to(exact).view(grouped)  # [B * N, Hkv, G, D]
    key, value = _gather(keys, call, exact), _gather(values, call, exact)  # [B, Hkv, L, D]
    sink = None if sinks is None else sinks.to(exact).view(spec.num_kv_heads, spec.group_size, 1)
    if call.mask.shape[1] == 1:  # decode: a group's heads are the rows of one small product
        out = _softmax_attention(spec, query, key, value, call.mask[:, None], sink)  # [B, Hkv, G, Dv]
    else:  # a prefill chunk: B is 1, and a group's heads share keys and values
        shape = (-1, spec.group_size, -1, -1)
        # What is not finite must spoil only the rows that see it; in the others, 0 * NaN would be NaN too.
        spoilt = ~(key[0].isfinite().all(-1) & value[0].isfinite().all(-1))  # [Hkv, L]
        key, value = (t[0].masked_fill(spoilt[..., None], 0.0)[:, None].expand(shape) for t in (key, value))
        sink = None if sink is None else sink[..., None]
        out = _softmax_attention(spec, query.permute(1, 2, 0, 3), key, value, call.mask[:, None], sink)
        sees_spoilt = (call.mask & spoilt[:, None]).any(-1)  # [Hkv, N]
        out = out.masked_fill(sees_spoilt[:, None, :, None], torch.nan)  # [Hkv, G, N, Dv]
        out = out.permute(2, 0, 1, 3)  # [N, Hkv, G, Dv]
    return out.flatten(1, 2).to(packed.dtype)


def _gather(flat_cache: torch.Tensor, call: _Call, dtype: torch.dtype) -> torch.Tensor:
    """[pages * page_size, Hkv, D] -> [B, Hkv, L, D]."""
    found = flat_cache.index_select(0, call.slots.view(-1)).view(*call.slots.shape, *flat_cache.shape[1:])
    return found.transpose(1, 2).to(dtype)


def _softmax_attention(
    spec: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [.., .., R, D] queries over [.., .., L, D] keys; a sink broadcasts to [.., .., R, 1]."""
    if spec.softcap is None and sink is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scaling)
    scores = query @ key.transpose(-1, -2) * spec.scaling  # [.., .., R, L]
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)
    return weights[..., : key.shape[-2]] @ value
