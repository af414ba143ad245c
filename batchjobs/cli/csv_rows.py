"""Rows as CSV in UTF-8, with LF at the end of each. Cells are exactly what is given."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable


class CsvRows:
    """Writes rows to ``out``. None is an empty cell. All that ends a line for some reader is inside of quotes."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._row = io.StringIO(newline="")
        # With this line end, the csv module quotes cells with a CR too; the row that is written ends at LF.
        self._csv = csv.writer(self._row, lineterminator="\r\n")

    def write(self, cells: Iterable[object]) -> None:
        self._csv.writerow(cells)
        self._out.write(self._row.getvalue()[:-2].encode() + b"\n")
        self._row.seek(0)
        self._row.truncate()
