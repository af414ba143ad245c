"""What crosses the border between host and device in a step: its arrays in one copy there, its results in one back.

What it keeps true:
- The host never waits for a copy that goes out, and for one that comes back only where its values are asked for.
- A pinned buffer is written again only when the copy that used it before is done. Two take turns, as two steps are on
  their way at most.
- Each array begins at a multiple of 16 bytes, so any dtype can be seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.engine.streams import Event, Streams

ALIGNMENT = 16
BUFFERS = 2
Array = NDArray[Any]
_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}
_TORCH_DTYPES |= {np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64")}
_NUMPY_DTYPES = {there: here for here, there in _TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where arrays lie in one row of bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # in bytes, as the size
    size: int

    @classmethod
    def of(cls, arrays: Sequence[Array | torch.Tensor]) -> Layout:
        """Raises TypeError for a dtype that numpy or torch does not have."""
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        shapes = tuple(tuple(array.shape) for array in arrays)
        return cls(shapes, tuple(_torch_dtype(array.dtype) for array in arrays), tuple(offsets), size)

    def tensors(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The arrays as they lie in ``row`` [size or more] uint8."""
        typed = {dtype: row[: self.size].view(dtype) for dtype in set(self.dtypes)}
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            start = offset // dtype.itemsize
            view = typed[dtype][start : start + prod(shape)]
            views.append(view if len(shape) == 1 else view.view(shape))
        return views

    def arrays(self, row: torch.Tensor) -> list[Array]:
        """The same in a row of the host."""
        values = row.numpy()
        parts = zip(self.shapes, self.dtypes, self.offsets, strict=True)
        return [
            values[offset : offset + prod(shape) * dtype.itemsize].view(_NUMPY_DTYPES[dtype]).reshape(shape)
            for shape, dtype, offset in parts
        ]


def _torch_dtype(dtype: np.dtype[Any] | torch.dtype) -> torch.dtype:
    there = dtype if isinstance(dtype, torch.dtype) else _TORCH_DTYPES.get(dtype)
    if there is None or there not in _NUMPY_DTYPES:
        raise TypeError(f"{dtype} cannot be copied between host and device as an array")
    return there


class PinnedBuffers:
    """Host memory that a GPU copies from and to by itself; grows with what is asked for."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._rows = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        self._waits: list[Callable[[], object] | None] = [None] * BUFFERS
        self._turn = 0

    def next(self, size: int) -> torch.Tensor:
        """The bytes of the buffer whose turn it is, [size] uint8. Waits until it is free."""
        self._turn = (self._turn + 1) % BUFFERS
        if (wait := self._waits[self._turn]) is not None:
            wait()
            self._waits[self._turn] = None
        if self._rows[self._turn].numel() < size:
            self._rows[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._rows[self._turn][:size]

    def keep(self, wait: Callable[[], object]) -> None:
        """The buffer that was given last is in use until ``wait`` returns."""
        self._waits[self._turn] = wait


class Upload:
    """Arrays of the host to the device."""

    def __init__(self, device: torch.device, streams: Streams, *, packed: bool) -> None:
        """Without ``packed`` the host's memory is the device's, and tensors share it with the arrays."""
        self._device, self._streams, self._packed = device, streams, packed
        self._buffers = PinnedBuffers(pinned=device.type == "cuda")

    def __call__(self, arrays: Sequence[Array], *, into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The arrays on the device, in their order, for work that is queued for the forward passes from now on.

        Args:
            into: Bytes on the device that they are to lie in, [size or more] uint8; else memory of their own.
        """
        if not self._packed and into is None:
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        layout = Layout.of(arrays)
        there = torch.empty(layout.size, dtype=torch.uint8, device=self._device) if into is None else into
        if there.numel() < layout.size:
            raise ValueError(f"arrays of {layout.size} bytes do not fit into {there.numel()}")
        here = self._buffers.next(layout.size)
        for place, array in zip(layout.arrays(here), arrays, strict=True):
            place[...] = array
        self._streams.compute.run(lambda: there[: layout.size].copy_(here, non_blocking=True))
        self._buffers.keep(self._streams.compute.record().synchronize)
        return layout.tensors(there)


class Arriving:
    """Arrays on their way to the host."""

    def __init__(self, layout: Layout, row: torch.Tensor, event: Event) -> None:
        self._layout, self._row, self._event = layout, row, event
        self._arrays: list[Array] | None = None

    def wait(self) -> list[Array]:
        """The arrays, in memory of their own."""
        if self._arrays is None:
            self._event.synchronize()
            self._arrays = [array.copy() for array in self._layout.arrays(self._row)]
        return self._arrays


class Download:
    """Tensors of the device to the host, beside the forward passes. They are called on the stream of these."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams
        self._buffers = PinnedBuffers(pinned=device.type == "cuda")

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Arriving:
        """Begin to fetch them as they are behind all work that is queued for the forward passes by now.

        They may be overwritten by what is queued there after that.
        """
        layout = Layout.of(tensors)
        packed = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        for place, tensor in zip(layout.tensors(packed), tensors, strict=True):
            place.copy_(tensor)
        here = self._buffers.next(layout.size)
        self._streams.copies.wait(self._streams.compute.record())
        self._streams.copies.run(lambda: here.copy_(packed, non_blocking=True), packed)
        arriving = Arriving(layout, here, self._streams.copies.record())
        self._buffers.keep(arriving.wait)
        return arriving
