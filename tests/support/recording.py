"""CUDA graphs, rehearsed on a CPU: what work does to tensors is noted once, and done again without running its Python.

As with a real graph, addresses are those of the recording, whatever the host knew then is frozen, memory of the work's
own is garbage before each replay, and work that waits for the device cannot be recorded. Besides, it may read nothing
but the memory that it is allowed to, so no value of the host is frozen unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support import engines
from tests.support.flash_attention import stand_in
from tests.support.rehearsal import rehearse
from workers.engine import Engine, graphs, runner
from workers.engine.attention.flash import FlashPagedAttention

WAITING = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "bincount",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
}
"""Operations of which a GPU's host learns a value or a shape."""


class Waits(RuntimeError):
    """An operation makes the host wait for the device."""


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whoever waits for the device in here gets an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check(func, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def check(func: Any, args: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith(("index", "_index")) and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1:2])
        )
        if name in WAITING or by_mask or (name == "repeat_interleave" and len(args) < 2):
            raise Waits(f"the host would wait for the device in {name}")


class _Recorder(NoWaiting):  # type: ignore[no-untyped-call]
    def __init__(self, may_read: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._known = {address(tensor) for tensor in may_read}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check(func, args)
        return self.note(func, args, kwargs or {})

    def note(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        used = {address(tensor) for tensor in tensors_in((args, kwargs)) if tensor.numel()}
        if unknown := used - self._known:
            raise RuntimeError(f"{func} reads {len(unknown)} tensors that a recording must not read")
        out = func(*args, **kwargs)
        made = [tensor if address(tensor) not in used else None for tensor in tensors_in(out)]
        self._known |= {address(tensor) for tensor in tensors_in(out)}
        self.calls.append(
            _Call(func, args, kwargs, made, is_view=not any(m is not None for m in made) and _reads(func))
        )
        return out


class _Call:
    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[torch.Tensor | None], *, is_view: bool
    ) -> None:
        self._func, self._args, self._kwargs, self.made, self._is_view = func, args, kwargs, made, is_view

    def again(self) -> None:
        if self._is_view:  # it shows the same memory as when it was recorded
            return
        for old, new in zip(self.made, tensors_in(self._func(*self._args, **self._kwargs)), strict=True):
            if old is not None:
                old.copy_(new)


class Recording:
    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self._calls:
            for tensor in call.made:
                if tensor is not None:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else (tensor.dtype != torch.bool) * 12345678)
        for call in self._calls:
            call.again()


class RecordingMaker:
    """``may_read`` tells the memory whose addresses stay. ``made`` are all recordings, in their order."""

    def __init__(self, may_read: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._may_read = may_read
        self.made: list[Recording] = []

    def capture(self, work: Callable[[], object]) -> Recording:
        global _recorder
        work()
        with _Recorder(self._may_read()) as recorder:
            _recorder = recorder
            try:
                work()
            finally:
                _recorder = None
        self.made.append(Recording(recorder.calls))
        return self.made[-1]


_recorder: _Recorder | None = None


def kernel(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that is one operation of the device, however it is computed here."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        recorder = _recorder
        with _disable_current_modes():
            return function(*args, **kwargs) if recorder is None else recorder.note(function, args, kwargs)

    return call


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _reads(func: Any) -> bool:
    """Whether an operation changes none of its arguments."""
    return not getattr(getattr(func, "_schema", None), "is_mutable", True)


def memory_of(engine: Engine) -> list[torch.Tensor]:
    """What a recorded step of the engine may read and write."""
    one = engine.runner
    recorded = one._graphs
    assert recorded is not None
    places = (recorded._place, recorded._logits, recorded._tokens, recorded._logprobs, recorded._allowed)
    return [*one.model.parameters(), *one.model.buffers(), *one.cache.tensors, one._last_tokens, *places]


class Recorded:
    """Engines whose decode steps are recorded, on the rehearsed path, with a stand-in for flash-attn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions = stand_in("flash-attn 2", exact=True, page=4)
        object.__setattr__(functions, "decode", kernel(functions.decode))
        object.__setattr__(functions, "prefill", kernel(functions.prefill))
        rehearse(monkeypatch)
        monkeypatch.setattr(runner, "choose_backend", lambda *_, **__: FlashPagedAttention(functions))
        self.maker = RecordingMaker(lambda: memory_of(self.engine))
        monkeypatch.setattr(graphs, "maker_of", lambda _: self.maker)

    def make(self, *args: Any, **settings: Any) -> Engine:
        self.engine = engines.make(*args, native_forward=False, **settings)
        return self.engine

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in self.maker.made)
