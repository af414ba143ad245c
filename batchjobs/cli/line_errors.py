"""Errors of input lines for people: a file of ten thousand lines with one fault has one message, not ten thousand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchjobs.errors import LineError

NAMED_RUNS = 6
"""Runs of lines that a message names; the lines of the others are counted."""

_PLACE = re.compile(r"\b(column|byte) ([0-9]+)")


@dataclass(slots=True)
class SameError:
    """The lines of one file that have one error. Where in the line it is may differ."""

    source: str | None
    message: str
    runs: list[tuple[int, int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """The first and the last column, or byte, at each place that the message names."""

    @property
    def count(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)

    def add(self, error: LineError) -> None:
        found = [int(number) for _, number in _PLACE.findall(error.message)]
        widest = self.places or [(number, number) for number in found]
        self.places = [(min(low, n), max(high, n)) for (low, high), n in zip(widest, found, strict=True)]
        if self.runs and error.line == self.runs[-1][1] + 1:
            self.runs[-1] = (self.runs[-1][0], error.line)
        else:
            self.runs.append((error.line, error.line))

    def __str__(self) -> str:
        where = f"{self.source}, " if self.source is not None else ""
        places = iter(self.places)
        message = _PLACE.sub(lambda match: _place(match.group(1), *next(places)), self.message)
        return f"{where}{_lines(self.runs)}: {message}"


def grouped(errors: Iterable[LineError]) -> list[SameError]:
    """The errors by what they say, in the order of the first line of each."""
    groups: dict[tuple[str | None, str], SameError] = {}
    for error in errors:
        key = (error.source, _PLACE.sub("\\1 \0", error.message))  # a message has no NUL of its own
        groups.setdefault(key, SameError(error.source, error.message)).add(error)
    return list(groups.values())


def _lines(runs: Sequence[tuple[int, int]]) -> str:
    """``line 7``, ``lines 1-3, 7, 12 and 9,985 more``."""
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:NAMED_RUNS])
    more = sum(last - first + 1 for first, last in islice(runs, NAMED_RUNS, None))
    several = len(runs) > 1 or runs[0][0] < runs[0][1]
    return f"{'lines' if several else 'line'} {named}" + (f" and {more:,} more" if more else "")


def _place(what: str, low: int, high: int) -> str:
    return f"{what} {low}" if low == high else f"{what} {low} to {high}"
