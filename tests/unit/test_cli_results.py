"""``batchjobs results`` and ``show``: forms, files, and what happens half-way."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from batchjobs.cli import formats
from batchjobs.cli.console import print_table
from batchjobs.cli.files import check_target, output
from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, PromptScores, RequestStatus, VersionSpan
from tests.support.answers import answer, answer_all, failure
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line
from tests.support.odd_answers import odd_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchjobs.types import Completion, Request

__all__ = ["command_line"]

KEYS = [
    "custom_id", "index", "status", "text", "finish_reason", "model", "model_version", "prompt_tokens",
    "completion_tokens", "cached_tokens", "token_ids", "logprobs", "top_logprobs", "token_times", "created_at",
    "started_at", "first_token_at", "finished_at", "worker", "attempt", "error", "tokens",
    "version_spans",
]  # fmt: skip
SCORES = PromptScores(
    token_ids=(72, 105), tokens=("H", "i"), logprobs=(None, -0.75), top_logprobs=(None, ((105, -0.75, "i"),))
)


def outcome(request: Request) -> Completion:
    """By the prompt: an answer of that text, a failure, or a text that was cut."""
    prompt = str(request.body.get("prompt", "chat"))
    if prompt == "fail":
        return failure(request)
    if prompt == "cancel":
        return answer(request, "par", status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)
    return answer(request, prompt)


def answered(line: CommandLine, *requests: dict[str, Any]) -> str:
    """The id of a finished batch of these lines."""
    batch = line.submit(*requests)
    store = line.store()
    answer_all(store, batch, outcome)
    store.close()
    return batch


def answered_three_times(line: CommandLine, *, failing: bool) -> str:
    """The id of a finished batch of one line that asked for three choices, the last of which may have failed."""
    batch = line.submit({"custom_id": "q", "prompt": "Hi", "n": 3, "seed": 1})
    store = line.store()
    store.open_batch(batch)
    [lease] = store.claim([shard for shard, _ in store.claimable(1)], "w1", 60)
    [request] = store.pending_requests(lease)
    last = failure(request) if failing else answer(request, "blue")
    made = [answer(request, "red"), answer(request, "green", finish_reason=FinishReason.LENGTH), last]
    store.record([(lease, replace(each, choice=number)) for number, each in enumerate(made)])
    store.close()
    return batch


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


# ---------------------------------------------------------------------------------------------------------- forms


def test_flat_lines_have_the_keys_in_their_order(command_line: CommandLine) -> None:
    batch = answered(command_line, {"custom_id": "q", "prompt": "Hey"}, {"prompt": "fail"}, {"prompt": "cancel"})
    good, failed, cancelled = rows(command_line.out("results", batch))
    assert list(good) == list(failed) == list(cancelled) == KEYS
    assert good == {
        **good,
        "custom_id": "q",
        "index": 0,
        "status": "completed",
        "text": "Hey",
        "finish_reason": "stop",
        "model": "tiny",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "token_ids": [72, 101, 121],
        "logprobs": [0.0, -0.5, -1.0],
        "top_logprobs": None,
        "token_times": [0.25, 0.5, 0.75],
        "started_at": "2026-03-01T12:00:00.250000Z",
        "finished_at": "2026-03-01T12:00:01Z",
        "error": None,
        "tokens": ["H", "e", "y"],
    }
    assert failed["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert (failed["status"], failed["finish_reason"], failed["text"]) == ("failed", "error", "")
    assert (cancelled["status"], cancelled["finish_reason"], cancelled["text"]) == ("cancelled", "cancelled", "par")


def test_a_line_is_one_line_wherever_others_end_theirs(command_line: CommandLine) -> None:
    ends = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\nz"
    batch = answered(command_line, {"prompt": ends}, {"prompt": "b"})
    for form in ("jsonl", "openai"):
        lines = command_line.out("results", batch, "--format", form).splitlines()
        assert len([json.loads(line) for line in lines]) == 2
    assert json.loads(command_line.out("results", batch).splitlines()[0])["text"] == ends


def test_with_several_choices_the_line_is_the_first_ones_and_has_them_all(command_line: CommandLine) -> None:
    (row,) = rows(command_line.out("results", answered_three_times(command_line, failing=False)))
    assert list(row) == [*KEYS, "n", "choices"]
    assert (row["text"], row["finish_reason"], row["status"], row["n"]) == ("red", "stop", "completed", 3)
    assert row["completion_tokens"] == len(row["token_ids"]) == 3
    assert [(c["choice"], c["text"], c["finish_reason"], c["completion_tokens"]) for c in row["choices"]] == [
        (0, "red", "stop", 3),
        (1, "green", "length", 5),
        (2, "blue", "stop", 4),
    ]
    assert list(row["choices"][1]) == [
        "choice", "status", "text", "finish_reason", "completion_tokens", "token_ids", "logprobs", "top_logprobs",
        "token_times", "started_at", "first_token_at", "finished_at", "error", "tokens", "version_spans",
    ]  # fmt: skip
    assert row["choices"][1]["tokens"] == list("green")
    assert row["choices"][0] == {"choice": 0, **{k: row[k] for k in row["choices"][0] if k != "choice"}}


def test_with_a_failed_choice_the_request_has_failed(command_line: CommandLine, tmp_path: Path) -> None:
    batch = answered_three_times(command_line, failing=True)
    (row,) = rows(command_line.out("results", batch))
    assert (row["status"], row["error"]["code"], row["text"]) == ("failed", "context_length_exceeded", "red")
    assert [c["status"] for c in row["choices"]] == ["completed", "completed", "failed"]
    command_line.out("results", batch, "--format", "openai", "-o", tmp_path / "o", "--errors", tmp_path / "e")
    assert (tmp_path / "o").read_text() == ""
    assert [line["error"]["code"] for line in rows((tmp_path / "e").read_text())] == ["context_length_exceeded"]
    status = command_line.json("status", batch)
    assert (status["counts"]["total"], status["counts"]["failed"]) == (1, 1)
    assert status["failures"] == {"context_length_exceeded": 1}
    assert (status["tokens"]["prompt"], status["tokens"]["completion"]) == (10, 8)
    assert command_line.run("wait", batch).exit_code == 5


def test_csv_and_table_have_the_first_choice_and_their_number(command_line: CommandLine) -> None:
    batch = answered_three_times(command_line, failing=False)
    (row,) = csv.DictReader(io.StringIO(command_line.out("results", batch, "--format", "csv")))
    assert (row["text"], row["choices"], row["completion_tokens"]) == ("red", "3", "3")
    assert "(1 of 3) red" in command_line.out("results", batch, "--format", "table")


def test_show_prints_every_choice(command_line: CommandLine) -> None:
    batch = answered_three_times(command_line, failing=True)
    shown = [" ".join(line.split()) for line in command_line.out("show", f"{batch}/0").splitlines()]
    for line in (
        "status failed",
        "error context_length_exceeded: too long",
        "tokens 10 in the prompt (4 cached), 8 generated",
        "choice 0: completed, stop, 3 tokens",
        "red",
        "choice 1: completed, length, 5 tokens",
        "green",
        '4 "n" 110 -2.0000 1.250',
        "choice 2: failed, error, 0 tokens, context_length_exceeded: too long",
    ):
        assert line in shown
    found = command_line.json("show", f"{batch}/0")
    assert [choice["text"] for choice in found["choices"]] == ["red", "green", ""]


SPANS = (
    VersionSpan(version="sha256:aa", from_token=0, worker="w1", attempt=1),
    VersionSpan(version="sha256:bb", from_token=2, worker="w\x1b2", attempt=3),
)


@case("A-eng-04")
def test_every_form_says_which_version_drew_which_tokens(command_line: CommandLine) -> None:
    """An answer of two versions is marked, with the token at which they changed."""
    batch = command_line.submit({"prompt": "Hi"}, {"prompt": "Ho"})
    store = command_line.store()
    answer_all(
        store,
        batch,
        lambda request: answer(
            request, "Hello", version_spans=SPANS[: 2 - request.index], model_version=SPANS[1 - request.index].version
        ),
    )
    store.close()
    written = [
        {"version": "sha256:aa", "from_token": 0, "worker": "w1", "attempt": 1},
        {"version": "sha256:bb", "from_token": 2, "worker": "w\x1b2", "attempt": 3},
    ]
    found = rows(command_line.out("results", batch))
    assert [(row["model_version"], row["version_spans"]) for row in found] == [
        ("sha256:bb", written),
        ("sha256:aa", written[:1]),
    ]
    table = csv.DictReader(io.StringIO(command_line.out("results", batch, "--format", "csv")))
    assert [json.loads(row["version_spans"]) for row in table] == [written, written[:1]]
    bodies = [row["response"]["body"] for row in rows(command_line.out("results", batch, "--format", "openai"))]
    assert [body["system_fingerprint"] for body in bodies] == ["sha256:bb", "sha256:aa"]
    mixed, plain = (command_line.out("show", f"{batch}/{index}") for index in (0, 1))
    shown = [line.split() for line in mixed.splitlines()]
    assert ["0", "to", "1", "sha256:aa", "w1", "1"] in shown
    assert ["2", "to", "4", "sha256:bb", "w\\x1b2", "3"] in shown
    assert "0 to" not in plain
    assert command_line.json("show", f"{batch}/0")["version_spans"] == written


@case("A-sp-09")
def test_prompt_scores_are_there_where_they_were_asked_for(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 0})
    store = command_line.store()
    answer_all(store, batch, lambda request: replace(answer(request, ""), text="Hi", prompt_scores=SCORES))
    store.close()
    (row,) = rows(command_line.out("results", batch))
    assert list(row) == [*KEYS, "prompt_token_ids", "prompt_logprobs", "prompt_top_logprobs"]
    assert (row["text"], row["token_ids"], row["prompt_token_ids"]) == ("Hi", [], [72, 105])
    assert (row["prompt_logprobs"], row["prompt_top_logprobs"]) == ([None, -0.75], [None, [[105, -0.75, "i"]]])
    shown = [" ".join(line.split()) for line in command_line.out("show", f"{batch}/0").splitlines()]
    assert '0 "H" 72' in shown
    assert '1 "i" 105 -0.7500 "i" -0.75' in shown


@case("A-out-01", "A-out-02")
def test_results_are_in_input_order_and_readable_while_the_batch_runs(command_line: CommandLine) -> None:
    batch = command_line.submit(*({"prompt": str(number)} for number in range(6)), options=("--shard-size", 2))
    assert command_line.run("results", batch).stdout == ""
    store = command_line.store()
    claimed = [shard for shard, _ in store.claimable(10)]
    for lease in store.claim([claimed[2], claimed[0]], "w", 60):
        store.record([(lease, outcome(request)) for request in store.pending_requests(lease)])
    store.close()
    done = command_line.run("results", batch)
    assert [row["text"] for row in rows(done.stdout)] == ["0", "1", "4", "5"]
    assert done.stderr == "note: the batch is running; 2 requests had not ended\n"


@case("A-out-05")
def test_openai_form_puts_failures_into_their_own_file(command_line: CommandLine, tmp_path: Path) -> None:
    chat = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}}
    batch = answered(
        command_line, {"custom_id": "a", **chat}, {"custom_id": "b", "prompt": "fail"}, {"prompt": "cancel"}
    )
    done = command_line.run("results", batch, "--format", "openai")
    (good,) = rows(done.stdout)
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "chat"
    assert done.stderr == "note: 2 requests without an answer left out; --errors FILE writes them\n"
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    assert command_line.run("results", batch, "--format", "openai", "-o", out, "--errors", errors).output == ""
    assert rows(out.read_text()) == [good]
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in rows(errors.read_text())] == [
        ("b", None, "context_length_exceeded"),
        ("request-2", None, "batch_cancelled"),
    ]


def test_csv_has_the_single_values(command_line: CommandLine) -> None:
    batch = answered(command_line, {"custom_id": 'a,"b"', "prompt": "x\ny"}, {"prompt": "fail"})
    table = list(csv.DictReader(io.StringIO(command_line.out("results", batch, "--format", "csv"))))
    assert [row["text"] for row in table] == ["x\ny", ""]
    assert (table[0]["custom_id"], table[0]["completion_tokens"]) == ('a,"b"', "3")
    assert (table[1]["error_code"], table[1]["error_message"]) == ("context_length_exceeded", "too long")
    assert table[0]["finished_at"].endswith("Z")


@case("A-out-05")
@pytest.mark.parametrize("form", ["jsonl", "openai", "csv", "parquet"])
def test_failures_may_have_a_file_of_their_own_in_every_form(
    command_line: CommandLine, tmp_path: Path, form: str
) -> None:
    """What did not complete is there and nowhere else, in the same form and order."""
    batch = answered(command_line, {"prompt": "a"}, {"prompt": "fail"}, {"prompt": "cancel"}, {"prompt": "b"})
    out, errors = tmp_path / "out", tmp_path / "errors"
    assert command_line.run("results", batch, "--format", form, "-o", out, "--errors", errors).output == ""
    assert [row["custom_id"] for row in read(form, out)] == ["request-0", "request-3"]
    assert [row["custom_id"] for row in read(form, errors)] == ["request-1", "request-2"]
    assert list(read(form, errors)[0]) == list(read(form, out)[0])
    whole = answered(command_line, {"prompt": "a"})
    command_line.out("results", whole, "--format", form, "-o", out, "--errors", errors, "--force")
    assert (len(read(form, out)), read(form, errors)) == (1, [])


def read(form: str, file: Path) -> list[dict[str, Any]]:
    if form == "parquet":
        found: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        return found
    text = file.read_bytes().decode()
    return list(csv.DictReader(io.StringIO(text, newline=""))) if form == "csv" else rows(text)


def test_csv_is_read_back_exactly_by_others(command_line: CommandLine, tmp_path: Path) -> None:
    """Cells are what is stored, also where a spreadsheet would take them for formulas; a NUL cannot be in them."""
    store = command_line.store()
    batch = odd_batch(store)
    store.close()
    flat = rows(command_line.out("results", batch))
    wanted = [(row["custom_id"], row["text"], row["error"]["message"] if row["error"] else "") for row in flat]
    assert [text for _, text, _ in wanted][6:] == ["=1+1", "+1", "-1", "@SUM(A1)"]
    made = command_line.run("results", batch, "--format", "csv").stdout_bytes
    assert b"\0" not in made
    read_back = list(csv.DictReader(io.StringIO(made.decode(), newline="")))
    assert [(row["custom_id"], row["text"], row["error_message"]) for row in read_back] == wanted
    table = pyarrow.csv.read_csv(
        io.BytesIO(made),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types={"text": "string", "error_message": "string"}),
    )
    columns = [table[name].to_pylist() for name in ("custom_id", "text", "error_message")]
    assert list(zip(*columns, strict=True)) == wanted
    assert table["finished_at"].type == pyarrow.timestamp("ns", tz="UTC")


def test_table_is_for_the_screen(command_line: CommandLine) -> None:
    batch = answered(command_line, {"prompt": "Hello"}, {"prompt": "fail"})
    shown = command_line.out("results", batch, "--format", "table")
    assert "Hello" in shown
    assert "too long" in shown


def test_a_long_table_comes_in_blocks(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all rows are kept until the last one is there."""
    monkeypatch.setattr("batchjobs.cli.formats._TABLE_BLOCK", 2)
    batch = answered(command_line, *({"prompt": "a"} for _ in range(5)))
    shown = command_line.out("results", batch, "--format", "table").splitlines()
    assert [line.split()[0] for line in shown if "request-" in line] == list("01234")
    assert sum(line.startswith("index") for line in shown) == 3
    empty = command_line.submit({"prompt": "a"})
    assert command_line.out("results", empty, "--format", "table").split()[:2] == ["index", "custom_id"]


