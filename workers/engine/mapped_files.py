"""Weights that transformers left in mapped files, moved into memory of their own.

What it keeps true: a model that was moved is bit for bit the same, and no byte of its files is in it any more, so that
whoever writes these files writes into no model. A weight is read from its file straight into its place: its mapped
pages are never touched, so there is one copy of the weights in memory at any time, not two. Weights that have memory of
their own already, because they were converted for example, stay where they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchjobs.errors import UsageError

SMAPS = Path("/proc/self/smaps")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ ([1-9]\d*) +(/.*)\n")
_ANY_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_WRITTEN = re.compile(r"Anonymous: +(\d+) kB\n")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses that shows a file, from ``offset`` bytes on. Where ``is_changed``, it shows something else
    in places, which was written there and not into the file."""

    start: int
    end: int
    offset: int
    inode: int
    path: str
    is_changed: bool = False

    def holds(self, address: int, size: int) -> bool:
        return self.start < address + size and address < self.end


def mappings() -> list[Mapping]:
    """Of files into this process. Raises OSError where the system does not say."""
    made: list[Mapping] = []
    is_file = False
    with SMAPS.open(errors="surrogateescape") as lines:
        for line in lines:
            if _ANY_HEAD.match(line):
                head = _HEAD.fullmatch(line)
                is_file = head is not None
                if head is not None:
                    start, end, offset = (int(head[number], 16) for number in (1, 2, 3))
                    made.append(Mapping(start, end, offset, int(head[4]), head[5]))
            elif is_file and (written := _WRITTEN.fullmatch(line)) and written[1] != "0":
                made[-1] = replace(made[-1], is_changed=True)
    return made


def own_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Gives each tensor on the host memory of its own.

    Raises:
        UsageError: A file was cut off meanwhile.
    """
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes]
    try:
        mapped = mappings()
    except OSError:
        for tensor in on_host:
            tensor.data = tensor.data.clone()
        return
    with ExitStack() as opened:
        files: dict[Mapping, int | None] = {}
        for tensor in on_host:
            mapping = next((m for m in mapped if m.holds(tensor.data_ptr(), _extent(tensor))), None)
            if mapping is not None:
                if mapping not in files:
                    files[mapping] = _opened(mapping, opened)
                tensor.data = _copy(tensor.data, mapping, files[mapping])
            elif tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                tensor.data = tensor.data.clone()  # a part of another one


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _opened(mapping: Mapping, opened: ExitStack) -> int | None:
    """A descriptor of the file; None where another one has taken its place, or memory was written over it."""
    if mapping.is_changed:
        return None
    with suppress(OSError):
        descriptor = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        if os.fstat(descriptor).st_ino == mapping.inode:
            return descriptor
    return None


def _copy(tensor: torch.Tensor, mapping: Mapping, file: int | None) -> torch.Tensor:
    first = tensor.data_ptr() - mapping.start
    if file is None or not tensor.is_contiguous() or first + tensor.nbytes > mapping.end - mapping.start:
        return tensor.clone()
    own = torch.empty_like(tensor)
    room, at = own.reshape(-1).view(torch.uint8).numpy().data, 0
    while at < len(room):
        count = os.preadv(file, [room[at:]], mapping.offset + first + at)
        if not count:
            raise UsageError("a file of the model was cut off while it was read; try again when nobody writes it")
        at += count
    return own
