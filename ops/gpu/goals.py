"""Where the goals for one GPU stand: met, or missed by how much. Nothing that was not measured is told as met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Sections = Mapping[str, Mapping[str, Mapping[str, Any]]]

DECODE_SHARE, PREFILL_SHARE, IDLE_SHARE = 0.60, 0.50, 0.05
SPEED = "speed "  # what the names of the sections with these figures begin with


@dataclass(frozen=True, slots=True)
class Goal:
    """``worst`` picks from what was measured the figure that decides."""

    words: str
    figure: str
    limit: float
    at_least: bool

    @property
    def worst(self) -> Callable[[Iterable[float]], float]:
        return min if self.at_least else max

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value < self.limit


GOALS = (
    Goal("decode at 60% or more of (weights + KV bytes) / memory bandwidth", "share_of_bandwidth", DECODE_SHARE, True),
    Goal("prefill at 50% or more of the measured matrix peak", "share_of_peak", PREFILL_SHARE, True),
    Goal("device idle under 5% between steps", "idle_share", IDLE_SHARE, False),
)


def goals(sections: Sections) -> list[dict[str, Any]]:
    """One entry a goal and model. ``missed_by`` is in percentage points, None where it is met or not known."""
    names = [name for name in sections if name.startswith(SPEED)]
    return [_verdict(goal, name.removeprefix(SPEED), sections[name]) for name in names for goal in GOALS]


def _verdict(goal: Goal, model: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    values = {part: float(found[goal.figure]) for part, found in parts.items() if found.get(goal.figure) is not None}
    expected = [part for part in parts if part.startswith("decode" if goal.figure != "share_of_peak" else "prefill")]
    found: dict[str, Any] = {"goal": goal.words, "model": model, "measured": values, "missed_by": None}
    if not values:
        return found | {"verdict": "not measured"}
    worst = goal.worst(values.values())
    if not goal.is_met(worst):
        return found | {"verdict": "missed", "missed_by": abs(worst - goal.limit) * 100}
    incomplete = [part for part in expected if part not in values]
    return found | {"verdict": "met so far" if incomplete else "met", "not_measured": incomplete}


def verdict_line(found: Mapping[str, Any]) -> str:
    measured = ", ".join(f"{part} {value:.1%}" for part, value in found["measured"].items())
    missed = "" if found["missed_by"] is None else f" by {found['missed_by']:.1f} points"
    return f"{found['verdict']}{missed}: {found['goal']}, {found['model']}" + (f" ({measured})" if measured else "")
