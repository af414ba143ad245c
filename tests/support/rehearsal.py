"""The GPU's way of working, rehearsed on a CPU.

Arrays are packed and copied, tokens are chosen by the device's sampler, and results arrive later. What runs on the
stream of copies is put off as long as anything allows: until the host asks for it, or the forward passes wait for it.
So whoever forgets to wait finds old values, every time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workers.engine import runner
from workers.engine.device_path import DevicePath
from workers.engine.streams import Event, HostStream, Streams


class LateEvent:
    def __init__(self, stream: LateStream, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.catch_up(self._place)


class LateStream:
    """Does its work when somebody waits for it, and in its order."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._queued = 0

    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> None:
        is_inference = torch.is_inference_mode_enabled()  # a real stream launches the work now

        def later() -> None:
            with torch.inference_mode(is_inference):
                work()

        self._work.append(later)
        self._queued += 1

    def record(self) -> Event:
        return LateEvent(self, self._queued)

    def wait(self, event: Event) -> None:
        self.run(event.synchronize)

    @property
    def is_idle(self) -> bool:
        """Whether all that was queued is done."""
        return not self._work

    def catch_up(self, place: int) -> None:
        """Do everything that was queued before ``place``."""
        while self._work and self._queued - len(self._work) < place:
            self._work.pop(0)()


class EarlyStream(HostStream):
    """Runs at once, and does what it has to wait for first."""

    def wait(self, event: Event) -> None:
        event.synchronize()


def rehearsed_path(device: torch.device) -> DevicePath:
    """In the place of `device_path.path_of`."""
    return DevicePath(device, Streams(EarlyStream(), LateStream()), works_beside=True)


def rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that is made from now on works as if the CPU were a GPU."""
    monkeypatch.setattr(runner, "path_of", rehearsed_path)
