"""The native forward: a whole packed step in one call, from token ids to the logits of the wanted rows.

What it keeps true:
- A row's logits are the same bits whatever runs beside it, in every batch, chunking and number of threads.
- Buffers are kept from step to step and grow to the largest step that came; nothing else is allocated. The logits that
  a call returns are overwritten by the next one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.native.operations import ROTARIES, Step
from workers.engine.native.program import BoundProgram, Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.engine.attention.cpu import CpuPagedAttention
    from workers.engine.attention.interface import LayerCache, LayerSpec
    from workers.engine.native.decoder import Decoder
    from workers.engine.native.operations import Kernel

    _Int64s = NDArray[np.int64]


class NativeForward:
    """One decoder bound to its pages."""

    def __init__(
        self,
        kernel: Kernel,
        decoder: Decoder,
        specs: Sequence[LayerSpec],
        caches: Sequence[LayerCache],
        groups: Sequence[int],
        backends: Sequence[CpuPagedAttention],
        *,
        most_rows: int,
        most_kept: int,
    ) -> None:
        """``groups[i]`` says which of the backends, each with page tables of its own, serves layer i.

        Buffers are kept for steps of ``most_rows`` rows, and logits of ``most_kept``; larger ones are served too.

        Raises:
            ValueError: The decoder's sizes do not fit together.
        """
        if len(decoder.rotaries) > ROTARIES:
            raise ValueError(f"it has {len(decoder.rotaries)} kinds of rotary positions")
        self._kernel, self._decoder, self._backends = kernel, decoder, backends
        self._made_from = specs, caches, groups
        self._head_dim = specs[0].head_dim
        self._program = BoundProgram(decoder, *self._made_from)
        self._space = _Space(self._program.widths, most_rows, most_kept)

    def __call__(
        self,
        ids: torch.Tensor,  # [T]
        positions: _Int64s,  # [T]
        wanted: _Int64s,  # [R], indices of rows
        seconds: NDArray[np.float64] | None = None,  # the processor time of each operation is added here
    ) -> torch.Tensor:
        """Logits of the wanted rows, [R, V] float32, until the next call. The backends have begun with this step.

        Raises:
            IndexError: A token id lies outside the vocabulary, or a wanted row outside the step.
            ValueError: The step does not fit the pages.
        """
        if not self._program.is_current:  # the weights were exchanged
            self._program = BoundProgram(self._decoder, *self._made_from)
        ids, wanted = ids.to(torch.int64).contiguous(), np.ascontiguousarray(wanted, np.int64)
        rows, kept = len(ids), len(wanted)
        calls = [backend.step(self._program.pages) for backend in self._backends]
        if any(call.rows != rows for call in calls) or len(positions) != rows:
            raise ValueError("ids, positions and the rows of the attention differ in number")
        if any(call.page_size != self._program.page_size for call in calls):
            raise ValueError(f"the step has not pages of {self._program.page_size} tokens, as the cache has")
        if seconds is not None and (seconds.dtype != np.float64 or seconds.shape != (len(self._program.kinds),)):
            raise ValueError(f"times of {len(self._program.kinds)} operations need as many float64 numbers")
        turns = self._turns(positions)
        gathers = kept != rows or not np.array_equal(wanted, np.arange(rows))
        pointers, logits = self._space.take(rows, kept, gathers=gathers)
        groups = (ctypes.POINTER(type(calls[0])) * len(calls))(*map(ctypes.pointer, calls))
        step = Step(
            buffers=ctypes.addressof(pointers),
            ids=ids.data_ptr(),
            wanted=wanted.ctypes.data,
            groups=ctypes.addressof(groups),
            seconds=None if seconds is None else seconds.ctypes.data,
            rows=rows,
            wanted_rows=kept,
            threads=torch.get_num_threads(),
        )
        for index, (cosines, sines) in enumerate(turns):
            step.cosines[index], step.sines[index] = cosines.data_ptr(), sines.data_ptr()
        self._kernel.forward(self._program.program, step)
        return logits

    @property
    def kinds(self) -> list[str]:
        """What each operation of the program is, in their order: what ``seconds`` are about."""
        return [kind.name.lower() for kind in self._program.kinds]

    def _turns(self, positions: _Int64s) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines [T, D] of each rotary."""
        at = torch.from_numpy(positions)[None]
        turns = []
        for rotary in self._decoder.rotaries:
            pair = [turn[0].contiguous() for turn in rotary(at)]
            if any(turn.shape != (len(positions), self._head_dim) or turn.dtype != torch.float32 for turn in pair):
                raise ValueError("its rotary positions turn a part of each head only, or in other steps")
            turns.append((pair[0], pair[1]))
        return turns


class _Space:
    """The buffers, and where they lie.

    They grow by doubling, up to ``most_rows``. Logits of more than ``most_kept`` rows, as the scores of long prompts
    need, are made for one step and kept by nobody.
    """

    def __init__(self, widths: Sequence[int], most_rows: int, most_kept: int) -> None:
        self._widths, self._most_rows, self._most_kept = widths, most_rows, most_kept
        self._rows = 0
        self._tensors: list[torch.Tensor] = []
        self._logits = self._empty(0, Buffer.LOGITS)

    def take(self, rows: int, kept: int, *, gathers: bool) -> tuple[ctypes.Array[ctypes.c_void_p], torch.Tensor]:
        """Pointers to all buffers, and the logits [kept, V], for a step of so many rows. Where nothing has to be
        gathered, the kept rows are the rows themselves."""
        self._make_room(max(rows, kept))  # a row can be wanted twice
        if kept <= self._most_kept and kept > len(self._logits):
            self._logits = self._empty(min(_doubled(kept), self._most_kept), Buffer.LOGITS)
        logits = self._logits[:kept] if kept <= self._most_kept else self._empty(kept, Buffer.LOGITS)
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        addresses.append(logits.data_ptr())
        if not gathers:
            addresses[Buffer.KEPT_HIDDEN] = addresses[Buffer.HIDDEN]
            addresses[Buffer.KEPT_ATTENDED] = addresses[Buffer.ATTENDED]
        return (ctypes.c_void_p * len(addresses))(*addresses), logits

    def _make_room(self, rows: int) -> None:
        if rows <= self._rows:
            return
        self._tensors, self._rows = [], 0  # the old ones go first
        room = max(rows, min(_doubled(rows), self._most_rows))
        self._tensors = [self._empty(room, buffer) for buffer in Buffer if buffer is not Buffer.LOGITS]
        self._rows = room

    def _empty(self, rows: int, buffer: Buffer) -> torch.Tensor:
        return torch.empty(rows, self._widths[buffer], dtype=torch.float32)


def _doubled(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()
