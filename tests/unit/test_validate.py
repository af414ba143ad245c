"""A dry run refuses what a submission refuses, counts what is asked for, and touches nothing."""

from __future__ import annotations

import io
import json
import random
import sqlite3
from sqlite3 import connect
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchjobs import submission
from batchjobs.cli.validation_report import duration
from batchjobs.errors import BatchjobsError, InvalidInput, UsageError
from batchjobs.inputs import open_source
from batchjobs.sampling_fields import Defaults
from batchjobs.store import Store
from batchjobs.submission import CHUNK_REQUESTS, Plan, submit
from batchjobs.validation import Duplicates, Inspection, inspect
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["command_line"]

OPENAI = '{"custom_id":"%s","method":"POST","url":"/v1/completions","body":{"model":"%s","prompt":"a"}}'


class NoQueue:
    def enqueue(self, shards: Iterable[object]) -> int:
        return sum(1 for _ in shards)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('validate') / 'b.sqlite3'}")
    store.prepare()
    yield store
    store.close()


def submitted(store: Store, files: Sequence[bytes | Path], plan: Plan) -> tuple[str, list[Any]]:
    """What a submission says, and its line errors."""
    try:
        submit(store, NoQueue, opened(files), plan)  # type: ignore[arg-type]
    except InvalidInput as error:
        return str(error), error.errors
    except UsageError as error:
        return str(error), []
    return "", []


def validated(files: Sequence[bytes | Path], plan: Plan) -> tuple[str, list[Any]]:
    try:
        found = inspect(opened(files), plan)
    except UsageError as error:
        return str(error), []
    return ("", []) if found.refusal is None else (str(found.refusal), found.refusal.errors)


def opened(files: Sequence[bytes | Path]) -> list[Any]:
    return [open_source(io.BytesIO(file) if isinstance(file, bytes) else file) for file in files]


def looked_at(*lines: dict[str, Any], defaults: Defaults | None = None) -> Inspection:
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    return inspect(opened([content]), Plan(defaults=defaults or Defaults()))


GOOD = b'{"prompt":"a"}\n'
FILES = {
    "good": [GOOD * 3],
    "empty": [b""],
    "blank": [b"\n  \n"],
    "one bad line": [GOOD + b"null\n" + GOOD],
    "broken UTF-8": [GOOD + b'{"prompt":"\xe6\x87"}\n'],
    "unknown fields": [b'{"prompt":"a","tempurature":1}\n{"prompt":"a","stream":true}\n'],
    "foreign urls": [b'{"custom_id":"1","method":"POST","url":"/v1/embeddings","body":{"input":"x"}}\n'],
    "no method": [b'{"custom_id":"1"}\n{"custom_id":"2","body":{}}\n{"custom_id":"3","url":"/v1/completions"}\n'],
    "out of range": [b'{"prompt":"a","temperature":3}\n{"prompt":"a","n":0}\n{"prompt":"a","top_p":1e999}\n'],
    "too long": [GOOD + b'{"prompt":"' + b"x" * (8 * 2**20) + b'"}\n' + GOOD],
    "duplicates": [
        b'{"custom_id":"q","prompt":"a"}\n\n{"custom_id":"q","prompt":"b"}\n{"custom_id":"q","prompt":"c"}\n'
    ],
    "a made-up id": [b'{"custom_id":"request-1","prompt":"a"}\n' + GOOD],
    "duplicates far apart": [b'{"custom_id":"q","prompt":"a"}\n' * 1 + GOOD * 2500 + b'{"custom_id":"q","prompt":"b"}'],
    "a refused first use": [b'{"custom_id":"q","prompt":1}\n{"custom_id":"q","prompt":"b"}\n'],
    "over two files": [b'{"custom_id":"q","prompt":"a"}\n', b'\n{"custom_id":"q","prompt":"b"}\nnull\n'],
    "several models": ["\n".join(OPENAI % tuple(pair) for pair in ("1a", "2b", "3a", "4c")).encode()],
    "JSON array": [b'[{"prompt":"a"},\n{"prompt":"b"}]\n'],
    "pretty-printed": [b'{\n  "prompt": "a"\n}\n'],
    "CSV": [b"id,prompt\n1,hello\n"],
    "the second file is CSV": [GOOD, b"id,prompt\n1,hello\n"],
    "damaged gzip": [b"\x1f\x8b\x08\x00broken"],
}
CASES = {
    "no method": "A-cli-02",
    "duplicates": "A-in-09",
    "over two files": "A-in-09",
    "several models": "A-in-16",
    "JSON array": "A-in-19",
    "too long": "A-in-21",
    "broken UTF-8": "A-in-03",
    "empty": "A-in-08",
}


