"""Every known fault of others has a test here that is marked with its id, and says what is done about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cases import CASES, case

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/known-faults.md"


def test_each_case_marks_a_test() -> None:
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    marks = re.findall(r"\bcase\(([^)]*)\)", sources)
    marked = {name for mark in marks for name in re.findall(r'"(A-\w+-\d+)"', mark)}
    assert sorted(set(CASES) - marked) == []


def test_each_case_has_its_row() -> None:
    """In order: the fault, and what batchjobs does."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| A-")]
    assert tuple(row[0] for row in rows) == CASES
    assert [row for row in rows if len(row) != 3 or not all(row)] == []


def test_an_id_with_a_typo_is_refused() -> None:
    with pytest.raises(ValueError, match="A-in-99"):
        case("A-in-01", "A-in-99")
