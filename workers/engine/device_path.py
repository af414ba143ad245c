"""How a device is driven: who waits for whom, and where tokens are chosen.

A CPU computes each step before the call returns, in memory that it shares with the host. A GPU works beside the host:
arrays are copied there, tokens are chosen there, and results arrive later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.streams import Streams, streams_of
from workers.engine.transfer import Download, Upload


@dataclass(frozen=True, slots=True)
class DevicePath:
    """``works_beside``: the device goes on by itself when a call has returned."""

    device: torch.device
    streams: Streams
    works_beside: bool

    def make_current(self) -> None:
        """Have what this thread does without naming a device happen here: pinned memory, for example, is made through
        the thread's current device, and each process that touches a GPU takes some hundred MiB there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def upload(self) -> Upload:
        """One for each kind of arrays that a step brings."""
        return Upload(self.device, self.streams, packed=self.works_beside)

    def download(self) -> Download:
        return Download(self.device, self.streams)


def path_of(device: torch.device) -> DevicePath:
    return DevicePath(device, streams_of(device), works_beside=device.type == "cuda")
