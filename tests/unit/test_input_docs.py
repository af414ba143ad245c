"""docs/input.md: its limits are those of the code, to the last one that is let through, and its recipes work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchjobs import sampling_fields, strict_json
from batchjobs.cli.console import PRINTED_ERRORS
from batchjobs.jsonl import (
    MAX_CUSTOM_ID_CHARACTERS,
    MAX_LINE_BYTES,
    MAX_METADATA_DEPTH,
    InvalidLineError,
    parse_line,
)
from batchjobs.response_format import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from batchjobs.submission import MAX_ERRORS
from batchjobs.types import DEFAULT_MAX_TOKENS, MAX_CHOICES, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS

PAGE = (Path(__file__).parents[2] / "docs" / "input.md").read_text()


def table_of(heading: str) -> dict[str, str]:
    """The first table below a heading, without its head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return dict(rows[2:]) if rows[1][0].startswith("-") else dict(rows[1:])


def test_the_limits_are_those_of_the_code() -> None:
    limits = {name: int(value.replace(",", "")) for name, value in table_of("Limits").items() if value[-1].isdigit()
              and value.replace(",", "").isdigit()}  # fmt: skip
    assert limits == {
        "bytes in a line": MAX_LINE_BYTES,
        "characters in a `custom_id`": MAX_CUSTOM_ID_CHARACTERS,
        "largest token id": sampling_fields._MAX_TOKEN_ID,
        "`n`": MAX_CHOICES,
        "`stop` strings": MAX_STOP_STRINGS,
        "`logprobs`, `top_logprobs`": MAX_TOP_LOGPROBS,
        "`max_tokens` where none is given": DEFAULT_MAX_TOKENS,
        "bytes of a schema, written without blanks": MAX_SCHEMA_BYTES,
        "objects and lists inside each other in a schema": MAX_SCHEMA_DEPTH,
        "characters in the name of a schema": 64,
        "objects and lists inside each other in `metadata`": MAX_METADATA_DEPTH,
        "errors that are kept; the input is not read any further, or with `skip` the rest is counted": MAX_ERRORS,
        "different errors that are printed; the rest is counted": PRINTED_ERRORS,
    }
    assert table_of("Limits")["digits of an integer"] == f"{strict_json.MAX_DIGITS}, up to 64 bits"


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def formatted(name: str = "n", schema: Any = None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema or {}}}


def titled(size: int) -> dict[str, Any]:
    return {"title": "x" * (size - len('{"title":""}'))}


@pytest.mark.parametrize(
    ("last", "first_refused"),
    [
        ({"custom_id": "é" * 512}, {"custom_id": "é" * 513}),
        ({"prompt": [2_147_483_647]}, {"prompt": [2_147_483_648]}),
        ({"stop_token_ids": [2_147_483_647]}, {"stop_token_ids": [2_147_483_648]}),
        ({"n": 128}, {"n": 129}),
        ({"stop": ["x"] * 16}, {"stop": ["x"] * 17}),
        ({"stop": ["x" * 100_000]}, {"stop": [""]}),
        ({"logprobs": 20}, {"logprobs": 21}),
        ({"top_logprobs": 20}, {"top_logprobs": 21}),
        ({"logit_bias": {"1": -100, "2": 100}}, {"logit_bias": {"1": -100.1}}),
        ({"response_format": formatted("n", titled(131_072))}, {"response_format": formatted("n", titled(131_073))}),
        ({"response_format": formatted(schema=nested(64))}, {"response_format": formatted(schema=nested(65))}),
        ({"response_format": formatted("x" * 64)}, {"response_format": formatted("x" * 65)}),
        ({"metadata": nested(200)}, {"metadata": nested(201)}),
        ({"metadata": {"a": 2**64 - 1, "b": -(2**63)}}, {"metadata": {"a": 2**64}}),
        ({"metadata": {"a": "x" * 1_000_000}}, {"metadata": {"a": -(2**63) - 1}}),
        ({"seed": 2**63 - 1}, {"seed": 2**63}),
    ],
)  # fmt: skip
def test_each_limit_is_the_last_value_that_is_taken(last: dict[str, Any], first_refused: dict[str, Any]) -> None:
    assert parse_line(json.dumps({"prompt": "a", **last}).encode(), 1, 0).index == 0
    with pytest.raises(InvalidLineError) as caught:
        parse_line(json.dumps({"prompt": "a", **first_refused}).encode(), 1, 0)
    assert caught.value.error.field
    assert re.split(r"[.\[]", caught.value.error.field)[0] == next(iter(first_refused))


def test_the_default_of_max_tokens_is_told_and_none_is_taken_from_metadata() -> None:
    assert parse_line(b'{"prompt":"a","metadata":{"max_tokens":5}}', 1, 0).body["max_tokens"] == 256


def test_the_recipe_for_csv_makes_lines(tmp_path: Path) -> None:
    section = PAGE.partition("## Files of another kind")[2]
    (shell,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    subprocess.run(["bash", "-ec", shell], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    found = [parse_line(raw, number, number).body["prompt"] for number, raw in
             enumerate((tmp_path / "in.jsonl").read_bytes().splitlines())]  # fmt: skip
    assert found == ["Why is the sky blue?", "Why, then, is it black at night?"]


def test_the_message_that_is_shown_is_the_one_that_is_printed() -> None:
    (shown,) = re.findall(r"^lines 1-10000: (.*)$", PAGE, re.MULTILINE)
    with pytest.raises(InvalidLineError) as caught:
        parse_line(b'{"input":"hi"}', 1, 0)
    assert caught.value.error.message == shown
