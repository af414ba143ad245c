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
"""

from __future__ import annotations

from workers.bench.baselines import BASELINES
from workers.bench.rounds import bench
from workers.bench.system import OurEngine

__all__ = ["BASELINES", "OurEngine", "bench"]