def test_ids_and_numbers_are_whole_on_narrow_terminals(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = answered(command_line, {"custom_id": "invoice-2024-000017", "prompt": "Hello " * 12})
    for columns in ("100", "80", "60", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        listed = command_line.out("list").splitlines()
        assert len(listed) == 3
        assert listed[2].startswith(batch + "  ")
        shown = command_line.out("results", batch, "--format", "table").splitlines()
        assert len(shown) == 3
        assert shown[2].split()[:2] == ["0", "invoice-2024-000017"]


def test_tables_fit_and_say_what_was_shortened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_table(("id", "text", "n"), [("0123456789", "a text that is too long", 1234)], right=("n",), whole=("id",))
    heading, _, row = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert heading == "id          text             n"
    assert row == "0123456789  a text that…  1234"
    print_table(("id", "text"), [("0123456789", "a text that is too long")])
    folded = capsys.readouterr().out.splitlines()[2:]
    assert " ".join(line[12:].strip() for line in folded) == "a text that is too long"


@case("A-in-07")
def test_crlf_input_leaves_no_carriage_return(command_line: CommandLine, tmp_path: Path) -> None:
    batch = command_line.out("submit", "-", stdin=b'{"custom_id":"7","prompt":"b"}\r\n').strip()
    command_line.out("cancel", batch, "--yes")
    for form in ("jsonl", "csv", "openai"):
        command_line.out(
            "results", batch, "--format", form, "-o", tmp_path / "o", "--errors", tmp_path / form, "--force"
        )
        written = (tmp_path / "o").read_bytes() + (tmp_path / form).read_bytes()
        assert b"7" in written
        assert b"\r" not in written
        assert b"\\r" not in written


# ---------------------------------------------------------------------------------------------------------- files


def test_a_dash_is_stdout_for_answers_only(command_line: CommandLine, tmp_path: Path) -> None:
    batch = answered(command_line, {"prompt": "a"})
    assert command_line.out("results", batch, "-o", "-") == command_line.out("results", batch)
    refused = command_line.run("results", batch, "--format", "openai", "--errors", "-")
    assert refused.exit_code == 2
    assert "failures need a file of their own; name one" in refused.stderr
    assert not (tmp_path / "-").exists()


@case("A-out-03", "A-out-04")
def test_an_existing_file_needs_force(command_line: CommandLine, tmp_path: Path) -> None:
    batch = answered(command_line, {"prompt": "a"})
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    refused = command_line.run("results", batch, "-o", target)
    assert (refused.exit_code, target.read_text()) == (2, "precious")
    assert f"{target} exists already; --force replaces it" in refused.stderr
    command_line.out("results", batch, "-o", target, "--force")
    assert len(rows(target.read_text())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out.jsonl"]


@case("A-out-03")
def test_nothing_goes_over_the_input_or_the_database(command_line: CommandLine, tmp_path: Path) -> None:
    """By whatever name, and not even with --force."""
    source, link, same = tmp_path / "in.jsonl", tmp_path / "link", tmp_path / "same"
    source.write_text('{"prompt":"a"}\n')
    link.symlink_to("in.jsonl")
    same.hardlink_to(source)
    batch = command_line.out("submit", source).strip()
    for target in (source, "./in.jsonl", link, same):
        for options in (("-o", target), ("--errors", target), ("--sqlite", target)):
            refused = command_line.run("results", batch, *options, "--force")
            assert refused.exit_code == 2
            said = f"batchjobs: {Path(target)} is the input file; choose another name for the output\n"
            assert refused.stderr == said
    own = command_line.home / "batchjobs.sqlite3"
    for option in ("-o", "--sqlite"):
        refused = command_line.run("results", batch, option, own, "--force")
        assert refused.exit_code == 2
        assert "is the database of batchjobs; choose another name" in refused.stderr
    assert source.read_text() == same.read_text() == '{"prompt":"a"}\n'
    assert command_line.json("status", batch)["counts"]["total"] == 1


@case("A-out-03")
def test_an_input_is_known_by_a_name_with_line_feeds_too(command_line: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "x\n"
    folder.mkdir()
    sources = [tmp_path / "a\nb\n\nc.jsonl", tmp_path / "plain.jsonl", folder / "d.jsonl", tmp_path / "last.jsonl"]
    for number, source in enumerate(sources):
        source.write_text(f'{{"prompt":"{number}"}}\n')
    batch = command_line.out("submit", *sources).strip()
    for number, source in enumerate(sources):
        refused = command_line.run("results", batch, "-o", source, "--force")
        assert refused.exit_code == 2
        assert "is the input file; choose another name for the output" in refused.stderr
        assert source.read_text() == f'{{"prompt":"{number}"}}\n'
    command_line.out("results", batch, "-o", tmp_path / "a", "--force")


@case("A-out-03")
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_a_file_that_appears_meanwhile_stays_and_the_answers_are_kept(
    command_line: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    links: bool,
) -> None:
    """Also on file systems without links, and whatever becomes of the other output."""
    if not links:
        monkeypatch.setattr(os, "link", not_permitted)
    batch = answered(command_line, {"prompt": "a"}, {"prompt": "fail"})
    meanwhile: list[Path] = []
    write = formats.write

    def write_slowly(*arguments: Any, **more: Any) -> Any:
        for path in meanwhile:
            path.write_text("precious")
        return write(*arguments, **more)

    monkeypatch.setattr(formats, "write", write_slowly)
    out, errors = tmp_path / "out", tmp_path / "errors"
    for appearing in ([out], [errors], [out, errors]):
        meanwhile = appearing
        done = command_line.run("results", batch, "-o", out, "--errors", errors, *options)
        kept = {path: only(tmp_path.glob(f".{path.name}.*.part")) for path in appearing}
        said = [f"{path} has appeared meanwhile and stays as it is; what was to go there is whole in {kept[path]}"
                for path in reversed(appearing)]  # fmt: skip
        assert (done.exit_code, done.stderr) == (2, f"batchjobs: {'; '.join(said)}\n")
        assert [path.read_text() for path in appearing] == ["precious"] * len(appearing)
        for path, status in ((out, "completed"), (errors, "failed")):
            assert [row["status"] for row in rows(kept.get(path, path).read_text())] == [status]
        for path in {out, errors, *kept.values()}:
            path.unlink()
    meanwhile = []
    assert command_line.run("results", batch, "-o", out, "--errors", errors).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "home", "out"]
    meanwhile = [out]
    command_line.out("results", batch, "-o", out, "--force")
    assert out.read_text() != "precious"


def not_permitted(*arguments: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def only(found: Iterable[Path]) -> Path:
    (one,) = found
    return one


def test_a_batch_in_a_database_of_its_own(command_line: CommandLine, tmp_path: Path) -> None:
    store = command_line.store()
    batch = odd_batch(store)
    store.close()
    answered(command_line, {"prompt": "of another batch"})
    copy = tmp_path / "copy.db"
    done = command_line.run("results", batch, "--sqlite", copy)
    assert (done.exit_code, done.output) == (0, "note: the batch is running; 1 request had not ended\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "home"]
    wanted = command_line.out("results", batch)
    of_copy = ("--database-url", f"sqlite:///{copy}")
    assert command_line.run(*of_copy, "results", batch).stdout == wanted
    assert [listed["id"] for listed in command_line.json_lines(*of_copy, "list")] == [batch]
    again = command_line.run("results", batch, "--sqlite", copy)
    assert (again.exit_code, again.stderr) == (2, f"batchjobs: {copy} exists already; --force replaces it\n")
    assert command_line.run("results", batch, "--sqlite", copy, "--force").exit_code == 0
    (tmp_path / "copy.db-wal").touch()
    is_open = command_line.run("results", batch, "--sqlite", copy, "--force")
    assert is_open.exit_code == 2
    assert "seems to be open in another program (copy.db-wal is beside it); close that" in is_open.stderr


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that may not be written; the test is done as a user who is not allowed everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(before)
        folder.chmod(0o755)


def test_a_folder_without_permission_is_named(read_only: Path) -> None:
    with pytest.raises(UsageError, match=f"the folder {read_only} cannot be written; change its permissions"):
        check_target(read_only / "out", force=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "."), "is a folder"),
        (("-o", "none/out"), "does not exist; create it first"),
        (("--format", "table", "--errors", "e"), "shows failures too; leave out --errors"),
        (("--format", "table", "--follow"), "use --follow with jsonl, openai or csv"),
        (("-o", "x", "--errors", "./x"), "name the same file"),
        (("--sqlite", "-"), "a database needs a file of its own; name one"),
        (("--sqlite", "x.db", "-o", "x"), "leave out --output"),
        (("--sqlite", "x.db", "--format", "jsonl"), "leave out --format"),
        (("--sqlite", "x.db", "--json"), "leave out --json"),
        (("--sqlite", "x.db", "--errors", "e"), "leave out --errors"),
        (("--sqlite", "x.db", "--follow"), "leave out --follow"),
        (("--sqlite", "/dev/null"), "/dev/null is no plain file; a database needs one"),
        (("--sqlite", "none/out"), "does not exist; create it first"),
        (("--format", "openai", "-o", "x", "--errors", "x"), "name the same file"),
        (("--format", "table", "-o", "x"), "--format table is for the screen"),
    ],
)
def test_outputs_that_cannot_be(command_line: CommandLine, options: tuple[str, ...], message: str) -> None:
    done = command_line.run("results", "B", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@case("A-out-04")
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """Disk full, Ctrl-C or a crash."""
    target = tmp_path / "out"
    target.write_text("old")

    def write_half(error: BaseException) -> None:
        with output(target) as stream:
            stream.write(b"half")
            raise error

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises(type(error)):
            write_half(error)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert target.read_text() == "old"


def test_a_link_stays_a_link_and_modes_stay(tmp_path: Path) -> None:
    real, link, new = tmp_path / "real", tmp_path / "link", tmp_path / "new"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with output(link) as stream:
        stream.write(b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    try:
        with output(new) as stream:
            stream.write(b"x")
    finally:
        os.umask(mask)
    assert new.stat().st_mode & 0o777 == 0o640


def test_devices_are_written_not_replaced(tmp_path: Path) -> None:
    with output(Path("/dev/null")) as stream:
        stream.write(b"x")
    assert not Path("/dev/null").is_file()


def test_a_device_that_fails_is_named(command_line: CommandLine, tmp_path: Path) -> None:
    """And not another output, which goes as it came."""
    batch = answered(command_line, {"prompt": "a" * 2000}, {"prompt": "fail"})
    for options in ((), ("--errors", tmp_path / "errors")):
        done = command_line.run("results", batch, "-o", "/dev/full", *options)
        assert (done.exit_code, done.stderr) == (1, "batchjobs: /dev/full: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_name_may_be_as_long_as_it_can_be(tmp_path: Path) -> None:
    """In bytes, which are more than its letters."""
    for name in ("あ" * 80 + ".jsonl", "x" + "あ" * 84, "a" * 255, "\udcff" * 255):
        with output(tmp_path / name) as stream:
            (part,) = tmp_path.glob(".*.part")
            stream.write(b"x")
        assert not any("\udc00" <= letter <= "\udfff" for letter in part.name)
        assert (tmp_path / name).read_bytes() == b"x"


def test_null_may_be_named_twice_and_nothing_stays(command_line: CommandLine, tmp_path: Path) -> None:
    batch = answered(command_line, {"prompt": "a"}, {"prompt": "fail"})
    done = command_line.run("results", batch, "-o", "/dev/null", "--errors", "/dev/null")
    assert (done.exit_code, done.output) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_equal_content_is_left_alone_and_other_content_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("same")
    before = target.stat()
    with output(target, keep_equal=True) as stream:
        stream.write(b"same")
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with (
        pytest.raises(UsageError, match="exists already, with other content"),
        output(target, keep_equal=True) as stream,
    ):
        stream.write(b"other")
    assert target.read_text() == "same"
    assert list(tmp_path.iterdir()) == [target]


# ----------------------------------------------------------------------------------------------------------- show


def test_show_tells_everything_about_one_request(command_line: CommandLine) -> None:
    batch = answered(command_line, {"custom_id": "q", "messages": [{"role": "user", "content": "Hi"}], "seed": 1})
    by_index, by_id = command_line.out("show", f"{batch}/0"), command_line.out("show", batch, "--custom-id", "q")
    assert by_index == by_id
    shown = [" ".join(line.split()) for line in by_index.splitlines()]
    for line in (
        f"request {batch}/0",
        "custom_id q",
        "status completed",
        "finish reason stop",
        "prompt user: Hi",
        "parameters max_tokens=256, seed=1",
        "tokens 10 in the prompt (4 cached), 4 generated",
        "started 2026-03-01 12:00:00.250Z",
        "chat",
        '0 "c" 99 -0.0000 0.250',
        '3 "t" 116 -1.5000 1.000',
    ):
        assert line in shown
    found = command_line.json("show", f"{batch}/0")
    assert (found["batch_id"], found["body"]["seed"], found["text"]) == (batch, 1, "chat")


def test_show_knows_what_a_request_is_called(command_line: CommandLine) -> None:
    batch = answered(command_line, {"prompt": "a"})
    assert command_line.run("show", batch).exit_code == 2
    assert command_line.run("show", f"{batch}/9").exit_code == 4
    assert command_line.run("show", f"{batch}/x").exit_code == 2
    assert command_line.run("show", batch, "--custom-id", "REQUEST-0").exit_code == 4
