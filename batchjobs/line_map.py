"""Which line of which input a request came from."""

from __future__ import annotations

import bisect
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchjobs.inputs import Input


class LineMap:
    """Index in the batch -> input and line. Indexes run with the lines except where a blank line or a file begins, so
    a file with a blank line behind each other one takes 16 bytes for each of them."""

    def __init__(self) -> None:
        self._starts, self._lines = array("q"), array("q")
        self._sources: list[tuple[int, Input]] = []  # with the first index of each

    def begin(self, index: int, source: Input, line: int) -> None:
        """From this index on the lines run from this one."""
        self._starts.append(index)
        self._lines.append(line)
        if not self._sources or self._sources[-1][1] is not source:
            self._sources.append((index, source))

    def __getitem__(self, index: int) -> tuple[Input, int]:
        position = bisect.bisect_right(self._starts, index) - 1
        _, source = self._sources[bisect.bisect_right(self._sources, index, key=lambda each: each[0]) - 1]
        return source, self._lines[position] + index - self._starts[position]
