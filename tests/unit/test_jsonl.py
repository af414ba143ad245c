# ruff: noqa: E501 - the tables of cases have one case a line
"""Lines -> requests: what is understood, and how each refusal names its line and field."""

from __future__ import annotations

import difflib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjobs.errors import UsageError
from batchjobs.jsonl import MAX_LINE_BYTES, InvalidLineError, open_input, parse_line, read_lines_of
from batchjobs.sampling_fields import Defaults
from batchjobs.store.rows import request_row
from batchjobs.types import Endpoint, Request
from tests.support.cases import case


def lines_of(content: bytes) -> list[tuple[int, bytes]]:
    return list(read_lines_of(io.BytesIO(content), "the input"))


def parse(line: bytes | str | dict[str, Any], index: int = 0, **defaults: Any) -> Request:
    raw = json.dumps(line).encode() if isinstance(line, dict) else line.encode() if isinstance(line, str) else line
    return parse_line(raw, 7, index, Defaults(defaults))


def refusal(line: bytes | str | dict[str, Any]) -> tuple[str | None, str]:
    with pytest.raises(InvalidLineError) as caught:
        parse(line)
    assert caught.value.error.line == 7
    return caught.value.error.field, caught.value.error.message


def openai(body: Any, url: str = "/v1/chat/completions", **envelope: Any) -> dict[str, Any]:
    return {"custom_id": "x", "method": "POST", "url": url, "body": body, **envelope}


def chat(**fields: Any) -> dict[str, Any]:
    return openai({"messages": [{"role": "user", "content": "Hi"}], **fields})


def completion(**fields: Any) -> dict[str, Any]:
    return openai({"prompt": "Hi", **fields}, "/v1/completions")


# ------------------------------------------------------------------------------------------------ bytes -> lines


@case("A-in-01")
def test_byte_order_mark_is_dropped() -> None:
    assert lines_of(b'\xef\xbb\xbf{"prompt":"a"}\n{"prompt":"b"}\n') == [(1, b'{"prompt":"a"}'), (2, b'{"prompt":"b"}')]


@case("A-in-02")
def test_lines_end_at_line_feeds_only() -> None:
    """U+2028, U+2029 and U+0085 are text."""
    ((_, raw),) = lines_of('{"prompt":"a\u2028b\u0085c\u2029d"}\n'.encode())
    assert parse(raw).body["prompt"] == "a\u2028b\u0085c\u2029d"


@case("A-in-06")
def test_blank_lines_are_skipped_and_counted() -> None:
    assert lines_of(b'{"a":1}\n\n   \n{"b":1}\n\n\n') == [(1, b'{"a":1}'), (4, b'{"b":1}')]


@case("A-in-07")
def test_carriage_returns_before_line_feeds_go() -> None:
    assert lines_of(b'{"a":1}\r\n{"b":1}\r\n{"c":1}') == [(1, b'{"a":1}'), (2, b'{"b":1}'), (3, b'{"c":1}')]


def test_empty_input_has_no_lines() -> None:
    assert lines_of(b"") == []


@case("A-in-18")
def test_gzip_is_unpacked_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "z.jsonl"
    path.write_bytes(gzip.compress(b'{"prompt":"a"}\n{"prompt":"b"}\n'))
    with open_input(path) as stream:
        assert list(read_lines_of(stream, path.name)) == [(1, b'{"prompt":"a"}'), (2, b'{"prompt":"b"}')]


@case("A-in-18")
def test_gzip_in_gzip_and_damaged_gzip_are_told() -> None:
    packed = gzip.compress(b'{"prompt":"a"}\n' * 1000)
    with pytest.raises(UsageError, match="gzip-compressed twice"):
        lines_of(gzip.compress(packed))
    with pytest.raises(UsageError, match="damaged"):
        lines_of(packed[:-20])


@case("A-in-21")
def test_an_overlong_line_is_refused_and_its_neighbours_are_read() -> None:
    """The line limit is a line error."""
    long = b'{"prompt":"' + b"x" * (MAX_LINE_BYTES + 5_000_000) + b'"}'
    found = lines_of(b'{"prompt":"a"}\n' + long + b'\n{"prompt":"b"}\n')
    assert [number for number, _ in found] == [1, 2, 3]
    assert len(found[1][1]) <= MAX_LINE_BYTES + 2
    assert refusal(found[1][1]) == (None, "longer than 8 MiB, the most a line may have")
    assert found[2][1] == b'{"prompt":"b"}'


def test_a_line_of_exactly_the_limit_is_read() -> None:
    frame = len(b'{"prompt":""}')
    ((_, raw),) = lines_of(b'{"prompt":"' + b"x" * (MAX_LINE_BYTES - frame) + b'"}\r\n')
    assert len(raw) == MAX_LINE_BYTES
    assert len(parse(raw).body["prompt"]) == MAX_LINE_BYTES - frame


def test_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none.jsonl: No such file"):
        open_input(tmp_path / "none.jsonl")


