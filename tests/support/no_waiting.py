"""A device that has no values: whatever the host would have to wait for fails on it.

Work is run on tensors of torch's `meta` device, which know their shapes only, as the host does while a GPU works. Torch
itself refuses there to tell a value. What it lets pass is refused here: shapes that depend on values, and data of the
host among the device's, which CUDA would wait to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_BY_INDICES = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_NEEDS_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Waits(Exception):
    """The host would have to wait for the device."""


class _NoHostData(TorchFunctionMode):
    """Refuses what makes tensors of the device from numbers of the host."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in _FROM_HOST:
            raise Waits(f"{func.__name__} copies from the host")
        if func in _INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list | np.ndarray) for part in index):
                raise Waits("an index is copied from the host")
        return func(*args, **(kwargs or {}))


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that need values, and tensors of the host. ``calls`` counts operations, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.overloadpacket in _BY_INDICES:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise Waits(f"{func} counts what is true")
        elif _NEEDS_VALUES & set(func.tags):
            raise Waits(f"{func} needs values")
        made = func(*args, **(kwargs or {}))
        for tensor in (*given, *(leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))):
            if tensor.device.type != META.type:
                raise Waits(f"{func} has a tensor of the host among its own")
        self.calls += not func.is_view
        return made


@contextmanager
def no_waiting() -> Iterator[_NoValues]:
    """Work inside raises where the host would wait: :class:`Waits`, or what torch says about the `meta` device."""
    with _NoHostData(), _NoValues() as counted:
        yield counted


def calls_of(work: Callable[[], object]) -> int:
    """How many operations ``work`` is. Raises as :func:`no_waiting` does."""
    with no_waiting() as counted:
        work()
    return counted.calls
