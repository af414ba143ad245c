"""The native matrix product as a call of its own, on torch tensors: for tests, measurements and lone linear layers.

Kept true here:
- The kernel never sees a size or stride that was not checked against the tensors it points into.
- Every tensor behind a pointer outlives the call that uses it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from workers.engine.attention.compiler import check_layouts
from workers.engine.native.decoder import Activation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Those of weights, as the kernels number them."""

_MOST_PARTS = 3
_MOST = 2**30  # rows, inputs or outputs: keeps the kernel's 32-bit integers whole


class Part(ctypes.Structure):
    """Mirrors `Linear::Part` in linear_plan.h, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("weight_row", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("output_row", ctypes.c_int64),
        ("outputs", ctypes.c_int32),
    )


class Linear(ctypes.Structure):
    """Mirrors `Linear` in linear_plan.h, field by field."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("input_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("part", Part * _MOST_PARTS),
        *((name, ctypes.c_int32) for name in ("parts", "gated", "activation")),
        ("residual", ctypes.c_void_p),
        ("residual_row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        ("packed", ctypes.c_void_p),
    )


class LinearKernel:
    """The library built from linear.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind the functions of a loaded library; ValueError if it was built from a source with another `Linear`."""
        check_layouts(library, "the matrix kernel", linear=Linear)
        self._run = library.batchjobs_linear
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Linear)], ctypes.c_int

    def __call__(self, *tensors: Any, **how: Any) -> list[torch.Tensor]:
        """Multiply at once; see `prepare`. MemoryError when no memory is left."""
        run, outputs = self.prepare(*tensors, **how)
        run()
        return outputs

    def prepare(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (),
        *,
        gated: bool = False,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        out: Sequence[torch.Tensor] | None = None,
        threads: int = 0,
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """A call that multiplies float32 rows [T, inputs] with 1 to 3 float32 or bfloat16 weights [outputs, inputs].

        It writes a tensor [T, outputs] in float32 for each weight: act(x W^T + b), plus the residual [T, outputs] for
        the first. `gated` takes two weights of one shape and writes one tensor: act(x W0^T + b0) * (x W1^T + b1) +
        residual. `out` are float32 rows to write to instead; one may be the residual. `threads` is 0 for as many as
        torch uses. ValueError for tensors that do not fit.
        """
        biases = tuple(biases) or (None,) * len(weights)
        _check(x, weights, biases, gated=gated)
        written = weights[:1] if gated else weights
        outputs = [x.new_empty(len(x), len(w)) for w in written] if out is None else list(out)
        shapes = [(len(x), len(w)) for w in written]
        if [o.shape for o in outputs] != shapes or not all(_readable(o, torch.float32) for o in outputs):
            raise ValueError(f"outputs must be float32 rows of shapes {shapes}")
        if residual is not None and (residual.shape != outputs[0].shape or not _readable(residual, torch.float32)):
            raise ValueError(f"a residual must be float32 rows of shape {tuple(outputs[0].shape)}")
        call = Linear(
            input=x.data_ptr(), input_row=x.stride(0), rows=len(x), inputs=x.shape[1],
            parts=len(weights), gated=gated, activation=Activation[(activation or "none").upper()],
            dtype=DTYPES[weights[0].dtype], threads=threads or torch.get_num_threads(),
        )  # fmt: skip
        if residual is not None:
            call.residual, call.residual_row = residual.data_ptr(), residual.stride(0)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            part = call.part[i]
            part.weight, part.weight_row, part.outputs = weight.data_ptr(), weight.stride(0), len(weight)
            part.bias = None if bias is None else bias.data_ptr()
            if i < len(outputs):
                part.output, part.output_row = outputs[i].data_ptr(), outputs[i].stride(0)

        def run(_alive: object = (x, weights, biases, residual, outputs)) -> None:
            if self._run(ctypes.byref(call)):
                raise MemoryError("no memory was left for a matrix product")

        return run, outputs


def _readable(t: torch.Tensor, dtype: torch.dtype) -> bool:
    return t.device.type == "cpu" and t.dtype == dtype and (t.stride(-1) == 1 or t.shape[-1] == 1)


def _check(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, gated: bool
) -> None:
    if not 1 <= len(weights) <= _MOST_PARTS or (gated and len(weights) != 2) or len(biases) != len(weights):
        raise ValueError("a product takes 1 to 3 weights (2 where gated), and a bias or None for each")
    dtype, shape = weights[0].dtype, weights[0].shape
    if dtype not in DTYPES or any(not _readable(w, dtype) for w in weights):
        raise ValueError("weights must be rows on the CPU, all float32 or all bfloat16")
    if x.dim() != 2 or not _readable(x, torch.float32) or len(x) > _MOST or not 1 <= x.shape[1] <= _MOST:
        raise ValueError("the input must be float32 rows on the CPU")
    for weight, bias in zip(weights, biases, strict=True):
        if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not 1 <= len(weight) <= _MOST:
            raise ValueError(f"a weight of shape {tuple(weight.shape)} does not fit rows of {x.shape[1]} inputs")
        if gated and weight.shape != shape:
            raise ValueError("both weights of a gated product must have one shape")
        if bias is not None and (bias.shape != weight.shape[:1] or not _readable(bias, dtype)):
            raise ValueError(f"a bias must have {len(weight)} numbers in {dtype}")
