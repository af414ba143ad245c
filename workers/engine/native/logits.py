"""From logits to tokens on a CPU by the C++ kernel in `logits.cpp`, called on raw pointers.

Kept true here:
- The kernel never sees a token, row or size that was not checked against the logits it reads.
- Every array behind a pointer outlives the call that uses it.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.attention.compiler import KernelError, check_layouts, load_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workers.engine.sampling_rows import Cells, SamplingRows

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("logits.cpp")


class _Cells(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("starts", "tokens", "values"))


class _Call(ctypes.Structure):
    """Mirrors `LogitsCall` in logits.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "given", "tokens", "normalisers", "logprobs", "allowed")),
        *((name, ctypes.c_void_p) for name in ("top_tokens", "top_logprobs")),
        *((name, _Cells) for name in ("repeated", "added", "banned")),
        *((name, ctypes.c_void_p) for name in ("mask_of", "masks")),
        *((name, ctypes.c_void_p) for name in ("temperature", "top_p", "min_p", "point", "top_k")),
        ("row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "vocabulary", "mask_words", "top", "threads")),
    )


class LogitsKernel:
    """The kernel, bound. Thread-safe: each call has its own working space."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind a loaded kernel; ValueError if it was built from a source with another `LogitsCall`."""
        check_layouts(library, "the logits kernel", logits_call=_Call)
        self._run = library.batchjobs_logits
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Call)], ctypes.c_int

    @staticmethod
    def takes(logits: torch.Tensor) -> bool:
        """Whether the kernel can read these logits [R, V]."""
        return (
            logits.device.type == "cpu"
            and logits.dtype == torch.float32
            and logits.shape[1] > 0
            and (logits.stride(1) == 1 or logits.shape[1] == 1)
        )

    def choose(self, logits: torch.Tensor, rows: SamplingRows, threads: int | None = None) -> RowResults:
        """The next token of each row of ``logits`` [R, V].

        Raises:
            IndexError: Something is asked for a token that the logits do not have.
        """
        call, results = self._call(logits, rows.top_logprobs, threads)
        count, vocabulary = logits.shape
        alive: list[NDArray[np.generic]] = []

        def pointer(array: NDArray[np.generic]) -> int:
            alive.append(array)
            return array.ctypes.data

        for name, cells in (("repeated", rows.repeated), ("added", rows.added), ("banned", rows.banned)):
            if cells.rows:
                starts, tokens, values = _by_row(cells, count, vocabulary)
                setattr(call, name, _Cells(pointer(starts), pointer(tokens), pointer(values)))
        if rows.masked:
            masks = np.ascontiguousarray(np.stack(rows.masks))
            if masks.shape[1] * 32 < vocabulary:
                raise IndexError(f"a mask of {masks.shape[1]} words does not cover {vocabulary} tokens")
            mask_of = _spread(np.arange(len(rows.masked)), rows.masked, count, np.int32, fill=-1)
            call.mask_of, call.masks, call.mask_words = pointer(mask_of), pointer(masks), masks.shape[1]
        if rows.drawn:
            for name in ("temperature", "top_p", "min_p", "point"):
                setattr(call, name, pointer(_spread(getattr(rows, name), rows.drawn, count, np.float64)))
            call.top_k = pointer(_spread(rows.top_k, rows.drawn, count, np.int32))
        self._do(call)
        return results

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int, threads: int | None = None) -> RowResults:
        """Logprobs of given ``tokens`` [R]. IndexError: one is not among the logits; ValueError: R differs."""
        given = np.ascontiguousarray(tokens.numpy(), np.int64)
        if given.shape != logits.shape[:1]:
            raise ValueError(f"{given.size} tokens cannot be scored by {len(logits)} rows of logits")
        _check(given, logits.shape[1])
        call, results = self._call(logits, top, threads)
        call.given = given.ctypes.data
        self._do(call)
        return results

    def _call(self, logits: torch.Tensor, top: int, threads: int | None) -> tuple[_Call, RowResults]:
        results = RowResults(logits.shape[0], min(top, logits.shape[1]))
        call = _Call()
        for name in RowResults.__slots__:
            setattr(call, name, getattr(results, name).ctypes.data)
        call.logits, call.row = logits.data_ptr(), logits.stride(0)
        call.rows, call.vocabulary = logits.shape
        call.top, call.threads = results.top_tokens.shape[1], threads or torch.get_num_threads()
        return call, results

    def _do(self, call: _Call) -> None:
        if call.rows and self._run(ctypes.byref(call)):
            raise MemoryError("no memory for the sampler's working space")


class RowResults:
    """Of R rows. Where ``logprobs`` is NaN the row's logits were not finite, and nothing else means anything."""

    __slots__ = ("allowed", "logprobs", "normalisers", "tokens", "top_logprobs", "top_tokens")

    def __init__(self, rows: int, top: int) -> None:
        self.tokens: NDArray[np.int64] = np.empty(rows, np.int64)
        self.normalisers: NDArray[np.float64] = np.empty(rows, np.float64)
        self.logprobs: NDArray[np.float32] = np.empty(rows, np.float32)
        self.allowed: NDArray[np.bool_] = np.empty(rows, np.bool_)
        self.top_tokens: NDArray[np.int32] = np.empty((rows, top), np.int32)
        self.top_logprobs: NDArray[np.float32] = np.empty((rows, top), np.float32)

    @property
    def tops(self) -> list[list[tuple[int, float]]] | None:
        """By row the most likely tokens with their logprobs, best first; None when none were wanted."""
        if not self.top_tokens.shape[1]:
            return None
        pairs = zip(self.top_tokens.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in pairs]


@cache
def logits_kernel() -> LogitsKernel | None:
    """The kernel, or None where there is none; then it says why. Tried once a process."""
    try:
        kernel = LogitsKernel(load_kernel(_SOURCE))
    except (KernelError, ValueError) as reason:
        log.warning("tokens are chosen in plain torch, many times slower on a CPU: %s", reason)
        return None
    return kernel


def _by_row(
    cells: Cells, rows: int, vocabulary: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Where each row's cells begin, their tokens and their values."""
    tokens, values = np.concatenate(cells.tokens), np.concatenate(cells.values)
    _check(tokens, vocabulary)
    starts = np.concatenate(([0], np.cumsum(cells.counts(rows))))
    return starts.astype(np.int32), tokens.astype(np.int32), values.astype(np.float32)


def _spread(
    values: Sequence[float] | NDArray[np.generic], at: list[int], rows: int, dtype: type[np.generic], *, fill: int = 0
) -> NDArray[np.generic]:
    spread = np.full(rows, fill, dtype)
    spread[at] = values
    return spread


def _check(tokens: NDArray[np.int64], vocabulary: int) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise IndexError(f"a token beyond the {vocabulary} logits of a row")
