"""How long the device works while something runs, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


def busy_seconds(work: Callable[[], object]) -> float:
    """Seconds in which at least one kernel or copy ran, on any stream."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return covered(spans) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length that spans cover together; where some overlap, it counts once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
