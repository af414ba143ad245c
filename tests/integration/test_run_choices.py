"""Choices, echo and response formats the whole way: from input lines through a real engine to every form of output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cases import case
from tests.support.models import save_chat_model

if TYPE_CHECKING:
    from tests.support.machine import Machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


COLOUR = {"prompt": "Name a colour", "seed": 7, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
BAD_SCHEMA = {"type": "object", "properties": {"foo": "bar"}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": BAD_SCHEMA}}
LINES = [
    {"custom_id": "four", **COLOUR, "n": 4},
    {"custom_id": "one", **COLOUR},
    {"custom_id": "again", **COLOUR},
    completion("echo", prompt="\n1. Carol has 20", echo=True, logprobs=1, max_tokens=3, ignore_eos=True),
    completion("score", prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1),
    {"custom_id": "bad", "prompt": "car", "response_format": BAD_FORMAT},
]


def read(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


@case("A-sp-04", "A-sp-09", "A-sp-15", "A-tok-11")
def test_from_lines_to_every_output(embedded: Machine, tmp_path: Path) -> None:
    source, flat = tmp_path / "in.jsonl", tmp_path / "flat.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    embedded.call("run", str(source), "-o", str(flat), code=5)
    rows = read(flat)
    assert list(rows) == ["four", "one", "again", "echo", "score", "bad"]
    _check_colours(rows)

    [listed] = embedded.call("list", "--json").splitlines()
    status = json.loads(listed)
    assert (status["counts"]["total"], status["counts"]["completed"], status["counts"]["failed"]) == (6, 5, 1)
    assert status["tokens"]["completion"] == 4 * 8 + 8 + 8 + 3
    out, errors = tmp_path / "openai.jsonl", tmp_path / "errors.jsonl"
    embedded.call("results", status["id"], "--format", "openai", "-o", str(out), "--errors", str(errors))
    bodies = {name: line["response"]["body"] for name, line in read(out).items()}
    assert [choice["text"] for choice in bodies["four"]["choices"]] == [c["text"] for c in rows["four"]["choices"]]
    assert bodies["four"]["usage"]["completion_tokens"] == 32
    _check_echo(bodies["echo"]["choices"][0], "\n1. Carol has 20", 3)
    _check_echo(bodies["score"]["choices"][0], "The sky is blue", 0)
    assert bodies["score"]["choices"][0]["text"] == "The sky is blue"

    assert rows["bad"]["text"] == ""
    assert read(errors)["bad"]["response"] is None
    assert read(errors)["bad"]["error"]["code"] in ("invalid_response_format", "response_format_not_supported")


def _check_colours(rows: dict[str, Any]) -> None:
    """Four streams from one seed; the lines that ask for one choice are equal to each other."""
    four = [choice["token_ids"] for choice in rows["four"]["choices"]]
    assert len({tuple(ids) for ids in four}) == 4
    assert rows["one"]["token_ids"] == rows["again"]["token_ids"] == rows["four"]["token_ids"] == four[0]
    assert "choices" not in rows["one"]


def _check_echo(choice: dict[str, Any], prompt: str, generated: int) -> None:
    """An entry for every token, the first one null, offsets into the text."""
    assert choice["text"].startswith(prompt)
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    lengths = {name: len(values) for name, values in logprobs.items()}
    of_prompt = sum(offset < len(prompt) for offset in logprobs["text_offset"])
    assert set(lengths.values()) == {of_prompt + generated}
    assert logprobs["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"][:of_prompt]) == prompt
    for token, offset in zip(logprobs["tokens"][:of_prompt], logprobs["text_offset"], strict=False):
        assert choice["text"].startswith(token, offset)