# --------------------------------------------------------------------------------------------------- strict JSON


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        pytest.param(b'{"prompt":"\xe6\x87"}', None, "invalid UTF-8 at byte 12; save the file as UTF-8", marks=case("A-in-03")),
        pytest.param(b"[1,2,3]", None, "each line must be a JSON object, not a list", marks=case("A-in-04")),
        pytest.param(b'"hello"', None, "each line must be a JSON object, not a string", marks=case("A-in-04")),
        pytest.param(b"null", None, "each line must be a JSON object, not null", marks=case("A-in-04")),
        pytest.param(b'{"prompt":"a","temperature":NaN}', "temperature", "temperature is NaN, which is no JSON number", marks=case("A-in-20")),
        pytest.param(b'{"prompt":"a","top_p":1e999}', "top_p", "top_p is too large for a number", marks=case("A-in-20")),
        pytest.param(b'{"prompt":"a","metadata":{"s":-Infinity}}', "metadata.s", "metadata.s is -Infinity, which is no JSON number", marks=case("A-in-20")),
        (b'{"prompt":"a","prompt":"b"}', "prompt", "prompt is given more than once"),
        (b'{"prompt":"a","metadata":{"k": 1,"k" :2}}', "metadata.k", "metadata.k is given more than once"),
        (b'{"prompt":"\\":","n" :1,"n" :2}', "n", "n is given more than once"),
        (b'{"prompt":"a","n"\r:1,"n":2}', "n", "n is given more than once"),
        (b'{"prompt":"a","metadata":[[1,{"k":1}],{"k":1,"k":2}]}', "metadata[1].k", "metadata[1].k is given more than once"),
        (b'{"prompt":"a: \\"b\\": c","max_tokens":1,"max_tokens" : 2}', "max_tokens", "max_tokens is given more than once"),
        pytest.param(b'{"prompt":"bad \\udbc0 char"}', "prompt", "prompt holds half of a surrogate pair (\\udbc0)", marks=case("A-tok-08")),
        pytest.param(b'{"prompt":"a\\u0000b"}', "prompt", "prompt holds a NUL character (\\u0000)", marks=case("A-sql-01")),
        pytest.param(b'{"prompt":"a","metadata":{"k\\u0000":1}}', 'metadata."k\\x00"', None, marks=case("A-sql-01")),
        (b'{"prompt": "a", }', None, "not valid JSON: a comma too many at column 15"),
        (b'{"prompt":"a"} x', None, "not valid JSON: there is more behind the value, at column 16"),
        (b'{"prompt":"a', None, 'not valid JSON: the text that begins at column 11 has no closing "; a line break in a text is written \\n'),
        (b'{"prompt":"a","metadata":' + b'{"a":' * 900 + b"1" + b"}" * 901, None, "not valid JSON: nested too deeply"),
        (b'{"prompt":"a","metadata":' + b'{"a":' * 300 + b"1" + b"}" * 301, "metadata", "metadata is nested more than 200 deep"),
        (b'{"prompt":"a","metadata":{"n":123456789012345678901}}', "metadata.n", None),
    ],
)  # fmt: skip
def test_loose_json_is_refused(raw: bytes, field: str | None, message: str | None) -> None:
    found_field, found = refusal(raw)
    assert found_field == field
    assert message is None or found == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt":"a"},', "a comma too many at column 15"),
        ('{"stop":["a",]}', "a comma too many at column 13"),
        ("{,}", "a comma too many at column 2"),
        ("{'prompt':'a'}", "a single quote at column 2; JSON has double quotes alone (in Python, json.dumps writes them)"),
        ("{“prompt”:“a”}", "a curly quote at column 2; JSON has straight double quotes alone"),
        ('{"prompt":"a","echo":True}', "True at column 22; JSON has true, false and null"),
        ('{"prompt":"a","seed":None}', "None at column 22; JSON has true, false and null"),
        ('{"prompt":"a"} // x', "a comment at column 16; JSON has none"),
        ('{"prompt":"a" /* x */}', "a comment at column 15; JSON has none"),
        ('# {"prompt":"a"}', "a comment at column 1; JSON has none"),
        ('{"prompt":"a"}{"prompt":"b"}', "another object begins at column 15; write one on each line"),
        ('{"prompt":"a"} b', "there is more behind the value, at column 16"),
        ('{"prompt":', "it ends at column 11, in the middle of an object or a list"),
        ('{"prompt":"a"', "it ends at column 14, in the middle of an object or a list"),
        ('{"prompt" "a"}', "a colon is wanted at column 11"),
        ('{prompt:"a"}', "a name in double quotes is wanted at column 2"),
        ('{"prompt":a}', "a value is wanted at column 11"),
        ('{"prompt":"say "hi""}', 'a comma or the end is wanted at column 17; a quote in a text is written \\"'),
        ('{"prompt":"a\tb"}', "a control character at column 13; a tab in a text is written \\t, a line break \\n"),
        ('{"prompt":"C:\\dir"}', "a single backslash at column 14; in a text it is written \\\\"),
        ('{"prompt":"\\u12"}', "an incomplete \\u escape at column 13"),
        ('\ufeff{"prompt":"a"}', "a byte order mark at column 1; remove it"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_with_its_column(line: str, message: str) -> None:
    assert refusal(line) == (None, f"not valid JSON: {message}")


@case("A-in-05")
def test_a_number_of_5000_digits_is_refused_briefly() -> None:
    field, message = refusal('{"prompt":"a","max_tokens":' + "9" * 5000 + "}")
    assert (field, message) == ("max_tokens", "max_tokens has 5000 digits, more than 64 bits hold")


@case("A-tok-08")
def test_surrogate_pairs_and_colons_in_texts_are_fine() -> None:
    assert parse(b'{"prompt":"good \\ud83d\\ude00"}').body["prompt"] == "good \U0001f600"
    assert parse(b'{"prompt": ":a \\"b\\": \\\\u0000", "temperature" : 0}').body["prompt"] == ':a "b": \\u0000'


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text(max_size=5), lambda v: st.lists(v) | st.dictionaries(
    st.text(max_size=3), v, max_size=3), max_leaves=5), max_size=4), st.booleans())  # fmt: skip
