"""Percentiles, and the figures that are told of any list of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy has it; ``share`` from 0 to 100. 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """``mean_NAME_ms``, ``median_…``, ``std_…`` and ``p99_…`` of these seconds, in milliseconds."""
    milliseconds = [1e3 * value for value in seconds] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(milliseconds),
        f"median_{name}_ms": statistics.median(milliseconds),
        f"std_{name}_ms": statistics.pstdev(milliseconds),
        f"p99_{name}_ms": percentile(milliseconds, 99),
    }
