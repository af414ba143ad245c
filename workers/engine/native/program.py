"""A decoder as a list of operations over buffers, bound to its weights and pages.

What it keeps true:
- Every size that the kernel will follow was compared with the tensor behind it.
- Pointers are those of the weights as they lay when the program was made: `is_current` tells whether they still do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from workers.engine.attention.cpu import NO_WINDOW
from workers.engine.native.linear import DTYPES
from workers.engine.native.operations import NONE, Kind, Operation, Program

if TYPE_CHECKING:
    from workers.engine.attention.interface import LayerCache, LayerSpec
    from workers.engine.native.decoder import Decoder, DecoderLayer, Matrix, Norm


VALUE_MULTIPLE = 16
"""Of numbers in a value as pages hold it: the kernel reads whole registers."""


class Buffer(IntEnum):
    """What is kept of each row while a step runs. The kept ones have the rows only whose logits are wanted."""

    HIDDEN = 0
    NORMED = 1
    QUERY = 2
    KEY = 3
    VALUE = 4
    ATTENDED = 5
    GATED = 6
    KEPT_HIDDEN = 7
    KEPT_ATTENDED = 8
    LOGITS = 9


class BoundProgram:
    """``widths`` are numbers in a row of each buffer. Every layer has ``pages``, each of ``page_size`` tokens."""

    def __init__(
        self, decoder: Decoder, specs: Sequence[LayerSpec], caches: Sequence[LayerCache], groups: Sequence[int]
    ) -> None:
        """``groups[i]`` says whose page tables layer i uses. ValueError if sizes do not fit together."""
        self._decoder = decoder
        self._dtype = decoder.embedding.dtype
        self._operations: list[Operation] = []
        self._read: list[tuple[torch.Tensor, int]] = []  # what was read, and where it lay
        self._wanted = 0
        self.widths = _widths(decoder, specs)
        self.pages = min(len(pages) for cache in caches for pages in (cache.keys, cache.values))
        self.page_size = caches[0].values.shape[2]
        self._head_dim = specs[0].head_dim  # one width of cosines and sines serves all layers
        self.kinds: list[Kind] = []
        self._embed()
        for layer, spec, cache, group in zip(decoder.layers, specs, caches, groups, strict=True):
            self._layer(layer, spec, cache, group, is_last=layer is decoder.layers[-1])
        self._norm(decoder.norm, self._hidden, Buffer.NORMED)
        self._linear([(decoder.head, Buffer.LOGITS)], Buffer.NORMED)
        if decoder.logit_cap is not None:
            self._add(Kind.CAP, input=Buffer.LOGITS, softcap=decoder.logit_cap)
        self._array = (Operation * len(self._operations))(*self._operations)
        self._width_array = (ctypes.c_int32 * len(Buffer))(*self.widths)
        self.program = Program(
            operations=ctypes.addressof(self._array),
            widths=ctypes.addressof(self._width_array),
            count=len(self._operations),
            buffers=len(Buffer),
            dtype=DTYPES[self._dtype],
            vocabulary=len(decoder.embedding),
        )

    @property
    def is_current(self) -> bool:
        """Whether all weights lie where they lay."""
        return all(tensor.data_ptr() == address for tensor, address in self._read)

    @property
    def _hidden(self) -> Buffer:
        return Buffer.KEPT_HIDDEN if self._wanted else Buffer.HIDDEN

    @property
    def _attended(self) -> Buffer:
        return Buffer.KEPT_ATTENDED if self._wanted else Buffer.ATTENDED

    def _embed(self) -> None:
        table = self._decoder.embedding
        operation = self._add(Kind.EMBED, output=Buffer.HIDDEN, width=self.widths[Buffer.HIDDEN])
        operation.scale = self._decoder.embedding_scale
        operation.part[0].weight, operation.part[0].weight_row = self._address(table), table.stride(0)

    def _layer(self, layer: DecoderLayer, spec: LayerSpec, cache: LayerCache, group: int, *, is_last: bool) -> None:
        self._norm(layer.before_attention, Buffer.HIDDEN, Buffer.NORMED)
        parts = [(layer.query, Buffer.QUERY), (layer.key, Buffer.KEY), (layer.value, Buffer.VALUE)]
        self._linear(parts, Buffer.NORMED)
        self._attention(layer, spec, cache, group)
        if is_last:  # behind it nobody looks at the other rows
            for whole, kept in ((Buffer.ATTENDED, Buffer.KEPT_ATTENDED), (Buffer.HIDDEN, Buffer.KEPT_HIDDEN)):
                self._add(Kind.GATHER, input=whole, output=kept, wanted=1)
            self._wanted = 1
        self._back(layer.output, self._attended, layer.after_attention)
        self._norm(layer.before_mlp, self._hidden, Buffer.NORMED)
        if layer.gate.outputs != layer.up.outputs:
            raise ValueError("gate and up of its MLP differ in size")
        gated = self._linear([(layer.gate, Buffer.GATED), (layer.up, None)], Buffer.NORMED)
        gated.gated, gated.activation = 1, layer.activation
        self._back(layer.down, Buffer.GATED, layer.after_mlp)

    def _attention(self, layer: DecoderLayer, spec: LayerSpec, cache: LayerCache, group: int) -> None:
        if spec.has_sinks:
            raise ValueError("its attention has sinks")
        sizes = {
            Buffer.QUERY: spec.num_heads * spec.head_dim,
            Buffer.KEY: spec.num_kv_heads * spec.head_dim,
            Buffer.VALUE: spec.num_kv_heads * spec.value_dim,
            Buffer.ATTENDED: spec.num_heads * spec.value_dim,
        }
        if spec.head_dim != self._head_dim or any(self.widths[buffer] != size for buffer, size in sizes.items()):
            raise ValueError("its layers have heads of different number or size")
        _check_pages(cache, spec, self.page_size, self._dtype)
        turn = self._add(Kind.ROTATE, input=Buffer.QUERY, output=NONE)
        for index, (buffer, norm) in enumerate(
            ((Buffer.QUERY, layer.query_norm), (Buffer.KEY, layer.key_norm), (Buffer.VALUE, None))
        ):
            turn.part[index].output = buffer
            if norm is not None:
                turn.part[index].weight = self._norm_weight(norm, spec.head_dim)
                turn.epsilon, turn.shift = norm.epsilon, norm.shift
        turn.rotary = NONE if layer.rotary is None else layer.rotary
        attend = self._add(Kind.ATTEND, input=Buffer.QUERY, output=Buffer.ATTENDED)
        for operation in (turn, attend):
            operation.keys, operation.values = cache.keys.data_ptr(), cache.values.data_ptr()
            operation.heads, operation.kv_heads = spec.num_heads, spec.num_kv_heads
            operation.head_dim, operation.value_dim = spec.head_dim, spec.value_dim
            operation.value_width = cache.values.shape[-1]
            operation.window = NO_WINDOW if spec.sliding_window is None else min(spec.sliding_window, NO_WINDOW)
            operation.group = group
            operation.scale, operation.softcap = spec.scaling, spec.softcap or 0.0

    def _back(self, matrix: Matrix, source: Buffer, norm: Norm | None) -> None:
        """A product that is added to the hidden state, normed before where there is a norm."""
        if norm is None:
            self._linear([(matrix, self._hidden)], source).residual = self._hidden
        else:
            self._linear([(matrix, Buffer.NORMED)], source)
            self._norm(norm, Buffer.NORMED, self._hidden).residual = self._hidden

    def _norm(self, norm: Norm, source: Buffer, target: Buffer) -> Operation:
        operation = self._add(Kind.NORM, input=source, output=target)
        operation.part[0].weight = self._norm_weight(norm, self.widths[source])
        operation.epsilon, operation.shift = norm.epsilon, norm.shift
        return operation

    def _linear(self, parts: Sequence[tuple[Matrix, Buffer | None]], source: Buffer) -> Operation:
        operation = self._add(Kind.LINEAR, input=source, output=NONE)
        operation.parts = len(parts)
        for part, (matrix, target) in zip(operation.part, parts, strict=False):
            weight, row = matrix.weight, matrix.weight.stride(0)
            if matrix.inputs != self.widths[source] or (target is not None and matrix.outputs != self.widths[target]):
                raise ValueError(f"a weight [{matrix.outputs}, {matrix.inputs}] does not fit {source.name.lower()}")
            if matrix.first + matrix.outputs > len(weight):
                raise ValueError(f"a weight of {len(weight)} rows has no row {matrix.first + matrix.outputs - 1}")
            part.weight = self._address(weight) + matrix.first * row * weight.itemsize
            part.weight_row = row
            if matrix.bias is not None:
                if matrix.bias.shape != weight.shape[:1]:
                    raise ValueError(f"a bias of {matrix.bias.numel()} numbers does not fit {len(weight)} rows")
                part.bias = self._address(matrix.bias) + matrix.first * matrix.bias.itemsize
            part.output, part.outputs = NONE if target is None else target, matrix.outputs
        return operation

    def _norm_weight(self, norm: Norm, width: int) -> int:
        if norm.weight.shape != (width,):
            raise ValueError(f"a norm of {norm.weight.numel()} numbers does not fit {width}")
        return self._address(norm.weight)

    def _add(
        self, kind: Kind, *, input: Buffer | int = NONE, output: Buffer | int = NONE, **fields: float
    ) -> Operation:
        width = self.widths[input] if input != NONE else 0
        named = {"width": width, "wanted": self._wanted} | fields
        operation = Operation(kind=kind, input=input, output=output, residual=NONE, rotary=NONE, **named)
        for part in operation.part:
            part.output = NONE
        self.kinds.append(kind)
        self._operations.append(operation)
        return operation

    def _address(self, tensor: torch.Tensor) -> int:
        if tensor.dtype != self._dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
            raise ValueError(f"a weight is in {tensor.dtype} on {tensor.device}, not in {self._dtype} in one piece")
        address = tensor.data_ptr()
        self._read.append((tensor, address))
        return address


def _check_pages(cache: LayerCache, spec: LayerSpec, page_size: int, dtype: torch.dtype) -> None:
    """Raises ValueError if a layer's pages are not those that the attention kernel makes for such a layer."""
    lanes, width = cache.keys.shape[-1], cache.values.shape[-1]
    keys = (spec.num_kv_heads, page_size // lanes, spec.head_dim, lanes)
    fits = cache.keys.shape[1:] == keys and cache.values.shape[1:] == (spec.num_kv_heads, page_size, width)
    if not fits or page_size % lanes or width < spec.value_dim or width % VALUE_MULTIPLE:
        raise ValueError(f"the pages of layer {spec.index} do not fit its heads")
    if any(pages.dtype != dtype or not pages.is_contiguous() for pages in (cache.keys, cache.values)):
        raise ValueError(f"the pages of layer {spec.index} are not in {dtype}, or not in one piece")


def _widths(decoder: Decoder, specs: Sequence[LayerSpec]) -> list[int]:
    """Numbers in a row of each buffer. Every layer has to fit, which is checked where it uses them."""
    spec, hidden = specs[0], decoder.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attended = spec.num_heads * spec.value_dim
    widths = {
        Buffer.HIDDEN: hidden,
        Buffer.NORMED: hidden,
        Buffer.QUERY: queries,
        Buffer.KEY: keys,
        Buffer.VALUE: spec.num_kv_heads * spec.value_dim,
        Buffer.ATTENDED: attended,
        Buffer.GATED: decoder.layers[0].gate.outputs,
        Buffer.KEPT_HIDDEN: hidden,
        Buffer.KEPT_ATTENDED: attended,
        Buffer.LOGITS: decoder.head.outputs,
    }
    return [widths[buffer] for buffer in Buffer]
