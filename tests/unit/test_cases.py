"""Every known fault of others has a test here that is marked with its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cases import CASES, case

TESTS = Path(__file__).parents[1]


def test_each_case_marks_a_test() -> None:
    sources = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    marked = {name for marks in re.findall(r"\bcase\(([^)]*)\)", sources) for name in re.findall(r'"(A-\w+-\d+)"', marks)}
    assert sorted(set(CASES) - marked) == []


def test_an_id_with_a_typo_is_refused() -> None:
    with pytest.raises(ValueError, match="A-in-99"):
        case("A-in-01", "A-in-99")
