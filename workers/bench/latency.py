"""Latencies of a run, from the time of each token: to the first token, between tokens, to the end.

Offline all requests are there from the beginning, so times to the first token include the wait for a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from workers.bench.percentiles import spread_ms

if TYPE_CHECKING:
    from workers.engine.requests import EngineOutput


def latencies(outputs: Sequence[EngineOutput], begun_at: float) -> dict[str, float]:
    """The keys of vLLM's serving benchmark.

    Args:
        begun_at: When all requests were handed in, in seconds of the wall clock.
    """
    to_first, per_token, between, to_end = [], [], [], []
    for output in outputs:
        waited = output.started_at.timestamp() - begun_at
        times = output.token_times
        if not times:
            continue
        to_first.append(waited + times[0])
        to_end.append(waited + times[-1])
        between += [late - early for early, late in pairwise(times)]
        if len(times) > 1:
            per_token.append((times[-1] - times[0]) / (len(times) - 1))
    return (
        spread_ms("ttft", to_first)
        | spread_ms("tpot", per_token)
        | spread_ms("itl", between)
        | spread_ms("e2el", to_end)
    )
