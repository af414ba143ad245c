"""CPU memory for the pages of sequences that gave way, so that they go on later without computing anything again.

Strategy: the scheduler decides and numbers the pages (:class:`HostPool`), the runner copies (:class:`HostCache`), in
the order of the decisions and between two forwards. So a page that is copied out holds what every step before has
written, and the next step can write it. A device that works beside the host computes on while its pages travel
(:class:`BesideHostCache`).

Invariants:
- A host page is free or belongs to one waiting sequence.
- The tensors are made when the first page is copied out: a worker that never runs short takes no memory for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import psutil
import torch

from workers.engine.cgroups import memory_limit

if TYPE_CHECKING:
    from workers.engine.cache import KVCache
    from workers.engine.device_path import DevicePath
    from workers.engine.streams import Event

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20  # travel together: the size of a staging buffer, and of a piece of pinned memory
STAGING_BUFFERS = 2  # one is filled while the other is emptied


class Direction(Enum):
    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Page ``device[i]`` to or from page ``host[i]``, in all page tensors."""

    direction: Direction
    device: list[int]
    host: list[int]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Where a waiting sequence's pages are: by group, 0 where it had none any more."""

    pages: list[list[int]]
    computed: int  # tokens whose keys and values are in them

    @property
    def held(self) -> list[int]:
        return [page for group in self.pages for page in group if page]


class HostPool:
    """Numbers of host pages, from 1 on."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def take(self, count: int) -> list[int]:
        """The caller has seen that ``count`` are free."""
        assert count <= self.free
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class HostPages(Protocol):
    """The page tensors in CPU memory."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Carry the copies out, in their order, between the forwards before and behind this call."""
        ...

    def release(self) -> None:
        """Let go of the memory."""
        ...


def host_cache(cache: KVCache, capacity: int, path: DevicePath) -> HostPages:
    return BesideHostCache(cache, capacity, path) if path.works_beside else HostCache(cache, capacity)


