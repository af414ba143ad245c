"""The keys and values themselves: page tensors, shared by groups of layers.

Layers with the same window form groups of at most ``group_size`` layers, and every group uses the same ``group_size``
page tensors: a page holds ``page_size`` tokens for the layers of one group. So full and sliding layers draw on one
pool, and what a sliding layer lets go of serves a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workers.engine.attention.interface import LayerCache, LayerSpec

if TYPE_CHECKING:
    from workers.engine.attention.interface import AttentionBackend

MAX_GROUPS = 8  # each group costs the host a page table more in every step


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a page table. ``layers`` are indices into the model's layers; the window is in tokens."""

    window: int | None
    layers: tuple[int, ...]


def group_layers(specs: Sequence[LayerSpec]) -> list[LayerGroup]:
    """Layers by window, in groups of nearly the same size; one group for all if their keys or values differ in shape.

    The group size follows the rarest kind of layer, whose pages would be padded otherwise.
    """
    by_window: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        by_window.setdefault(spec.sliding_window, []).append(index)
    if len({(s.num_kv_heads, s.head_dim, s.value_dim) for s in specs}) > 1:
        widest = None if None in by_window else max(w for w in by_window if w is not None)
        return [LayerGroup(widest, tuple(range(len(specs))))]
    size = max(min(map(len, by_window.values())), -(-len(specs) // MAX_GROUPS))
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in by_window.items()
        for first in range(0, len(layers), size)
    ]


class KVCache:
    """Page tensors on the device. ``layer(i)`` is what layer i reads and writes."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        groups: Sequence[LayerGroup],
        backend: AttentionBackend,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        first = max(groups, key=lambda group: len(group.layers))
        self._buffers = [backend.allocate(specs[layer], num_pages, page_size, dtype, device) for layer in first.layers]
        self._buffer_of = {layer: index for group in groups for index, layer in enumerate(group.layers)}

    def layer(self, index: int) -> LayerCache:
        return self._buffers[self._buffer_of[index]]

    def release(self) -> None:
        """Let go of the memory."""
        self._buffers = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All page tensors, keys and values in turn; the first axis of each is the page."""
        return [tensor for buffer in self._buffers for tensor in (buffer.keys, buffer.values)]

    @property
    def page_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self.tensors)


def page_bytes(specs: Sequence[LayerSpec], groups: Sequence[LayerGroup], page_size: int, dtype: torch.dtype) -> int:
    """What one page will take, before any is allocated (a backend may round a little up)."""
    first = max(groups, key=lambda group: len(group.layers))
    sizes = (specs[layer].num_kv_heads * (specs[layer].head_dim + specs[layer].value_dim) for layer in first.layers)
    return sum(sizes) * page_size * dtype.itemsize
