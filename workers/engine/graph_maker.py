"""Work of a device recorded once, so that the host can have it done again with a single call.

What a maker asks of the work that it records:
- It reads and writes device memory at addresses that stay, and nothing that the host decides changes what it does.
- It waits for nothing: the host learns no value of a tensor.
- It can be done any number of times; it is done before it is recorded, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from workers.engine.attention.flash_trial import without_waiting

Work = Callable[[], object]


class Replayable(Protocol):
    """Recorded work."""

    def replay(self) -> object:
        """Queue all of it on the stream that is current; the host does not wait."""
        ...


class GraphMaker(Protocol):
    def capture(self, work: Work) -> Replayable:
        """Record the work. Raises whatever tells that it cannot be recorded; the device can be used as before then."""
        ...


class CudaGraphMaker:
    """CUDA graphs of one device, which share a pool of memory; see `torch.cuda.CUDAGraph`.

    As they share it, no two may run at the same time, and what one of them leaves in memory of its own is gone when
    another one runs: results have to be written elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # graphs of an engine that is gone are let go of now, and not while others are recorded
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Replayable:
        """First the work is done twice, on the stream that records it: so kernels are loaded, work spaces of libraries
        made and variants chosen, none of which a recording stands, and whatever waits for the device is found."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
                with without_waiting(self._device):
                    work()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the graphs' pool is a place of its own
            return self._record(work)

    def _record(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # In this mode only the calls of this thread are held to the rules of recording.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed. Where ending fails too, torch's allocator would count it as going on."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):  # AttributeError: the function has another name in this torch
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        _abandoned.append(graph)


_abandoned: list[torch.cuda.CUDAGraph] = []  # the allocator may still hold their addresses


def maker_of(device: torch.device) -> GraphMaker | None:
    """None where nothing can be recorded."""
    return CudaGraphMaker(device) if device.type == "cuda" else None
