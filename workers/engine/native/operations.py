"""The C++ side of the native forward: its structures, mirrored field by field, and the call."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from workers.engine.attention.compiler import check_layouts
from workers.engine.attention.cpu import Call

ROTARIES = 2
NONE = -1
_OUTCOMES = {
    1: (MemoryError, "no memory for the forward's working space"),
    2: (IndexError, "a token id lies outside the vocabulary, or a wanted row outside the step"),
}


class Kind(IntEnum):
    """See operations.h for what each does."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    GATHER = 5
    CAP = 6


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class Part(ctypes.Structure):
    """Mirrors `Operation::Part` in operations.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "weight"),
        *_fields(ctypes.c_int64, "weight_row"),
        *_fields(ctypes.c_void_p, "bias"),
        *_fields(ctypes.c_int32, "output", "outputs"),
    )


class Operation(ctypes.Structure):
    """Mirrors `Operation` in operations.h."""

    _fields_ = (
        ("part", Part * 3),
        *_fields(ctypes.c_void_p, "keys", "values", "sinks"),
        *_fields(ctypes.c_int32, "kind", "wanted", "input", "residual", "output", "width"),
        *_fields(ctypes.c_int32, "parts", "gated", "activation"),
        *_fields(ctypes.c_int32, "heads", "kv_heads", "head_dim", "value_dim", "value_width", "window"),
        *_fields(ctypes.c_int32, "group", "rotary"),
        *_fields(ctypes.c_float, "epsilon", "shift", "scale", "softcap"),
    )


class Program(ctypes.Structure):
    """Mirrors `Program` in operations.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "operations", "widths"),
        *_fields(ctypes.c_int32, "count", "buffers", "dtype", "vocabulary"),
    )


class Step(ctypes.Structure):
    """Mirrors `Step` in operations.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "buffers", "ids", "wanted"),
        ("cosines", ctypes.c_void_p * ROTARIES),
        ("sines", ctypes.c_void_p * ROTARIES),
        *_fields(ctypes.c_void_p, "groups", "seconds"),
        *_fields(ctypes.c_int32, "rows", "wanted_rows", "threads"),
    )


class Kernel:
    """A loaded library that runs programs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """ValueError if it was built from sources with other structures."""
        check_layouts(library, "the native forward", operation=Operation, program=Program, step=Step, call=Call)
        self._forward = library.batchjobs_forward
        self._forward.argtypes, self._forward.restype = [ctypes.POINTER(Program), ctypes.POINTER(Step)], ctypes.c_int

    def forward(self, program: Program, step: Step) -> None:
        """Raises MemoryError or IndexError; no page was written then."""
        if outcome := self._forward(ctypes.byref(program), ctypes.byref(step)):
            kind, message = _OUTCOMES[outcome]
            raise kind(message)