@pytest.mark.parametrize(
    "files",
    [pytest.param(files, id=name, marks=[case(CASES[name])] if name in CASES else []) for name, files in FILES.items()],
)
def test_submit_and_validate_say_the_same(store: Store, files: list[bytes]) -> None:
    plan = Plan()
    message, errors = submitted(store, files, plan)
    assert validated(files, plan) == (message, errors)
    assert bool(message) == (files != FILES["good"])


LINES = st.sampled_from(
    [
        *(b'{"prompt":"a","custom_id":"%s"}' % name for name in (b"q", b"r", b"request-2", b"request-4")),
        b'{"prompt":"a"}',
        b'{"prompt":"a","model":"m"}',
        b'{"prompt":"a","model":"n","custom_id":"s"}',
        b'{"prompt":1,"custom_id":"q"}',
        b"null",
        b"",
        b"\xff",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(LINES, max_size=8), min_size=1, max_size=3))
def test_they_say_the_same_of_any_mixture(store: Store, files: list[list[bytes]]) -> None:
    contents = [b"\n".join(lines) for lines in files]
    chunk, submission.CHUNK_REQUESTS = submission.CHUNK_REQUESTS, 3
    try:
        assert validated(contents, Plan()) == submitted(store, contents, Plan())
    finally:
        submission.CHUNK_REQUESTS = chunk


def test_defaults_are_checked_with_the_lines(store: Store) -> None:
    plan = Plan(defaults=Defaults({"max_tokens": 4}, system="s"))
    files = [b'{"prompt":"a","min_tokens":5}\n{"messages":[{"role":"user","content":"a"}]}\n']
    message, errors = submitted(store, files, plan)
    assert [error.field for error in errors] == ["min_tokens"]
    assert validated(files, plan) == (message, errors)


# --------------------------------------------------------------------------------------------------------- counts


def test_what_the_lines_ask_for_is_counted() -> None:
    found = looked_at(
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "b", "n": 4, "max_tokens": 5, "seed": 1, "model": "m"},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}, "model": "m"},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "text"}},
        {"prompt": "c", "echo": True, "model_version": "sha256:0123456789abcdef"},
        {"prompt": "d", "model": "other"},
    )
    asked = found.asked
    assert (found.lines, asked.requests, asked.chats, asked.completions, asked.choices) == (6, 5, 2, 3, 8)
    assert asked.max_tokens == 3 + 4 * 5 + 3 * 256
    assert (asked.formatted, asked.echoing, asked.seeded) == (1, 1, 1)
    assert (dict(asked.models), dict(found.other_models)) == ({"m": 2}, {"other": 1})
    assert dict(asked.model_versions) == {"sha256:0123456789abcdef": 1}
    assert looked_at({"prompt": "a"}, defaults=Defaults({"seed": 3})).asked.seeded == 1


def test_the_same_prompt_with_the_same_sampling_is_asked_twice() -> None:
    found = looked_at(
        {"prompt": "a"},
        {"prompt": "a", "custom_id": "x", "metadata": {"k": 1}, "model": "m"},
        {"prompt": "a", "seed": 1},
        {"prompt": "a", "temperature": 0},
        {"prompt": "a", "max_tokens": 256},
        {"prompt": "b", "stop": "."},
        {"prompt": "b", "stop": ["."]},
        {"messages": [{"role": "user", "content": "a"}]},
    )
    assert found.duplicates == Duplicates(prompts=2, requests=5)
    assert found.duplicates.repeated == 3


def test_duplicates_are_found_beyond_a_chunk() -> None:
    numbers = [*range(CHUNK_REQUESTS), *range(700), *range(5)]
    random.Random(1).shuffle(numbers)
    found = looked_at(*({"prompt": str(number)} for number in numbers))
    assert found.duplicates == Duplicates(prompts=700, requests=1405)


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "batchjobs.validation.sqlite3.connect", lambda *place, **options: small(connect(*place, **options))
    )

    def small(database: sqlite3.Connection) -> sqlite3.Connection:
        database.execute("PRAGMA max_page_count = 20")
        return database

    with pytest.raises(BatchjobsError, match=r"the temporary file for ids cannot be written .* set TMPDIR"):
        inspect(opened([GOOD * 9000]), Plan())


