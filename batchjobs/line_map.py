"""Which line of which input a request came from."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchjobs.inputs import Input


@dataclass(slots=True)
class LineMap:
    """Index in the batch -> input and line. Indexes run with the lines except where a blank line or a file begins."""

    starts: list[int] = field(default_factory=list)
    places: list[tuple[Input, int]] = field(default_factory=list)

    def begin(self, index: int, source: Input, line: int) -> None:
        """From this index on the lines run from this one."""
        self.starts.append(index)
        self.places.append((source, line))

    def __getitem__(self, index: int) -> tuple[Input, int]:
        position = bisect.bisect_right(self.starts, index) - 1
        source, line = self.places[position]
        return source, line + index - self.starts[position]