class HostCache:
    """Of a device that has done its work when a call returns."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self._capacity = capacity
        self._tensors: list[torch.Tensor] = []

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See :class:`HostPages`. The copies are made when it returns."""
        for copy in copies:
            for device, host in zip(self._cache.tensors, self._host_tensors(), strict=True):
                inside = torch.tensor(copy.device, device=device.device)
                outside = torch.tensor(copy.host) - 1
                if copy.direction is Direction.OUT:
                    host[outside] = device.index_select(0, inside).to(host.device)
                else:
                    device.index_copy_(0, inside, host.index_select(0, outside).to(device.device))

    def release(self) -> None:
        """See :class:`HostPages`."""
        self._tensors = []

    def _host_tensors(self) -> list[torch.Tensor]:
        if not self._tensors:
            self._tensors = [
                torch.empty((self._capacity, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._cache.tensors
            ]
        return self._tensors


@dataclass(slots=True)
class _Staging:
    """Device memory that pages pass through. ``left`` is behind the last work on it."""

    pages: torch.Tensor  # [chunk, page bytes] uint8
    left: Event | None = None


class BesideHostCache:
    """Of a device that works beside the host: forward passes go on while pages travel.

    The stream of the forward passes gathers pages into a staging buffer, so that they can be written at once, and the
    stream of copies carries them from there to pinned memory; the other way round on the way back. In the buffer and on
    the host a page is one row of bytes, for all layers, so pages that lie side by side travel in one copy.

    What it keeps true:
    - Work on a staging buffer waits for the work on it before, on whichever stream that was.
    - All that touches host pages runs on the stream of copies, in the order of the calls: a host page can be given back
      and taken again while a copy of it is under way.
    - The host waits for nothing.
    """

    def __init__(self, cache: KVCache, capacity: int, path: DevicePath) -> None:
        """Takes :func:`staging_bytes` on the device."""
        self._cache, self._streams, self._upload = cache, path.streams, path.upload()
        self._is_pinned = path.device.type == "cuda"
        self._capacity, self._page_bytes = capacity, cache.page_bytes
        self._chunk = _chunk_pages(capacity, cache.page_bytes)
        shape = (self._chunk, cache.page_bytes)
        self._stagings = [
            _Staging(torch.empty(shape, dtype=torch.uint8, device=path.device)) for _ in range(STAGING_BUFFERS)
        ]
        self._turn = 0
        self._slabs: list[torch.Tensor] = []  # each [chunk, page bytes] uint8: host pages 1 to chunk, and so on

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See :class:`HostPages`. The copies are queued when it returns."""
        if not copies:
            return
        (device,) = self._upload([np.array(list(chain.from_iterable(copy.device for copy in copies)), np.int64)])
        end = 0
        for copy in copies:
            first, end = end, end + len(copy.device)
            pages = device[first:end]
            for at in range(0, len(copy.host), self._chunk):
                chunk = slice(at, at + self._chunk)
                move = self._out if copy.direction is Direction.OUT else self._in
                move(pages[chunk], copy.host[chunk], self._next_staging())

    def release(self) -> None:
        """See :class:`HostPages`. The allocators keep memory that a queued copy still uses."""
        self._slabs, self._stagings = [], []

    def _out(self, pages: torch.Tensor, host: Sequence[int], staging: _Staging) -> None:
        compute, copies = self._streams.compute, self._streams.copies
        if staging.left is not None:
            compute.wait(staging.left)
        compute.run(partial(self._gather, pages, staging.pages))
        copies.wait(compute.record())
        for there, here in self._runs(host, staging.pages):
            copies.run(partial(_carry, here, there))
        staging.left = copies.record()

    def _in(self, pages: torch.Tensor, host: Sequence[int], staging: _Staging) -> None:
        compute, copies = self._streams.compute, self._streams.copies
        if staging.left is not None:
            copies.wait(staging.left)
        for there, here in self._runs(host, staging.pages):
            copies.run(partial(_carry, there, here))
        compute.wait(copies.record())
        compute.run(partial(self._scatter, pages, staging.pages))
        staging.left = compute.record()

    @torch.inference_mode()
    def _gather(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        for tensor, part in self._parts(staging[: len(pages)]):
            torch.index_select(tensor, 0, pages, out=part)

    @torch.inference_mode()
    def _scatter(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        for tensor, part in self._parts(staging[: len(pages)]):
            tensor.index_copy_(0, pages, part)

    def _parts(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each page tensor, and where its part of the staged pages lies."""
        end = 0
        for tensor in self._cache.tensors:
            first, end = end, end + tensor[0].nbytes
            yield tensor, staging[:, first:end].view(tensor.dtype).view(-1, *tensor.shape[1:])

    def _runs(self, host: Sequence[int], staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Host pages that lie side by side, and their places in the staging buffer."""
        first = 0
        for end in range(1, len(host) + 1):
            if end < len(host) and host[end] == host[end - 1] + 1 and host[end - 1] % self._chunk:
                continue
            slab, row = divmod(host[first] - 1, self._chunk)
            yield self._slab(slab)[row : row + end - first], staging[first:end]
            first = end

    def _slab(self, number: int) -> torch.Tensor:
        while len(self._slabs) <= number:
            rows = min(self._chunk, self._capacity - len(self._slabs) * self._chunk)
            self._slabs.append(_host_memory((rows, self._page_bytes), is_pinned=self._is_pinned))
        return self._slabs[number]

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        return self._stagings[self._turn]


@torch.inference_mode()
def _carry(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _host_memory(shape: tuple[int, int], *, is_pinned: bool) -> torch.Tensor:
    """Where none can be pinned, ordinary memory does the same more slowly: a copy then waits for its stream."""
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        log.warning("no memory can be pinned for pages of sequences that gave way; they travel more slowly: %s", error)
        return torch.empty(shape, dtype=torch.uint8)


def _chunk_pages(capacity: int, page_bytes: int) -> int:
    return min(capacity, max(1, CHUNK_BYTES // page_bytes))


def staging_bytes(capacity: int, page_bytes: int) -> int:
    """What a :class:`BesideHostCache` takes on the device."""
    return STAGING_BUFFERS * _chunk_pages(capacity, page_bytes) * page_bytes


def host_pages(space_gib: float, *, threshold: float, page_bytes: int, useful: int) -> int:
    """How many pages ``space_gib`` GiB give, no more than ``threshold`` of the machine's memory, or the container's,
    and than are useful."""
    total = psutil.virtual_memory().total
    memory = min(space_gib * 2**30, threshold * min(total, memory_limit() or total))
    return min(int(memory) // page_bytes, useful)
