"""Queues of work on the device: one for the forward passes, one for copies beside them.

What it keeps true:
- Work on one stream runs in the order in which it was queued. Work on two runs in any order, unless one waits for an
  event of the other.
- A tensor that is used on a stream other than the one that made it is named to ``run``: its memory is not given to
  anybody else before that work is done.
- On a CPU both streams run their work at once, so nothing ever has to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream: reached when all work that was queued before it is done."""

    def synchronize(self) -> None:
        """Have the host wait until it is reached."""
        ...


class Stream(Protocol):
    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
        """Queue work, which uses these ``tensors`` of other streams."""
        ...

    def record(self) -> Event:
        """A place behind all that is queued by now."""
        ...

    def wait(self, event: Event) -> None:
        """What is queued from now on runs after ``event``. The host does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """``compute`` is where forward passes run, ``copies`` where memory moves beside them."""

    compute: Stream
    copies: Stream


class Reached:
    """An event behind nothing."""

    def synchronize(self) -> None:
        pass


class HostStream:
    """Runs all work before ``run`` returns."""

    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
        work()

    def record(self) -> Event:
        return Reached()

    def wait(self, event: Event) -> None:
        pass


class CudaStream:
    """A stream of CUDA; see `torch.cuda.Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            work()
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


def streams_of(device: torch.device) -> Streams:
    """Those of a device; on CUDA forward passes run on the stream that is current now."""
    if device.type != "cuda":
        return Streams(HostStream(), HostStream())
    compute = CudaStream(torch.cuda.current_stream(device))
    return Streams(compute, CudaStream(torch.cuda.Stream(device)))  # type: ignore[no-untyped-call]
