# ruff: noqa: E501 - lines are quoted as they are
"""The faults that people met where lines are read, each as it was met: the file is submitted, and what comes out is all
there is to see: the batch, the exit code and what stands on stderr."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchjobs.cli.line_errors import grouped
from batchjobs.errors import LineError
from batchjobs.foreign_files import recognised_format
from batchjobs.jsonl import InvalidLineError, parse_line
from batchjobs.store import StoredResult
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line

__all__ = ["command_line"]

NOWHERE = "neither prompt or messages nor custom_id, method, url and body found"
URLS = "url must be /v1/chat/completions or /v1/completions, not"


@pytest.fixture(autouse=True)
def _database(command_line: CommandLine, migrated_sqlite_file: Path) -> None:
    """There is one already: to make it takes longer than a test."""
    command_line.home.mkdir()
    shutil.copy(migrated_sqlite_file, command_line.home / "batchjobs.sqlite3")


def accepted(line: CommandLine, content: bytes, name: str = "in.jsonl") -> list[StoredResult]:
    """The requests of the batch that this file makes, without a word on stderr."""
    Path(name).write_bytes(content)
    done = line.run("submit", name)
    assert (done.exit_code, done.stderr) == (0, "")
    return requests(line, done.stdout.strip())


def requests(line: CommandLine, batch: str) -> list[StoredResult]:
    store = line.store()
    try:
        return list(store.results(batch))
    finally:
        store.close()


def refused(line: CommandLine, content: bytes, name: str = "in.jsonl") -> list[str]:
    """What is said about a file that makes no batch."""
    Path(name).write_bytes(content)
    done = line.run("submit", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert line.json_lines("list") == [], "something was stored"
    return done.stderr.splitlines()


def skipped(line: CommandLine, content: bytes) -> list[tuple[str, str]]:
    """State and prompt of each request where bad lines become failures."""
    Path("in.jsonl").write_bytes(content)
    batch = line.out("submit", "in.jsonl", "--on-invalid", "skip").strip()
    return [(row.state, row.request.body.get("prompt", "")) for row in requests(line, batch)]


def prompts(found: list[StoredResult]) -> list[Any]:
    return [row.request.body["prompt"] for row in found]


def total(count: int) -> str:
    return f"batchjobs: in.jsonl: {count} invalid line{'s' if count > 1 else ''}; nothing was stored"


def completion(custom_id: Any, prompt: str, **body: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
    return json.dumps(line).encode() + b"\n"


@case("A-in-01")
def test_in_01_a_byte_order_mark_costs_no_line(command_line: CommandLine) -> None:
    found = accepted(command_line, b'\xef\xbb\xbf{"prompt":"a"}\n{"prompt":"b"}\n')
    assert prompts(found) == ["a", "b"]
    assert all(set(row.request.body) == {"prompt", "max_tokens", "seed"} for row in found)


@case("A-in-02")
def test_in_02_line_separators_of_unicode_are_text(command_line: CommandLine) -> None:
    found = accepted(command_line, b'{"prompt":"a\xe2\x80\xa8b\xc2\x85c\xe2\x80\xa9d"}\n')
    assert prompts(found) == ["a\u2028b\u0085c\u2029d"]


@case("A-in-03")
def test_in_03_broken_utf8_is_an_error_of_its_line(command_line: CommandLine) -> None:
    content = b'{"prompt":"ok1"}\n{"prompt":"\xe6\x87"}\n{"prompt":"ok2"}\n'
    assert refused(command_line, content) == ["line 2: invalid UTF-8 at byte 12; save the file as UTF-8", total(1)]
    assert skipped(command_line, content) == [("queued", "ok1"), ("failed", ""), ("queued", "ok2")]


@case("A-in-04")
def test_in_04_json_that_is_no_object_is_named_by_its_type(command_line: CommandLine) -> None:
    wrong = b'[1,2,3]\n"hello"\nnull\n{"custom_id":"x","method":"POST","url":"/v1/chat/completions","body":"oops"}\n'
    assert refused(command_line, wrong + b'{"prompt":"good"}') == [
        "line 1: each line must be a JSON object, not a list",
        "line 2: each line must be a JSON object, not a string",
        "line 3: each line must be a JSON object, not null",
        "line 4: body must be an object, not a string",
        total(4),
    ]
    assert skipped(command_line, wrong + b'{"prompt":"good"}') == [("failed", "")] * 4 + [("queued", "good")]


@case("A-in-05")
def test_in_05_thousands_of_digits_are_counted_not_repeated(command_line: CommandLine) -> None:
    content = b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b'}\n{"prompt":"b"}\n'
    said = "line 1: max_tokens has 5000 digits, more than 64 bits hold"
    assert refused(command_line, content) == [said, total(1)]
    assert skipped(command_line, content) == [("failed", ""), ("queued", "b")]


@case("A-in-06")
def test_in_06_blank_lines_are_counted_and_nothing_else(command_line: CommandLine) -> None:
    content = b'{"prompt":"a"}\n\n   \n{"prompt":"b"}\n\n\n'
    assert prompts(accepted(command_line, content)) == ["a", "b"]
    bad = command_line.run("submit", "-", stdin=content + b"null\n").stderr
    assert bad.startswith("line 7: each line must be a JSON object, not null\n")


@case("A-in-07")
def test_in_07_no_carriage_return_gets_in(command_line: CommandLine) -> None:
    found = accepted(command_line, b'{"prompt":"a"}\r\n' + completion("7", "b").replace(b"\n", b"\r\n"))
    assert [(row.request.custom_id, row.request.body["prompt"]) for row in found] == [("request-0", "a"), ("7", "b")]


@case("A-in-08")
@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf", b"\r\n", gzip.compress(b"", mtime=0)])
def test_in_08_a_file_without_requests_is_refused(command_line: CommandLine, content: bytes) -> None:
    assert refused(command_line, content) == ["batchjobs: no requests in in.jsonl; nothing was stored"]


@case("A-in-09")
def test_in_09_a_custom_id_twice_is_told_with_both_lines(command_line: CommandLine) -> None:
    content = completion("q1", "A") + completion("q1", "B")
    assert refused(command_line, content) == ['line 2: custom_id "q1" was used before, on line 1', total(1)]


@case("A-in-10")
def test_in_10_a_number_is_no_custom_id_and_a_text_of_digits_is_one(command_line: CommandLine) -> None:
    said = "line 1: custom_id must be a string, not an integer"
    assert refused(command_line, completion(1, "a") + completion("1", "b")) == [said, total(1)]
    assert [row.request.custom_id for row in accepted(command_line, completion("1", "b"))] == ["1"]


@case("A-in-11")
def test_in_11_each_field_that_cannot_be_had_is_named(command_line: CommandLine) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "count to 12"}], "stream": True}
    body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    line = {"custom_id": "s", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert refused(command_line, json.dumps(line).encode()) == [
        "line 1: stream is not supported: batch answers are not streamed; remove it; "
        "tools is not supported: tools cannot be called from a batch",
        total(1),
    ]


@case("A-in-12")
def test_in_12_wrong_methods_and_urls_name_the_right_ones(command_line: CommandLine) -> None:
    content = (
        b'{"custom_id":"1","method":"GET","url":"/v1/chat/completions","body":{}}\n'
        b'{"custom_id":"2","method":"POST","url":"/v4/chat/completions","body":{}}\n'
        b'{"custom_id":"3","method":"POST","url":"/v1/embeddings","body":{"input":"x"}}\n'
    ) + completion("4", "ok")
    assert refused(command_line, content) == [
        'line 1: method must be POST, not "GET"',
        f'line 2: {URLS} "/v4/chat/completions"; did you mean /v1/chat/completions?',
        f'line 3: {URLS} "/v1/embeddings"; this is a line for embeddings, which are not made here',
        total(3),
    ]
    assert skipped(command_line, content)[3] == ("queued", "ok")


@case("A-in-12")
@pytest.mark.parametrize("url", ["/v1/completions/", "https://api.openai.com/v1/completions", "/completions"])
def test_in_12_slashes_and_hosts_are_refused_with_the_right_url(command_line: CommandLine, url: str) -> None:
    content = completion("1", "a").replace(b"/v1/completions", url.encode())
    said = f'line 1: {URLS} "{url}"; did you mean /v1/completions?'
    assert refused(command_line, content) == [said, total(1)]


@case("A-in-13")
def test_in_13_what_is_missing_is_told_at_once(command_line: CommandLine) -> None:
    content = (
        b'{"custom_id":"1","params":{"model":"m","messages":[{"role":"user","content":"x"}]}}\n'
        b'{"custom_id":"2","method":"POST","url":"/v1/chat/completions"}\n'
        b'{"custom_id":"3","body":{"messages":[{"role":"user","content":"x"}]}}\n'
    )
    assert refused(command_line, content) == [
        "line 1: missing method, url, body; or prompt or messages, for a plain line (the line has: params); this is a "
        "line for the Anthropic API; write the messages and max_tokens of its params beside custom_id",
        "line 2: missing body (the line has: custom_id, method, url)",
        'line 3: missing method, url (the line has: custom_id, body); add "method": "POST", "url": "/v1/chat/completions"',
        total(3),
    ]


@case("A-in-14")
def test_in_14_lines_for_the_responses_api_are_recognised(command_line: CommandLine) -> None:
    content = (
        b'{"custom_id":"1","method":"POST","url":"/v1/responses","body":{"model":"m","input":"hello"}}\n'
        b'{"custom_id":"2","method":"POST","url":"/v1/chat/completions","body":{"model":"m","input":"hello"}}\n'
    )
    assert refused(command_line, content) == [
        f'line 1: {URLS} "/v1/responses"; this is a line for the Responses API; put its input into messages and use '
        "/v1/chat/completions",
        "line 2: messages is missing; this is a line for the Responses API; put its input into messages",
        total(2),
    ]


@case("A-in-15")
def test_in_15_prompts_under_other_names_are_recognised(command_line: CommandLine) -> None:
    content = b'{"request":{"contents":[{"parts":[{"text":"hi"}]}]}}\n{"input":"hi"}\n{"Prompt":"hi"}\n'
    assert refused(command_line, content) == [
        f"line 1: {NOWHERE} (the line has: request); this is a line for the Gemini API; write its contents as "
        '{"messages": [{"role": "user", "content": "..."}]}',
        f"line 2: {NOWHERE} (the line has: input); did you mean prompt instead of input?",
        f"line 3: {NOWHERE} (the line has: Prompt); did you mean prompt instead of Prompt?",
        total(3),
    ]


@case("A-in-16")
def test_in_16_two_models_in_one_file_are_refused(command_line: CommandLine) -> None:
    content = completion("1", "a", model="small") + completion("2", "b", model="other")
    said = 'line 2: model "other" differs from "small" in an earlier line; a batch has one model'
    assert refused(command_line, content) == [said, total(1)]
    done = command_line.run("submit", "in.jsonl", "--json")
    assert json.loads(done.stdout)["custom_id"] == "2"


@case("A-in-17")
def test_in_17_text_parts_are_their_text_and_images_are_refused(command_line: CommandLine) -> None:
    text, image = {"type": "text", "text": "Hello "}, {"type": "image_url", "image_url": {"url": "x"}}

    def chat(*parts: Any) -> bytes:
        body = {"messages": [{"role": "user", "content": list(parts)}]}
        return json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()

    said = 'line 1: messages[0].content[1]: content parts of type "image_url" are not supported, only text'
    assert refused(command_line, chat(text, image)) == [said, total(1)]
    (row,) = accepted(command_line, chat(text, {"type": "text", "text": "world"}))
    assert row.request.body["messages"] == [{"role": "user", "content": "Hello world"}]


@case("A-in-18")
def test_in_18_gzip_is_read_under_any_name_and_gzip_in_gzip_is_told(command_line: CommandLine) -> None:
    packed = gzip.compress(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    said = "batchjobs: z.jsonl.gz is gzip-compressed twice; unpack it once (gunzip) and submit the result"
    assert refused(command_line, gzip.compress(packed), "z.jsonl.gz") == [said]
    assert prompts(accepted(command_line, packed, "in.jsonl.gz")) == ["a", "b"]
    assert prompts(accepted(command_line, packed, "z.jsonl")) == ["a", "b"]


@case("A-in-19")
@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b'{\n  "prompt": "a"\n}', "the JSON is pretty-printed over several lines"),
        (b'[{"prompt":"a"},{"prompt":"b"}]', "the file is one JSON array"),
        (b'{"prompt":"a"},\n{"prompt":"b"},', "there are commas between the lines"),
    ],
)
def test_in_19_json_that_is_no_json_lines_is_one_message(command_line: CommandLine, content: bytes, start: str) -> None:
    said, ending = refused(command_line, content)
    assert said.startswith(f"line 1: {start}; one JSON object per line is wanted")
    assert ending == total(1)
    assert refused(command_line, content * 5000)[1:] == [ending], "also where there are thousands of such lines"


@case("A-in-20")
def test_in_20_numbers_without_a_value_are_refused_by_field(command_line: CommandLine) -> None:
    content = b'{"prompt":"a","temperature":NaN}\n{"prompt":"a","top_p":1e999}\n{"prompt":"a","metadata":{"score":-Infinity}}\n'
    assert refused(command_line, content) == [
        "line 1: temperature is NaN, which is no JSON number",
        "line 2: top_p is too large for a number",
        "line 3: metadata.score is -Infinity, which is no JSON number",
        total(3),
    ]


@case("A-in-21")
def test_in_21_a_line_of_60_mb_is_a_line_error(command_line: CommandLine) -> None:
    content = b'{"prompt":"a"}\n{"prompt":"' + b"x" * 60_000_000 + b'"}\n{"prompt":"b"}\n'
    assert refused(command_line, content) == ["line 2: longer than 8 MiB, the most a line may have", total(1)]


# -------------------------------------------------------------------------------------------- whole files of another kind


@case("A-in-13", "A-in-14", "A-in-15")
@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"key":"%d","request":{"contents":[{"parts":[{"text":"hi"}]}]}}', "this is a line for the Gemini API"),
        (b'{"contents":[{"parts":[{"text":"hi %d"}]}]}', "this is a line for the Gemini API"),
        (b'{"custom_id":"%d","params":{"messages":[]}}', "this is a line for the Anthropic API"),
        (b'{"custom_id":"%d","method":"POST","url":"/v1/responses","body":{"input":"x"}}', "this is a line for the Responses API"),
        (b'{"custom_id":"%d","method":"POST","url":"/v1/messages","body":{}}', "this is a line for the Anthropic API"),
        (b'{"recordId":"%d","modelInput":{"messages":[]}}', "this is a line for Amazon Bedrock"),
        (b'{"instances":[{"prompt":"%d"}]}', "this is a line for Vertex AI"),
        (b'{"custom_id":"%d","response":{"status_code":200,"body":{}},"error":null}', "this is a line of results"),
        (b'{"custom_id":"%d","status":"completed","text":"x","finish_reason":"stop"}', "this is a line of results"),
        (b'{"question":"hi %d","answer":"x"}', "did you mean prompt instead of question?"),
        (b'{"instruction":"hi %d","input":"","output":"x"}', "did you mean prompt instead of instruction?"),
        (b'{"input_text":"%d"}', "did you mean prompt instead of input_text?"),
        (b'{"promt":"%d"}', "did you mean prompt instead of promt?"),
        (b'{"conversations":[{"role":"user","content":"%d"}]}', "did you mean messages instead of conversations?"),
        (b'{"data":{"prompt":"%d"}}', "the request is inside data; write its fields into the line itself"),
        (b'{"requests":[{"prompt":"%d"}]}', "the request is inside requests; write each request as a line of its own"),
        (b'{"id":%d,"prompt":"x"}', 'unknown field "id"; did you mean custom_id?'),
        (b'{"prompt":"%d","max_new_tokens":5}', 'unknown field "max_new_tokens"; did you mean max_tokens?'),
        (b'{"prompt":"%d","options":{"temperature":0}}', "options is not supported: write its fields beside prompt or messages"),
        (b'{"prompt":{"0":"a","1":"b%d"}}', "prompt holds the prompts of many lines; write one line for each"),
        (b"{'prompt': '%d'}", "not valid JSON: a single quote at column 2; JSON has double quotes alone"),
        (b'{"prompt":"%d","echo":True}', "JSON has true, false and null"),
        (b'{"prompt":"%d"} // x', "a comment at column"),
        (b'{"prompt":"%d"}{"prompt":"b"}', "another object begins at column"),
        (b'{prompt: "%d"}', "a name in double quotes is wanted at column 2"),
        (b'{"prompt":"say "%d""}', 'a quote in a text is written \\"'),
        ('{“prompt”: “%d”}'.encode(), "a curly quote at column 2"),
        (b'{"prompt":"caf\xe9 %d"}', "invalid UTF-8 at byte 15; save the file as UTF-8"),
    ],
)  # fmt: skip
def test_a_whole_file_for_another_program_has_one_message(line: bytes, what: str) -> None:
    lines = [line % number for number in range(1000)]
    assert recognised_format(lines[:2]) is None
    (message,) = grouped(refusal(raw, number) for number, raw in enumerate(lines, 1))
    said = str(message)
    assert said.startswith("lines 1-1000: ")
    assert what in said
    assert len(said) < 300


def refusal(raw: bytes, number: int) -> LineError:
    with pytest.raises(InvalidLineError) as caught:
        parse_line(raw, number, number - 1)
    return caught.value.error


@case("A-in-15")
def test_a_file_of_ten_thousand_such_lines_is_two_lines_on_the_screen(command_line: CommandLine) -> None:
    said, ending = refused(command_line, b'{"request":{"contents":[{"parts":[{"text":"hi"}]}]}}\n' * 10_000)
    assert said.startswith(f"lines 1-10000: {NOWHERE} (the line has: request); this is a line for the Gemini API; ")
    assert ending == total(10_000)


def test_errors_of_several_files_are_told_apart(command_line: CommandLine) -> None:
    Path("b.jsonl").write_bytes(b'{"Prompt":"x"}\n' * 3)
    Path("a.jsonl").write_bytes(b'{"prompt":"x"}\n{"Prompt":"x"}\n')
    done = command_line.run("submit", "a.jsonl", "b.jsonl")
    assert (done.exit_code, done.stdout) == (2, "")
    message = f"{NOWHERE} (the line has: Prompt); did you mean prompt instead of Prompt?"
    assert done.stderr.splitlines() == [
        f"a.jsonl, line 2: {message}",
        f"b.jsonl, lines 1-3: {message}",
        "batchjobs: a.jsonl, b.jsonl: 4 invalid lines; nothing was stored",
    ]
    errors = command_line.run("submit", "--json", "a.jsonl", "b.jsonl").stdout.splitlines()
    assert [(json.loads(error)["source"], json.loads(error)["line"]) for error in errors] == [
        ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 3),
    ]  # fmt: skip
