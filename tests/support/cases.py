"""Faults that people met in tools, engines, queues and stores of this kind. Each has an id, and tests marked with it.

@case("A-in-01")                                  a test that stands for the whole of it, or for a part
pytest.param(..., marks=case("A-in-04"))          one row of a table of cases

`pytest -m case --cases` runs them and prints which tests stand for which id, and how they ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBERS = {
    "in": 21,  # what comes in
    "sp": 16,  # sampling parameters
    "tok": 11,  # tokens and text
    "ctx": 5,  # length of the context
    "num": 5,  # numbers
    "eng": 11,  # life of an engine
    "q": 11,  # the queue
    "sql": 9,  # the databases
    "out": 6,  # what comes out
    "cli": 4,  # the command line
    "sec": 9,  # security
}
CASES = tuple(f"A-{area}-{number:02d}" for area, count in _NUMBERS.items() for number in range(1, count + 1))


def case(*ids: str) -> pytest.MarkDecorator:
    """Marks a test as standing for these cases. Raises ValueError for an id that there is not."""
    if unknown := set(ids) - set(CASES):
        raise ValueError(f"no such cases: {', '.join(sorted(unknown))}")
    return pytest.mark.case(*ids)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", action="store_true", help="print a table of the cases, their tests and verdicts")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        ids = [name for mark in item.iter_markers("case") for name in mark.args]
        if ids:  # travels with the report, also from another process
            item.user_properties.append(("cases", ids))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--cases"):
        return
    tests: dict[str, dict[str, str]] = defaultdict(dict)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name in dict(getattr(report, "user_properties", ())).get("cases", ()):
                tests[name][report.nodeid] = outcome
    terminalreporter.section("cases")
    totals: Counter[str] = Counter()
    for name in CASES:
        found = tests.get(name, {})
        worst = next((outcome for outcome in ("failed", "error", "skipped") if outcome in found.values()), "passed")
        verdict = worst if found else "no test"
        totals[verdict] += 1
        first = next((node for node, outcome in found.items() if outcome == worst), "")
        terminalreporter.write_line(f"{name:<9} {verdict:<8} {len(found):>3}  {first}")
    terminalreporter.write_line(", ".join(f"{count} {verdict}" for verdict, count in totals.items()))
