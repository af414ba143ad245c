"""Where lines come from, and files that are something else than JSON Lines."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchjobs.errors import InvalidInput, UsageError
from batchjobs.inputs import FileInput, StreamInput, fingerprint, numbered_lines, open_source
from batchjobs.sampling_fields import NO_DEFAULTS, Defaults
from tests.support.cases import case

GOOD = b'{"prompt":"a"}\n{"prompt":"b"}\n'


def lines_of(source: Any) -> list[tuple[int, bytes]]:
    return list(open_source(source).lines())


def complaint_about(content: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        list(numbered_lines([StreamInput(io.BytesIO(content), "in.jsonl")]))
    (error,) = caught.value.errors
    assert error.code == "not_json_lines"
    assert caught.value.source == "in.jsonl"
    return error.message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{\n  "prompt": "a"\n}\n', "the JSON is pretty-printed over several lines"),
        (b'{"prompt": "he said \\"yes\\"",\n"n": 1}\n', "the JSON is pretty-printed over several lines"),
        (b'{ "prompt":\n "a" }\n', "the JSON is pretty-printed over several lines"),
        (b'[{"prompt":"a"},{"prompt":"b"}]', "the file is one JSON array"),
        (b'[\n  {"prompt":"a"},\n  {"prompt":"b"}\n]', "the file is one JSON array"),
        (b'{"prompt":"a"},\n{"prompt":"b"},\n', "there are commas between the lines"),
        (b"id,prompt\n1,hello\n", "this looks like CSV"),
        (b'"id","prompt"\n"1","hello"\n', "this looks like CSV"),
        (b"id\tprompt\n1\thello\n", "this looks like tab-separated values"),
        (b"What is the capital of France?\nAnd of Spain?\n", "this looks like plain text"),
        (b"PAR1\x15\x04\x15", "this is a Parquet file"),
        (b"PK\x03\x04\x14\x00", "this is a zip archive or spreadsheet"),
        (b"\x28\xb5\x2f\xfd\x04", "this is zstd-compressed"),
        ('{"prompt":"a"}\n'.encode("utf-16"), "this is UTF-16 text"),
        ('{"prompt":"a"}\n'.encode("utf-16-le"), "this is UTF-16 text"),
        ('{"prompt":"a"}\n'.encode("utf-16-be"), "this is UTF-16 text"),
        ('{"prompt":"a"}\n'.encode("utf-32"), "this is UTF-32 text"),
        (b"%PDF-1.7\n%", "this is a PDF document"),
        (b"SQLite format 3\0abc", "this is an SQLite database"),
        (b"in.jsonl".ljust(257, b"\0") + b"ustar\x0000", "this is a tar archive"),
        (b"\x80\x04\x95\x10\0", "this is binary data"),
        (b"\x1e" + GOOD, "this is a JSON text sequence, with a record separator before each line"),
        (b"\x89PNG\r\n\x1a\n", "this is neither JSON nor UTF-8 text"),
        (b'["a","b"]', "the file is one JSON array"),
        (b'[\n"a",\n"b"\n]', "the file is one JSON array"),
        (b'{"prompt":"a"}\r{"prompt":"b"}\r', "the lines end with CR alone, as on old Macs"),
        (b'{"custom_id":"1",\n "body":{\n "messages":[] } }\n', "the JSON is pretty-printed over several lines"),
        (b"1,hello\n2,bye\n", "this looks like CSV"),
        (b"id;prompt\n1;hello\n", "this looks like CSV"),
        (b'id,prompt\n1,"{""prompt"":""a, b""}"\n', "this looks like CSV"),
        (b"1\thello, there\n2\tbye\n", "this looks like tab-separated values"),
        (b"- prompt: a\n- prompt: b\n", "this looks like YAML"),
        (b"prompt: a\n---\nprompt: b\n", "this looks like YAML"),
        (b"---\nprompt: a\n", "this looks like YAML"),
        (b'[[prompts]]\nprompt = "a"\n', "this looks like TOML"),
        (b"<!DOCTYPE html>\n<html>\n", "this looks like an HTML page, perhaps one that tells an error"),
        (b'<?xml version="1.0"?>\n<a/>\n', "this looks like XML"),
        (b'data: {"prompt":"a"}\n\ndata: {"prompt":"b"}\n', "this looks like a stream of server-sent events"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n",
            "this looks like a Git LFS pointer (`git lfs pull` fetches the file itself)",
        ),
        (b"Hello, you\nQuestion: what, when, where?\n", "this looks like plain text"),
        (b"# Prompts\n\n* a\n", "this looks like plain text"),
    ],
)
@case("A-in-19")
def test_other_kinds_of_files_are_recognised_in_one_sentence(content: bytes, sentence: str) -> None:
    message = complaint_about(content)
    assert len(message) < 200
    assert message.startswith(f"{sentence}; one JSON object per line is wanted")


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        b"[1,2,3]\n" + GOOD,
        b'"hello"\n' + GOOD,
        b"null\n" + GOOD,
        b"oops\n" + GOOD,
        b'{"prompt":"a\n' + GOOD,
        b'{"prompt":"a \\"word\nb"}\n' + GOOD,
        b'{"prompt":"a","temperature":NaN}\n',
        b'{"prompt":"\xe6\x87"}\n{"prompt":"\xe6\x87"}\n',
        b"{'prompt':'a'}\n{'prompt':'b'}\n",
        b"{'prompt':'a'}\n",
        b"// prompts\n" + GOOD,
        b'{"prompt":"a"}{"prompt":"b"}\n',
        b'{"prompt":"a"} # one\n{"prompt":"b"} # two\n',
        b"",
    ],
)
@case("A-in-04")
def test_single_bad_lines_are_left_to_the_lines_own_check(content: bytes) -> None:
    """One bad line does not make a file something else."""
    found = [raw for _, _, raw in numbered_lines([StreamInput(io.BytesIO(content), None)])]
    assert found == content.splitlines()


def test_paths_streams_and_objects_give_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD)
    wanted = [(1, b'{"prompt":"a"}'), (2, b'{"prompt":"b"}')]
    assert lines_of(path) == lines_of(str(path)) == wanted
    assert lines_of(io.BytesIO(GOOD)) == lines_of(io.StringIO(GOOD.decode())) == wanted
    assert lines_of([{"prompt": "a"}, {"prompt": "b"}]) == wanted
    with path.open() as text, path.open("rb") as binary:
        assert lines_of(text) == lines_of(binary) == wanted


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(GOOD))
    writer.start()
    with closing(open_source(path)) as source:
        assert len(list(source.lines())) == 2
    writer.join()


def test_objects_keep_what_the_strict_reader_refuses() -> None:
    found = lines_of([{"prompt": "half \ud800"}, {"temperature": float("nan")}, "text", {"logit_bias": {5: 1}}])
    assert [raw for _, raw in found] == [
        b'{"prompt":"half \\ud800"}',
        b'{"temperature":NaN}',
        b'"text"',
        b'{"logit_bias":{"5":1}}',
    ]
    with pytest.raises(UsageError, match="item 2 cannot be written as JSON"):
        lines_of([{"prompt": "a"}, {"prompt": object()}])


@pytest.mark.parametrize("source", [{"prompt": "a"}, 5, None])
def test_what_cannot_be_an_input_is_refused(source: Any) -> None:
    with pytest.raises(UsageError, match="a path, an open file or an iterable of dicts is wanted"):
        open_source(source)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        open_source(tmp_path)


def test_the_fingerprint_is_that_of_content_model_and_defaults(tmp_path: Path) -> None:
    one, same, other = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    one.write_bytes(GOOD)
    same.write_bytes(GOOD)
    other.write_bytes(GOOD + b"\n")

    def of(*paths: Path, model: str | None = "m", defaults: Defaults = NO_DEFAULTS) -> str:
        return fingerprint([open_source(path).rereadable() for path in paths], model, defaults)

    assert of(one) == of(same)
    assert len({of(one), of(other), of(one, same), of(one, model=None), of(one, defaults=Defaults({"seed": 1}))}) == 5
    assert of(one, defaults=Defaults({"seed": 1, "top_k": 2})) == of(one, defaults=Defaults({"top_k": 2, "seed": 1}))
    assert of(one, defaults=Defaults(system="s")) != of(one)
    versions = [None, *("sha256:" + digit * 16 for digit in "12")]
    assert len({of(one, defaults=Defaults(model_version=version)) for version in versions}) == 3


def test_a_spooled_stream_has_the_fingerprint_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD)
    with closing(open_source(io.BytesIO(GOOD)).rereadable()) as spooled:
        assert fingerprint([spooled], None, NO_DEFAULTS) == fingerprint([FileInput(path)], None, NO_DEFAULTS)
        assert list(spooled.lines()) == list(spooled.lines()) == lines_of(path)


def test_objects_are_spooled_too() -> None:
    with closing(open_source(iter([{"prompt": "a"}, {"prompt": "b"}])).rereadable()) as spooled:
        assert [json.loads(raw) for _, raw in spooled.lines()] == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_file_that_changes_between_hash_and_reading_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD)
    source = FileInput(path)
    source.digest()
    path.write_bytes(GOOD * 2)
    with pytest.raises(UsageError, match="changed while it was read"):
        list(source.lines())


def test_one_line_that_ends_with_cr_alone_is_fine() -> None:
    """Only several of them are a file of another kind, and the message says what rewrites it."""
    assert lines_of(io.BytesIO(b'{"prompt":"a"}\r')) == [(1, b'{"prompt":"a"}')]
    assert "(`tr '\\r' '\\n' < FILE` rewrites it)" in complaint_about(b'{"prompt":"a"}\r{"prompt":"b"}\r')


@pytest.mark.parametrize(("kept", "put", "what"), [(-9, b"", "ends too early"), (None, b"xx", "cannot be read")])
def test_damaged_gzip_is_told_in_one_sentence(kept: int | None, put: bytes, what: str) -> None:
    damaged = gzip.compress(GOOD * 100)[:kept] + put
    with pytest.raises(UsageError) as caught:
        list(StreamInput(io.BytesIO(damaged), "in.gz").lines())
    assert str(caught.value) == f"in.gz is damaged: its gzip data {what}; make or fetch the file again"