def test_no_good_object_is_taken_for_one_with_repeated_keys(value: dict[str, Any], spaced: bool) -> None:
    from batchjobs import strict_json

    separators = (" , ", "\t: ") if spaced else (",", ":")
    try:
        raw = json.dumps(value, ensure_ascii=False, separators=separators).encode()
    except UnicodeEncodeError:
        return
    if b"\\u0000" not in raw:
        assert strict_json.loads(raw) == value
    first, *_ = [*value, "k"]
    repeated = json.dumps({first: 1})[:-1] + "," + json.dumps({first: value})[1:]
    if b"\\ud" not in repeated.encode() and "\\u0000" not in repeated:
        with pytest.raises(ValueError, match="given more than once"):
            strict_json.loads(repeated.encode())


# --------------------------------------------------------------------------------------------------- plain lines


@case("A-sp-10")
def test_a_plain_prompt_gets_id_limit_and_seed() -> None:
    request = parse({"prompt": "a"}, index=3)
    assert (request.index, request.custom_id, request.endpoint) == (3, "request-3", Endpoint.COMPLETIONS)
    assert request.body.keys() == {"prompt", "max_tokens", "seed"}
    assert request.body["max_tokens"] == 256
    assert 0 <= request.body["seed"] < 2**53


def test_a_greedy_line_gets_no_seed_and_a_given_seed_stays() -> None:
    assert parse({"prompt": "a", "temperature": 0}).body == {"prompt": "a", "max_tokens": 256, "temperature": 0}
    assert parse({"prompt": "a", "seed": 42}).body["seed"] == 42
    assert parse({"prompt": "a"}).body["seed"] != parse({"prompt": "a"}).body["seed"]


def test_plain_messages_become_a_chat() -> None:
    request = parse({"custom_id": "q1", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0})
    assert request.endpoint is Endpoint.CHAT
    assert request.custom_id == "q1"
    assert request.body["messages"] == [{"role": "user", "content": "Hi"}]


def test_token_ids_are_a_prompt() -> None:
    assert parse({"prompt": [1, 2, 3], "temperature": 0}).body["prompt"] == [1, 2, 3]


def test_sampling_fields_are_stored_where_they_differ_from_the_defaults() -> None:
    fields = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "stop": "END", "logit_bias": {"5": -1.5}, "seed": 1}
    assert parse({"prompt": "a", **fields}).body == {
        "prompt": "a",
        "max_tokens": 256,
        "temperature": 0.5,
        "stop": ["END"],
        "logit_bias": {"5": -1.5},
        "seed": 1,
    }


def test_null_counts_as_absent() -> None:
    line = {"custom_id": None, "prompt": "a", "temperature": 0, "stop": None, "n": None, "model": None, "tools": None}
    assert parse(line).body == {"prompt": "a", "max_tokens": 256, "temperature": 0}


def test_labels_are_kept() -> None:
    body = parse({"prompt": "a", "temperature": 0, "model": "m", "metadata": {"k": [1, "v"]}}).body
    assert body["model"] == "m"
    assert body["metadata"] == {"k": [1, "v"]}