def test_listeners_see_accepted_requests_once_and_can_tell_their_lines(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    one.write_bytes(b'{"prompt":"0"}\n\n{"prompt":"1","custom_id":"q"}\n')
    two.write_bytes(b'null\n{"prompt":"3","custom_id":"q"}\n{"prompt":"4"}\n')
    seen: list[tuple[Any, ...]] = []

    def listeners(loader: Any) -> list[Any]:
        return [lambda requests: seen.extend((r.body["prompt"], *loader.place_of(r.index)) for r in requests)]

    inspect(opened([one, two]), Plan(), listeners=listeners)
    assert seen == [("0", str(one), 1), ("1", str(one), 3), ("4", str(two), 3)]


# ---------------------------------------------------------------------------------------------------- the command

BAD = b'{"prompt":"a"}\n\n{"prompt":1}\n{"custom_id":"q","prompt":"a"}\n{"custom_id":"q","prompt":"a"}\n'


@case("A-cli-02", "A-in-09")
def test_the_command_prints_what_submit_prints(command_line: CommandLine) -> None:
    refused = command_line.run("submit", "-", stdin=BAD)
    done = command_line.run("validate", "-", "--lines-only", stdin=BAD)
    assert (done.exit_code, done.stderr) == (refused.exit_code, refused.stderr) == (2, done.stderr)
    assert done.stderr.splitlines()[-1] == "batchjobs: standard input: 2 invalid lines; nothing was stored"
    assert done.stdout.splitlines()[:2] == ["lines          4, 2 of them invalid", "requests       2: 2 completions"]


def test_neither_database_nor_redis_is_needed(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHJOBS_DATABASE_URL", "postgresql://u:p@127.0.0.1:1/db")
    monkeypatch.setenv("BATCHJOBS_REDIS_URL", "redis://127.0.0.1:1/0")
    done = command_line.run("validate", "-", "--lines-only", stdin=GOOD)
    assert (done.exit_code, done.stderr) == (0, "")
    assert not command_line.home.exists()


def test_json_is_one_object_with_the_errors_in_it(command_line: CommandLine) -> None:
    done = command_line.run("validate", "-", "--lines-only", "--json", "--throughput", "64", stdin=BAD)
    report = json.loads(done.stdout)
    assert done.exit_code == 2
    assert (report["lines"], report["invalid_lines"], report["requests"]["total"]) == (4, 2, 2)
    assert [(error["line"], error["code"]) for error in report["errors"]] == [
        (3, "invalid_request"),
        (5, "duplicate_custom_id"),
    ]
    assert report["time"] == {
        "speed": "stated",
        "tokens_per_second": 64.0,
        "at_most_seconds": 8.0,
        "half_seconds": 4.0,
    }
    assert report["files"] == ["standard input"]
    assert done.stderr == "batchjobs: standard input: 2 invalid lines; nothing was stored\n"


def test_without_a_model_a_note_says_so(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.models.bundled_model", lambda: None)
    done = command_line.run("validate", "-", stdin=GOOD)
    assert done.exit_code == 0
    assert done.stderr == "note: no model is named, so no tokens were counted; --model names one\n"
    assert done.stdout.splitlines()[-1] == "answer tokens  at most 256"
    measured = command_line.run("validate", "-", "--measure", stdin=GOOD)
    assert (measured.exit_code, measured.stdout) == (2, "")
    assert measured.stderr.startswith("batchjobs: --measure needs a model: no model is named")


def test_without_torch_a_note_says_so(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "workers.model_outline", None)
    done = command_line.run("validate", "-", "--model", "m", stdin=GOOD)
    assert done.exit_code == 0
    assert "note: no tokens were counted: that needs the Python package workers.model_outline" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (90000, "1 d 1 h"),
        (9e7, "1,041 d 16 h"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_lines_ask_for_is_shown_where_there_is_any(command_line: CommandLine) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "n": 2, "seed": 1},
        {"prompt": "a", "n": 2, "seed": 1},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
    ]
    lines += [{"prompt": "a", "model": f"m{number}"} for number in range(7)]
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    done = command_line.run("validate", "-", "--lines-only", "--max-tokens", 10, stdin=content)
    assert done.stdout.splitlines() == [
        "lines          10, 6 of them invalid",
        "requests       4: 1 chat, 3 completions; 6 choices",
        "asking for     response_format 1, seed 2",
        "named models   m0 (1), m1 (1), m2 (1), m3 (1), m4 (1) and 2 more",
        "repeated       1 request with the prompt and the sampling of an earlier one",
        "answer tokens  at most 60",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl",), "batchjobs: cannot read none.jsonl: No such file or directory\n"),
        (("-", "--measure", "--throughput", "5"), "give one of them"),
        (("-", "--measure", "--lines-only"), "--measure needs the model"),
        (("-", "--throughput", "0"), "--throughput"),
        (("-", "--max-tokens", "0"), "max_tokens must be 1 or more"),
        (("-", "--lines-only"), "no requests in standard input; nothing was stored"),
    ],
)
def test_wrong_usage_is_told(command_line: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    done = command_line.run("validate", *arguments, stdin=b"")
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@case("A-sec-02")
def test_names_in_the_report_drive_no_terminal(command_line: CommandLine) -> None:
    line = json.dumps({"prompt": "a", "model": "\x1b[2J\x9b31m"}).encode()
    done = command_line.run("validate", "-", "--lines-only", stdin=line)
    assert "named models   \\x1b[2J\\x9b31m (1)" in done.stdout
    assert not any(ord(character) < 32 and character != "\n" for character in done.output)
