"""Throughput of the engine on a workload, side by side with other systems in the same process.

The systems take turns, round by round, so that a machine whose speed drifts slows them alike. Each must make the asked
number of tokens for every request, greedy and with end-of-sequence tokens ignored, or the run fails.

| file | holds |
| --- | --- |
| ``rounds.py`` | the measurement from begin to end |
| ``system.py``, ``baselines.py``, ``delivery.py`` | what is measured: this engine, transformers, the whole product |
| ``own_file.py`` | a workload from an input file |
| ``steps.py``, ``latency.py``, ``percentiles.py`` | times of steps and of tokens |
| ``bound.py`` | what the machine could do at best |
| ``report.py`` | JSON and table |

The names below are loaded on first use: whoever wants a part does not need what the others import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.bench.baselines import BASELINES
    from workers.bench.rounds import bench
    from workers.bench.system import OurEngine

__all__ = ["BASELINES", "OurEngine", "bench"]

_HOMES = {
    "BASELINES": "workers.bench.baselines",
    "OurEngine": "workers.bench.system",
    "bench": "workers.bench.rounds",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