def test_a_line_may_be_pinned_to_a_version_of_the_model() -> None:
    plain, in_openai, default = {"prompt": "a"}, completion(), "sha256:fedcba9876543210"
    for line, fields in ((plain, plain), (in_openai, in_openai["body"])):
        assert parse(line).model_version is None
        assert parse_line(json.dumps(line).encode(), 1, 0, Defaults(model_version=default)).model_version == default
        fields["model_version"] = "sha256:0123456789abcdef"
        pinned = parse_line(json.dumps(line).encode(), 1, 0, Defaults(model_version=default))
        assert pinned.model_version == "sha256:0123456789abcdef"
        assert not hasattr(pinned.sampling, "model_version")
        fields["model_version"] = None
        assert parse_line(json.dumps(line).encode(), 1, 0, Defaults(model_version=default)).model_version == default
    assert refusal({**in_openai, "body": {"prompt": "a", "model_version": 5}}) == (
        "body.model_version",
        "model_version must be a string, not an integer",
    )


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        pytest.param({}, None, "neither prompt or messages nor custom_id, method, url and body found (the line is empty)", marks=case("A-in-15")),
        pytest.param({"input": "hi"}, None, "neither prompt or messages nor custom_id, method, url and body found (the line has: input); did you mean prompt instead of input?", marks=case("A-in-15")),
        pytest.param({"custom_id": "1", "params": {}}, None, "missing method, url, body; or prompt or messages, for a plain line (the line has: params); this is a line for the Anthropic API; write the messages and max_tokens of its params beside custom_id", marks=case("A-in-13")),
        ({"prompt": "a", "messages": []}, "messages", "prompt and messages exclude each other; give one of them"),
        pytest.param({"prompt": ""}, "prompt", "prompt must not be empty", marks=case("A-ctx-04")),
        pytest.param({"prompt": []}, "prompt", "prompt must not be empty", marks=case("A-ctx-04")),
        ({"prompt": None}, "prompt", "prompt must be a string or a list of token ids, not null"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt must be one prompt; write one line for each"),
        ({"prompt": [1, -2]}, "prompt[1]", "prompt[1]: -2 is not a token id"),
        ({"prompt": [1, True]}, "prompt[1]", "prompt[1] must be a token id, not a boolean"),
        pytest.param({"prompt": "a", "custom_id": 1}, "custom_id", "custom_id must be a string, not an integer", marks=case("A-in-10")),
        ({"prompt": "a", "custom_id": ""}, "custom_id", "custom_id must not be empty"),
        pytest.param({"prompt": "a", "custom_id": "x" * 513}, "custom_id", "custom_id is longer than 512 characters", marks=case("A-q-01")),
        ({"prompt": "a", "temprature": 1}, "temprature", 'unknown field "temprature"; did you mean temperature?'),
        ({"prompt": "a", "temperature": "0.5"}, "temperature", "temperature must be a number, not a string"),
        ({"prompt": "a", "temperature": True}, "temperature", "temperature must be a number, not a boolean"),
        pytest.param({"prompt": "a", "temperature": 2.5}, "temperature", "temperature must be from 0 to 2, not 2.5", marks=case("A-num-03")),
        pytest.param({"prompt": "a", "temperature": -1}, "temperature", "temperature must be from 0 to 2, not -1", marks=case("A-num-03")),
        pytest.param({"prompt": "a", "top_p": 0}, "top_p", "top_p must be over 0 and at most 1, not 0", marks=case("A-sp-11")),
        ({"prompt": "a", "seed": 99999999999999999999}, "seed", "seed must be a 64-bit integer"),
        ({"prompt": "a", "seed": 1.5}, "seed", "seed must be an integer, not a number"),
        ({"prompt": "a", "max_tokens": 10.0}, "max_tokens", "max_tokens must be an integer, not a number"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens must be 1 or more, not 0"),
        pytest.param({"prompt": "a", "min_tokens": 9, "max_tokens": 5}, "min_tokens", "min_tokens must be from 0 to max_tokens, not 9", marks=case("A-sp-08")),
        ({"prompt": "a", "seed": 2**63}, "seed", f"seed must be a 64-bit integer, not {2**63}"),
        pytest.param({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "presence_penalty must be from -2 to 2, not 3", marks=case("A-sp-14")),
        pytest.param({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be over 0, not 0", marks=case("A-sp-14")),
        pytest.param({"prompt": "a", "stop": ""}, "stop", "stop must not be empty: an empty string matches everywhere", marks=case("A-sp-01")),
        pytest.param({"prompt": "a", "stop": ["", "END"]}, "stop", "stop must not be empty: an empty string matches everywhere", marks=case("A-sp-01")),
        ({"prompt": "a", "stop": [1]}, "stop", "stop must be a string or a list of strings, not an integer"),
        pytest.param({"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias", 'logit_bias: "-1" is not a token id', marks=case("A-sp-07")),
        pytest.param({"prompt": "a", "logit_bias": {"abc": 5}}, "logit_bias", 'logit_bias: "abc" is not a token id', marks=case("A-sp-07")),
        ({"prompt": "a", "logit_bias": {"5": 500}}, "logit_bias", "logit_bias maps token ids to numbers from -100 to 100"),
        ({"prompt": "a", "n": 0}, "n", "n must be from 1 to 128, not 0"),
        ({"prompt": "a", "n": 129}, "n", "n must be from 1 to 128, not 129"),
        ({"prompt": "a", "n": 2.0}, "n", "n must be an integer, not a number"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "best_of must equal n, which is 2: every choice is given out, none is dropped"),
        ({"prompt": "a", "best_of": 2}, "best_of", "best_of must equal n, which is 1: every choice is given out, none is dropped"),
        ({"prompt": "a", "echo": 1}, "echo", "echo must be true or false, not an integer"),
        ({"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo", "echo repeats the prompt of a completion; a chat has none to repeat, so leave it out"),
        ({"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens", "max_tokens must be 1 or more, not 0"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens", "max_tokens must be 1 or more, not -1"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "min_tokens must be from 0 to max_tokens, not 1"),
        ({"prompt": "a", "metadata": "x"}, "metadata", "metadata must be an object, not a string"),
        ({"prompt": "a", "model": ""}, "model", "model must not be empty"),
        ({"prompt": "a", "model_version": ""}, "model_version", "model_version must not be empty"),
        ({"prompt": "a", "model_version": ["v"]}, "model_version", "model_version must be a string, not a list"),
        ({"prompt": "a", "model_version": "v2"}, "model_version", 'model_version must be sha256: and 16 of the digits 0 to f, as `batchjobs model list` shows it, not "v2"'),
        ({"prompt": "a", "modelversion": "v"}, "modelversion", 'unknown field "modelversion"; did you mean model_version?'),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "chat_template_kwargs is only for chats"),
        pytest.param({"messages": []}, "messages", "messages must not be empty", marks=case("A-tok-10")),
        pytest.param({"prompt": "a", "chat_template": "{{ 7*7 }}"}, "chat_template", "chat_template is not supported: a line cannot bring its own template", marks=case("A-sec-03")),
    ],
)  # fmt: skip
def test_plain_lines_are_refused_by_field(line: dict[str, Any], field: str | None, message: str) -> None:
    assert refusal(line) == (field, message)


def formatted(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object"}, **schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ("json", "", 'response_format must be an object such as {"type": "json_object"}, not a string'),
        ({}, ".type", "response_format.type must be a string, not null"),
        ({"type": "xml"}, ".type", 'response_format.type: "xml" is not supported; accepted: text, json_object, json_schema'),
        ({"type": "json_object", "schema": {}}, ".schema", 'unknown field "schema"; accepted: type'),
        ({"type": "text", "json_schema": {}}, ".json_schema", 'unknown field "json_schema"; accepted: type'),
        ({"type": "json_schema"}, ".json_schema", "response_format.json_schema must be an object with name and schema, not null"),
        (formatted(schema=None), ".json_schema.schema", "response_format.json_schema.schema must be an object, not null"),
        (formatted(schema="x"), ".json_schema.schema", "response_format.json_schema.schema must be an object, not a string"),
        (formatted(strct=True), ".json_schema.strct", 'unknown field "strct"; did you mean strict?'),
        (formatted(strict="yes"), ".json_schema.strict", "response_format.json_schema.strict must be true or false, not a string"),
        (formatted(name="a b"), ".json_schema.name", "response_format.json_schema.name must be 1 to 64 letters, digits, _ and -"),
        (formatted(schema=nested(65)), ".json_schema.schema", "response_format.json_schema.schema is nested more than 64 deep"),
        (formatted(schema={"title": "x" * 131_072}), ".json_schema.schema", "response_format.json_schema.schema is longer than 128 KiB"),
        (formatted(schema=nested(400)), "", "response_format is nested too deeply"),
    ],
)  # fmt: skip
@case("A-sp-15")
def test_response_formats_are_refused_by_field(value: Any, field: str, message: str) -> None:
    """What can be known without a model is said at once."""
    assert refusal({"prompt": "a", "response_format": value}) == (f"response_format{field}", message)
    assert refusal(chat(response_format=value)) == (f"body.response_format{field}", message)


@pytest.mark.parametrize(
    "value",
    [{"type": "json_object"}, formatted(), formatted(strict=True, description="d", schema={"properties": {"foo": "bar"}})],
)  # fmt: skip
def test_a_response_format_is_stored_as_it_is(value: Any) -> None:
    """Whether a grammar can be made of the schema, only a worker can tell."""
    for line in ({"prompt": "a", "response_format": value}, chat(response_format=value)):
        assert parse(line).body["response_format"] == value
        assert parse(line).sampling.response_format == value
    assert parse({"prompt": "a", "response_format": formatted(schema=nested(64))}).sampling.response_format
    assert "response_format" not in parse(chat(response_format={"type": "text"}), response_format=value).body


def test_numbers_in_a_schema_are_not_rounded() -> None:
    schema = b'{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"maximum":%d}}}}'
    field, message = refusal(schema % 10**20)
    assert field == "response_format.json_schema.schema.maximum"
    assert message.endswith("has 21 digits, more than 64 bits hold")


@case("A-sp-04")
def test_a_line_may_ask_for_several_choices() -> None:
    body = parse({"prompt": "Name a colour", "seed": 7, "n": 4, "temperature": 1.0}).body
    assert body == {"prompt": "Name a colour", "max_tokens": 256, "seed": 7, "n": 4}
    assert parse(chat(n=128)).n == 128
    assert parse(completion(n=3, best_of=3)).sampling.n == 3
    assert parse({"prompt": "a"}, n=2).n == 2
    assert parse({"prompt": "a", "n": 1}, n=2).n == 1


@case("A-tok-11")
def test_echo_with_logprobs_scores_the_prompt() -> None:
    request = parse(completion(echo=True, logprobs=1, max_tokens=3))
    assert (request.body["echo"], request.sampling.prompt_logprobs, request.sampling.top_logprobs) == (True, 1, 1)
    assert parse(completion(echo=True, logprobs=0)).sampling.prompt_logprobs == 0
    assert parse({"prompt": [1, 2], "echo": True, "logprobs": True, "top_logprobs": 5}).sampling.prompt_logprobs == 5
    for line in (completion(echo=True), {"prompt": "a", "echo": True, "logprobs": False}):
        assert parse(line).sampling.prompt_logprobs is None
    assert "echo" not in parse(completion(echo=False)).body


@case("A-sp-09")
def test_no_tokens_and_an_echo_mean_scoring() -> None:
    scoring = parse(completion(max_tokens=0, echo=True, logprobs=1)).sampling
    assert (scoring.max_tokens, scoring.prompt_logprobs) == (0, 1)
    assert parse(completion(max_tokens=0, echo=True)).sampling.prompt_logprobs == 0
    assert refusal(completion(max_tokens=0))[0] == "body.max_tokens"
    assert parse({"prompt": "a", "max_tokens": 2}, max_tokens=0, echo=True).sampling.prompt_logprobs is None


def test_unknown_fields_name_the_accepted_ones() -> None:
    field, message = refusal({"prompt": "a", "foo": 1})
    assert field == "foo"
    assert message.startswith('unknown field "foo"; accepted: best_of, chat_template_kwargs, custom_id, echo,')


def test_several_fields_that_cannot_be_used_are_named_together() -> None:
    _, message = refusal({"prompt": "a", "foo": 1, "temprature": 1, "tools": [{}]})
    assert message == (
        'unknown field "foo"; unknown field "temprature"; did you mean temperature?; '
        "tools is not supported: tools cannot be called from a batch"
    )
    _, message = refusal({"prompt": "a", "foo": 1, "bar": 1})
    assert message.startswith('unknown field "foo"; unknown field "bar"; accepted: best_of, ')
    _, message = refusal({"prompt": "a", **{f"{'x' * 50}{n}": 1 for n in range(19)}})
    assert message.count("unknown field") == 6
    assert message.endswith('"; and 13 more fields that cannot be used')


def test_a_line_with_a_million_names_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find what a name could mean takes time, so only the first of them are looked at."""
    looked_at: list[str] = []
    closest = difflib.get_close_matches
    monkeypatch.setattr(
        "difflib.get_close_matches", lambda name, *rest, **o: looked_at.append(name) or closest(name, *rest, **o)
    )
    names = {f"name {number}": 1 for number in range(1000)}
    assert refusal({"prompt": "a", **names})[1].endswith("; and many more fields that cannot be used")
    assert refusal(completion(**names))[1].endswith("; and many more fields that cannot be used")
    assert refusal(names)[1].endswith("name 7 and 992 more)")
    assert len(looked_at) < 60


@pytest.mark.parametrize("depth", [126, 127, 200, 201, 252, 253, 254, 255])
@pytest.mark.parametrize("name", ["stop", "logit_bias", "metadata", "response_format", "user", "prompt"])
def test_depth_is_refused_by_field_however_deep(name: str, depth: int) -> None:
    """One that could be read and not written again would end the whole submission."""
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    if name == "metadata" and depth <= 200:
        assert request_row("b", parse({"prompt": "a", name: value}), 64, rejected=False)
    else:
        assert refusal({"prompt": "a", name: value})[0].split(".")[0] == name  # type: ignore[union-attr]


def test_one_token_has_one_bias() -> None:
    assert parse({"prompt": "a", "logit_bias": {"0": 1, "10": 2}}).sampling.logit_bias == {0: 1, 10: 2}
    for key in ("05", "00", "+5", "٥", "5 "):
        assert refusal({"prompt": "a", "logit_bias": {key: 1}}) == (
            "logit_bias",
            f'logit_bias: "{key}" is not a token id',
        )


@case("A-sp-11")
def test_top_k_takes_every_way_to_say_off_and_more_than_any_vocabulary() -> None:
    assert "top_k" not in parse({"prompt": "a", "top_k": 0}).body
    assert parse({"prompt": "a", "top_k": -1}).body["top_k"] == -1
    assert parse({"prompt": "a", "top_k": 10_000_000}).body["top_k"] == 10_000_000


@pytest.mark.parametrize(
    "custom_id", ["prod:T1055.011 Extra Window/1", "問い-1 ✓", "x" * 300, "-rf", "1", "../../etc/x"]
)
@case("A-in-10", "A-q-01", "A-cli-04", "A-sec-07")
def test_any_text_is_a_custom_id(custom_id: str) -> None:
    """Ids come back unchanged and name no file."""
    assert parse({"prompt": "a", "custom_id": custom_id}).custom_id == custom_id


# -------------------------------------------------------------------------------------------------- OpenAI lines


def test_an_openai_chat_line() -> None:
    line = openai(
        {
            "model": "m",
            "messages": [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi", "name": "Al"}],
            "max_completion_tokens": 9,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
            "user": "u",
            "stream": False,
            "n": 1,
            "store": False,
            "service_tier": "auto",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "tools": [],
            "metadata": {"a": "b"},
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    request = parse(line)
    assert (request.custom_id, request.endpoint) == ("x", Endpoint.CHAT)
    assert request.body == {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi", "name": "Al"}],
        "max_tokens": 9,
        "temperature": 0,
        "top_logprobs": 3,
        "logprobs": True,
        "model": "m",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert request.sampling.top_logprobs == 3


@case("A-in-17")
def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert (
        parse(openai({"messages": [{"role": "user", "content": parts}]})).body["messages"][0]["content"]
        == "Hello world"
    )


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        pytest.param(openai("oops"), "body", "body must be an object, not a string", marks=case("A-in-04")),
        pytest.param(openai({}, method="GET"), "method", 'method must be POST, not "GET"', marks=case("A-in-12")),
        pytest.param(openai({}, "/v4/chat/completions"), "url", 'url must be /v1/chat/completions or /v1/completions, not "/v4/chat/completions"; did you mean /v1/chat/completions?', marks=case("A-in-12")),
        pytest.param(openai({}, "/v1/chat/completions/"), "url", 'url must be /v1/chat/completions or /v1/completions, not "/v1/chat/completions/"; did you mean /v1/chat/completions?', marks=case("A-in-12")),
        pytest.param(openai({"input": "x"}, "/v1/responses"), "url", 'url must be /v1/chat/completions or /v1/completions, not "/v1/responses"; this is a line for the Responses API; put its input into messages and use /v1/chat/completions', marks=case("A-in-14")),
        pytest.param({"custom_id": "2", "method": "POST", "url": "/v1/completions"}, "body", "missing body (the line has: custom_id, method, url)", marks=case("A-in-13")),
        ({"body": {}}, "method", 'missing method, url (the line has: body); add "method": "POST", "url": "/v1/chat/completions"'),
        (openai({}, custom_id=None), "custom_id", "missing custom_id"),
        pytest.param(openai({}, custom_id=1), "custom_id", "custom_id must be a string, not an integer", marks=case("A-in-10")),
        (openai({}, extra=1), "extra", 'unknown field "extra"; accepted: body, custom_id, method, url'),
        (openai({}), "body.messages", "messages is missing"),
        (openai({"prompt": "a"}), "body.messages", "messages is missing; for a prompt, url must be /v1/completions"),
        (openai({"messages": None}), "body.messages", "messages must be a list, not null"),
        pytest.param(openai({"messages": []}), "body.messages", "messages must not be empty", marks=case("A-tok-10")),
        (openai({"messages": [3]}), "body.messages[0]", "messages[0] must be an object with role and content, not an integer"),
        (openai({"messages": [{"role": "tool", "content": "x"}]}), "body.messages[0].role", 'messages[0].role: "tool" is not supported; accepted: system, developer, user, assistant'),
        (openai({"messages": [{"role": "user"}]}), "body.messages[0].content", "messages[0].content is missing"),
        (openai({"messages": [{"role": "user", "content": None}]}), "body.messages[0].content", "messages[0].content must be a string or a list of text parts, not null"),
        pytest.param(openai({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}), "body.messages[0].content[0].type", 'messages[0].content[0]: content parts of type "image_url" are not supported, only text', marks=case("A-in-17")),
        (openai({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}), "body.messages[0].tool_calls", "messages[0].tool_calls is not supported"),
        (chat(prompt="a"), "body.prompt", "prompt is not a field of /v1/chat/completions"),
        (completion(messages=[]), "body.messages", "messages is not a field of /v1/completions"),
        pytest.param(completion(max_completion_tokens=5), "body.max_completion_tokens", "max_completion_tokens is not a field of /v1/completions; use max_tokens", marks=case("A-sp-10")),
        (chat(max_tokens=5, max_completion_tokens=6), "body.max_completion_tokens", "max_tokens and max_completion_tokens differ; give one of them"),
        pytest.param(chat(top_logprobs=3), "body.top_logprobs", "top_logprobs needs logprobs to be true", marks=case("A-sp-06")),
        pytest.param(chat(logprobs=False, top_logprobs=3), "body.top_logprobs", "top_logprobs needs logprobs to be true", marks=case("A-sp-06")),
        pytest.param(chat(logprobs=True, top_logprobs=21), "body.top_logprobs", "top_logprobs must be from 0 to 20, not 21", marks=case("A-sp-06")),
        (chat(logprobs=3), "body.logprobs", "logprobs must be true or false, not an integer"),
        (completion(logprobs=True), "body.logprobs", "logprobs must be a number from 0 to 20, not a boolean"),
        (completion(logprobs=21), "body.logprobs", "logprobs must be from 0 to 20, not 21"),
        (completion(top_logprobs=2), "body.top_logprobs", "top_logprobs is not a field of /v1/completions; logprobs takes the number"),
        (chat(echo=True), "body.echo", "echo repeats the prompt of a completion; a chat has none to repeat, so leave it out"),
        (chat(n=True), "body.n", "n must be an integer, not a boolean"),
        (chat(user=5), "body.user", "user must be a string, not an integer"),
        pytest.param(chat(chat_template_kwargs={"chat_template": "x"}), "body.chat_template_kwargs.chat_template", None, marks=case("A-sec-03")),
        (chat(chat_template_kwargs={"tokenize": False}), "body.chat_template_kwargs.tokenize", None),
        (chat(chat_template_kwargs={"enable_thinking": [1]}), "body.chat_template_kwargs.enable_thinking", None),
    ],
)  # fmt: skip
def test_openai_lines_are_refused_by_field(line: dict[str, Any], field: str, message: str | None) -> None:
    found_field, found = refusal(line)
    assert found_field == field
    assert message is None or found == message


@case("A-in-11")
def test_every_unsupported_field_of_a_line_is_named() -> None:
    field, message = refusal(chat(stream=True, tools=[{"type": "function"}]))
    assert field == "body.stream"
    assert message == (
        "stream is not supported: batch answers are not streamed; remove it; "
        "tools is not supported: tools cannot be called from a batch"
    )


def test_refusals_carry_the_custom_id() -> None:
    with pytest.raises(InvalidLineError) as caught:
        parse(chat(stream=True))
    assert caught.value.error.custom_id == "x"


@case("A-sp-05")
def test_logprobs_zero_is_not_absent() -> None:
    assert parse(completion(logprobs=0)).body["logprobs"] == 0
    assert "logprobs" not in parse(completion()).body
    assert parse(completion(logprobs=5)).sampling.top_logprobs == 5


def test_plain_lines_take_logprobs_either_way() -> None:
    assert parse({"prompt": "a", "logprobs": 5}).sampling.top_logprobs == 5
    assert parse({"prompt": "a", "logprobs": True, "top_logprobs": 2}).sampling.top_logprobs == 2
    assert parse({"prompt": "a", "top_logprobs": 2}).body["logprobs"] is True
    assert refusal({"prompt": "a", "logprobs": 5, "top_logprobs": 2})[0] == "top_logprobs"


# ------------------------------------------------------------------------------------------------------ defaults


def test_defaults_fill_only_what_is_absent() -> None:
    defaults = {"max_tokens": 9, "temperature": 0, "stop": ["X"]}
    assert parse({"prompt": "a"}, **defaults).body == {"prompt": "a", "max_tokens": 9, "temperature": 0, "stop": ["X"]}
    own = parse({"prompt": "a", "max_tokens": 5, "temperature": 1, "seed": 3}, **defaults).body
    assert own == {"prompt": "a", "max_tokens": 5, "stop": ["X"], "seed": 3}


def test_a_limit_by_its_other_name_beats_the_default() -> None:
    assert parse(chat(max_completion_tokens=5, temperature=0), max_tokens=9).body["max_tokens"] == 5
    assert parse(chat(max_tokens=5, temperature=0), max_completion_tokens=9).body["max_tokens"] == 5


def test_a_default_seed_is_taken() -> None:
    assert parse({"prompt": "a"}, seed=5).body["seed"] == 5
    assert parse({"prompt": "a", "seed": 6}, seed=5).body["seed"] == 6


def test_defaults_that_clash_with_a_line_are_that_lines_error() -> None:
    with pytest.raises(InvalidLineError, match="min_tokens must be from 0 to max_tokens, not 50"):
        parse({"prompt": "a", "max_tokens": 5}, min_tokens=50)


def test_default_logprobs_fit_every_kind_of_line() -> None:
    assert parse(completion(), top_logprobs=3).sampling.top_logprobs == 3
    assert parse(chat(), top_logprobs=3).body["logprobs"] is True
    assert parse(completion(logprobs=1), top_logprobs=3).sampling.top_logprobs == 1


def test_impossible_defaults_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="temperature must be from 0 to 2, not 3"):
        Defaults({"temperature": 3})
    with pytest.raises(UsageError, match='unknown sampling field "max_token"; did you mean max_tokens'):
        Defaults({"max_token": 3})
    with pytest.raises(UsageError, match="cannot be used: model_version must not be empty"):
        Defaults(model_version="")


def test_system_goes_in_front_of_chats_without_one() -> None:
    defaults = Defaults(system="Be kind")

    def messages(line: dict[str, Any]) -> list[dict[str, str]]:
        found: list[dict[str, str]] = parse_line(json.dumps(line).encode(), 1, 0, defaults).body["messages"]
        return found

    user, own = {"role": "user", "content": "Hi"}, {"role": "developer", "content": "Be rude"}
    assert messages({"messages": [user]}) == [{"role": "system", "content": "Be kind"}, user]
    assert messages({"messages": [own, user]}) == [{"role": "system", "content": "Be rude"}, user]
    assert "messages" not in parse_line(b'{"prompt":"a"}', 1, 0, defaults).body


def test_remembered_sampling_keeps_types_apart() -> None:
    defaults = Defaults()
    assert parse_line(b'{"prompt":"a","top_k":1}', 1, 0, defaults).body["top_k"] == 1
    with pytest.raises(InvalidLineError, match="top_k must be an integer, not a boolean"):
        parse_line(b'{"prompt":"a","top_k":true}', 1, 0, defaults)
