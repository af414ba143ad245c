"""How long steps take, and how much of them is the model's forward and how much the sampler.

What is left of a step is the host's: planning, packing, taking tokens, telling of outcomes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workers.bench.percentiles import percentile

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.requests import EngineOutput


class StepClock:
    """Times an engine's steps. On a GPU the calls return before the device has done its work, so parts are not told."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inner = {"forward": 0.0, "sample": 0.0}  # seconds since the last clearing
        self.step_seconds: list[float] = []
        for name in self._inner:
            setattr(engine.runner, name, self._timed(name, getattr(engine.runner, name)))

    def clear(self) -> None:
        self.step_seconds = []
        self._inner = dict.fromkeys(self._inner, 0.0)

    def step(self) -> list[EngineOutput]:
        begin = time.perf_counter()
        outputs = self._engine.step()
        self.step_seconds.append(time.perf_counter() - begin)
        return outputs

    def figures(self) -> dict[str, Any]:
        """Of the steps since the last clearing. ``host_share`` is all that is outside the forward, sampler included."""
        steps = self.step_seconds
        total = sum(steps)
        found: dict[str, Any] = {
            "num_steps": len(steps),
            "mean_step_ms": statistics.fmean(steps) * 1e3,
            "median_step_ms": statistics.median(steps) * 1e3,
            "p99_step_ms": percentile(steps, 99) * 1e3,
            "host_share": None,
            "sampling_share": None,
        }
        if self._engine.runner.device.type == "cpu":
            found["host_share"] = 1 - self._inner["forward"] / total
            found["sampling_share"] = self._inner["sample"] / total
        return found

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._inner[name] += time.perf_counter() - begin

        return timed
