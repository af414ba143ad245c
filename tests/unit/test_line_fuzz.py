"""Input lines of every kind, drawn at random: understood or refused in one short sentence, whatever they hold.

`python -m tests.fuzz.lines` does the same a million times with mutations; here Hypothesis draws, and shrinks.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchjobs.jsonl import InvalidLineError, parse_line
from tests.fuzz.line_checks import check_line, same
from tests.fuzz.line_mutants import MUTANTS, first_failure, planted
from tests.fuzz.line_mutators import NAMES, SEEDS, VALUES
from tests.fuzz.lines import MOST_FAILURES, check_stream, hunt, main

GOOD = [json.dumps(seed, ensure_ascii=False).encode() for seed in SEEDS[:9]]
SECRET = "Zq7 my secret"

numbers = st.integers() | st.integers(-2, 200) | st.floats()
values = st.sampled_from(VALUES) | st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), values, max_size=4)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "developer"]), "content": st.text(max_size=9)},
        optional={"name": values},
    ),
    max_size=3,
)
plain = st.builds(lambda prompt, rest: {**rest, **prompt}, st.fixed_dictionaries({"prompt": st.text(max_size=9)})
                  | st.fixed_dictionaries({"messages": messages}), fields)  # fmt: skip
urls = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses"])
envelopes = st.builds(
    lambda url, body: {"custom_id": "x", "method": "POST", "url": url, "body": body}, urls, plain | fields
)

edits = st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3))  # where, how many bytes go, what comes
pieces = st.sampled_from([*GOOD, b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\x1f\x8b"])


def written(value: Any, spaced: bool = False) -> bytes:
    separators = (" , ", "\t: ") if spaced else (",", ":")
    return json.dumps(value, ensure_ascii=spaced, separators=separators).encode("utf-8", "surrogatepass")


@settings(max_examples=200, deadline=None)
@given(plain | envelopes | fields | values, st.booleans())
def test_json_near_the_grammar_of_lines(value: Any, spaced: bool) -> None:
    check_line(written(value, spaced).replace(b"\n", b" "))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(GOOD), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3)), max_size=4)
)
def test_good_lines_with_other_bytes_in_them(line: bytes, made: list[tuple[float, int, bytes]]) -> None:
    for place, removed, put in made:
        at = int(place * len(line))
        line = line[:at] + put + line[at + removed :]
    check_line(line)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=20) | pieces, max_size=12), st.integers(0, 9))
def test_files_of_any_bytes(parts: list[bytes], damage: int) -> None:
    content = b"".join(parts)
    check_stream(content, Random(damage))
    for line in content.split(b"\n"):
        check_line(line)


@settings(max_examples=100, deadline=None)
@given(fields, st.booleans())
def test_what_is_said_about_a_line_holds_nothing_of_its_texts(rest: dict[str, Any], chat: bool) -> None:
    texts = {"messages": [{"role": "user", "content": SECRET}]} if chat else {"prompt": SECRET}
    said = verdict(written({**rest, **texts, "metadata": {"m": SECRET}}), 0)
    assert not (isinstance(said, str) and SECRET in said)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(GOOD) | st.binary(max_size=12) | fields.map(written), min_size=2, max_size=8))
def test_neighbours_change_nothing(lines: list[bytes]) -> None:
    alone = [verdict(line, number) for number, line in enumerate(lines)]
    assert all(said.startswith(f"line {number}: ") for number, said in enumerate(alone, 1) if isinstance(said, str))
    for number in reversed(range(len(lines))):
        again = verdict(lines[number], number)
        assert type(again) is type(alone[number])
        if isinstance(again, str):
            assert again == alone[number]
        else:
            assert same(again, alone[number], lines[number])


def verdict(line: bytes, number: int) -> Any:
    try:
        return parse_line(line, number + 1, number)
    except InvalidLineError as refusal:
        return str(refusal)


# ------------------------------------------------------------------------------------------------ the mutation loop


def test_a_few_thousand_of_the_mutated_lines() -> None:
    """`make fuzz` runs a million."""
    found = hunt(seed=5, inputs=2500)
    assert [str(failure) for failure in found.failures] == []
    assert found.verdicts["accepted"] > 300
    assert found.verdicts.keys() == {"accepted", "invalid_request", "invalid_json", "invalid_utf8"}
    assert found.streams == 125
    assert len(found.shapes) > 300


@pytest.mark.parametrize(
    "name",
    [
        "repeated_keys_are_overlooked", "names_are_repeated_whole", "sampling_is_remembered_by_its_keys",
        "roles_of_any_type", "a_field_is_dropped", "blank_lines_are_not_counted", "lines_end_where_unicode_says",
    ],
)  # fmt: skip
def test_the_loop_finds_a_bug_that_was_put_in(name: str) -> None:
    """The others take longer: `python -m tests.fuzz.line_mutants`."""
    found = first_failure(MUTANTS[name])
    assert found is not None
    assert found[0] < 2000


def test_a_failure_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    with planted(MUTANTS["a_field_is_dropped"]):
        found = hunt(seed=1, inputs=4000)
        assert len(found.failures) == MOST_FAILURES
        short = min(found.failures, key=lambda failure: len(failure.raw))
        command = str(short).splitlines()[1].removeprefix("    to repeat: python -m tests.fuzz.lines ").split()
        assert command == ["--input", short.raw.hex()]
        assert main(command) == 1
        assert capsys.readouterr().out == f"broken: {short.problem}\n"
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(("accepted: ", "invalid_request: "))
