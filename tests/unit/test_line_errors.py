"""How errors of lines are told: one message for all lines that have it."""

from __future__ import annotations

import pytest

from batchjobs.cli.console import PRINTED_ERRORS, print_line_errors
from batchjobs.errors import LineError


def told(capsys: pytest.CaptureFixture[str], *errors: LineError) -> list[str]:
    print_line_errors(errors)
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def errors(*lines: int, message: str = "m", source: str | None = None) -> list[LineError]:
    return [LineError(line, message, source=source) for line in lines]


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        ([7], "line 7: "),
        ([7, 8], "lines 7-8: "),
        ([1, 2, 3, 7, 12], "lines 1-3, 7, 12: "),
        (range(1, 10_001), "lines 1-10000: "),
        ([1, 3, 5, 7, 9, 11], "lines 1, 3, 5, 7, 9, 11: "),
        ([1, 3, 5, 7, 9, 11, 13], "lines 1, 3, 5, 7, 9, 11 and 1 more: "),
        ([*range(1, 12, 2), *range(20, 5020)], "lines 1, 3, 5, 7, 9, 11 and 5,000 more: "),
    ],
)
def test_lines_with_one_error_have_one_message(
    capsys: pytest.CaptureFixture[str], lines: list[int], start: str
) -> None:
    assert told(capsys, *errors(*lines)) == [f"{start}m"]


def test_messages_stand_in_the_order_of_their_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = [LineError(1, "a"), LineError(2, "b"), LineError(3, "a"), LineError(4, "c"), LineError(5, "b")]
    assert told(capsys, *mixed) == ["lines 1, 3: a", "lines 2, 5: b", "line 4: c"]


def test_places_in_the_line_make_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = [LineError(n, f"from column {n + 5} to column 9; byte 3") for n in (3, 1, 2)]
    assert told(capsys, *mixed[:1]) == ["line 3: from column 8 to column 9; byte 3"]
    assert told(capsys, *sorted(mixed, key=lambda error: error.line)) == [
        "lines 1-3: from column 6 to 8 to column 9; byte 3"
    ]


def test_a_name_that_looks_like_a_place_is_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = [LineError(n, f'unknown field "{name}"') for n, name in enumerate(("column", "column 7", "column #"), 1)]
    assert told(capsys, *mixed) == [
        'line 1: unknown field "column"',
        'line 2: unknown field "column 7"',
        'line 3: unknown field "column #"',
    ]


def test_each_file_has_its_own_messages(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = [*errors(1, 2, source="a.jsonl"), *errors(1, source="b.jsonl")]
    assert told(capsys, *mixed) == ["a.jsonl, lines 1-2: m", "b.jsonl, line 1: m"]


def test_the_first_messages_are_printed_and_the_rest_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A file name or an id from outside is shown, not obeyed."""
    many = [LineError(line, f"\x1b[2J{line}") for line in range(1, 31)]
    shown = told(capsys, *many, *errors(*range(31, 1031)))
    assert shown[0] == "line 1: \\x1b[2J1"
    assert shown[PRINTED_ERRORS - 1] == "line 20: \\x1b[2J20"
    assert shown[PRINTED_ERRORS:] == ["... and 1,010 more; --json prints all of them"]
