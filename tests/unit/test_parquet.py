"""The parquet form, read back with pyarrow: the values of the JSON lines, with types, in row groups of bounded size."""

from __future__ import annotations

import io
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchjobs.cli import formats, parquet
from batchjobs.store import Store
from tests.support.batches import answer, claim, create, request
from tests.support.command_line import CommandLine, command_line
from tests.support.odd_answers import ENDED, ODD, odd_batch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchjobs.store import StoredResult

__all__ = ["command_line"]


@pytest.fixture(scope="module")
def odd(migrated_sqlite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StoredResult]]:
    """What the store gives for a batch of odd answers."""
    file = tmp_path_factory.mktemp("odd") / "b.sqlite3"
    file.write_bytes(migrated_sqlite_file.read_bytes())
    store = Store(f"sqlite:///{file}")
    yield list(store.results(odd_batch(store)))
    store.close()


def written(rows: list[StoredResult], form: str) -> bytes:
    stream = io.BytesIO()
    formats.write(rows, form, stream)
    return stream.getvalue()


def as_line(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table as the JSON line of the same request."""
    line = as_choice(row)
    scores = line.pop("prompt_token_ids"), line.pop("prompt_logprobs"), line.pop("prompt_top_logprobs")
    if line["n"] == 1:
        assert line.pop("choices") is None
        del line["n"]
    else:
        line["choices"] = [as_choice(choice) for choice in line["choices"]]
    if scores[1] is not None:
        line |= {"prompt_token_ids": scores[0], "prompt_logprobs": scores[1], "prompt_top_logprobs": as_tops(scores[2])}
    return line


def as_choice(row: dict[str, Any]) -> dict[str, Any]:
    given = row.pop("token_bytes") or [None] * len(row["tokens"])
    row["tokens"] = [one_of(*pair) for pair in zip(row["tokens"], given, strict=True)]
    row["top_logprobs"] = as_tops(row["top_logprobs"])
    return row


def as_tops(tops: list[list[dict[str, Any]] | None] | None) -> list[list[list[Any]] | None] | None:
    if tops is None:
        return None
    return [
        top and [[each["token_id"], each["logprob"], one_of(each["token"], each["token_bytes"])] for each in top]
        for top in tops
    ]


def one_of(text: str | None, data: bytes | None) -> str | list[int]:
    assert (text is None) != (data is None)
    return list(data) if data is not None else text or ""


def with_instants(line: dict[str, Any]) -> dict[str, Any]:
    for name in ("created_at", "started_at", "first_token_at", "finished_at"):
        if line.get(name) is not None:
            line[name] = datetime.fromisoformat(line[name])
    line["choices"] = [with_instants(choice) for choice in line.get("choices", ())]
    return line if line["choices"] else {name: line[name] for name in line if name != "choices"}


def test_values_are_those_of_the_json_lines(odd: list[StoredResult]) -> None:
    table = pq.read_table(io.BytesIO(written(odd, "parquet")))
    lines = [with_instants(json.loads(line)) for line in written(odd, "jsonl").splitlines()]
    assert len(lines) == ENDED
    assert [as_line(row) for row in table.to_pylist()] == lines
    assert table["text"][0].as_py() == ODD
    assert table["text"][1].as_py() == "a🎉\ufffdé"
    assert table["error"][3].as_py() == {"code": "context_length_exceeded", "message": ODD}


def test_columns_have_types(odd: list[StoredResult]) -> None:
    schema = pq.read_schema(io.BytesIO(written(odd, "parquet")))
    kinds = {field.name: str(field.type) for field in schema}
    assert list(kinds)[:6] == ["custom_id", "index", "status", "text", "finish_reason", "model"]
    top = "struct<token_id: int64, logprob: double, token: string, token_bytes: binary>"
    assert kinds == {
        **kinds,
        "custom_id": "string",
        "index": "int64",
        "completion_tokens": "int64",
        "token_ids": "list<element: int64>",
        "logprobs": "list<element: double>",
        "token_times": "list<element: double>",
        "top_logprobs": f"list<element: list<element: {top}>>",
        "finished_at": "timestamp[us, tz=UTC]",
        "error": "struct<code: string, message: string>",
        "tokens": "list<element: string>",
        "token_bytes": "list<element: binary>",
        "version_spans": "list<element: struct<version: string, from_token: int64, worker: string, attempt: int64>>",
    }
    assert "null" not in set(kinds.values())
    only_failures = [row for row in odd if row.state == "failed"]
    assert pq.read_schema(io.BytesIO(written(only_failures, "parquet"))) == schema
    assert pq.read_table(io.BytesIO(written([], "parquet"))).schema == schema


@pytest.mark.parametrize(("limit", "value"), [("GROUP_ROWS", 4), ("GROUP_BYTES", 1)])
def test_row_groups_are_bounded(
    odd: list[StoredResult], monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(parquet, limit, value)
    monkeypatch.setattr(parquet, "_CHUNK_ROWS", 2)
    file = pq.ParquetFile(io.BytesIO(written(odd, "parquet")))
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert sizes == ([4, 4, 2] if limit == "GROUP_ROWS" else [2, 2, 2, 2, 2])
    assert file.read()["index"].to_pylist() == list(range(ENDED))


def test_many_long_answers_are_converted_few_at_a_time(
    odd: list[StoredResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []
    real = parquet._record_batch
    monkeypatch.setattr(
        parquet, "_record_batch", lambda results, schema: converted.append(len(results)) or real(results, schema)
    )
    monkeypatch.setattr(parquet, "_CHUNK_VALUES", 25)
    written(odd, "parquet")
    assert sum(converted) == ENDED
    assert converted[0] == 2  # 3 and 5 tokens with their alternatives
    assert max(converted) <= 4


class Failing(io.BytesIO):
    """Takes so many bytes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.most:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(data)


def test_what_was_given_up_does_not_look_whole(odd: list[StoredResult]) -> None:
    """Neither after an error of the stream nor after one of the store is there an end of the file."""
    stream: BinaryIO = Failing(1000)
    with pytest.raises(BrokenPipeError):
        formats.write(odd, "parquet", stream)
    interrupted = io.BytesIO()

    def rows() -> Iterator[StoredResult]:
        yield odd[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        formats.write(rows(), "parquet", interrupted)
    for made in (stream, interrupted):
        assert made.getvalue()[:4] == b"PAR1"  # type: ignore[attr-defined]
        with pytest.raises(pa.ArrowInvalid):
            pq.read_table(io.BytesIO(made.getvalue()))  # type: ignore[attr-defined]


def test_a_pipe_gets_the_same_bytes_as_a_file(command_line: CommandLine, tmp_path: Path) -> None:
    store = command_line.store()
    batch = odd_batch(store)
    store.close()
    command_line.out("results", batch, "--format", "parquet", "-o", tmp_path / "a.parquet")
    piped = command_line.run("results", batch, "--format", "parquet").stdout_bytes
    assert piped == (tmp_path / "a.parquet").read_bytes()


def test_without_pyarrow_a_sentence_says_how_to_get_it(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjobs.cli.parquet.find_spec", lambda name: None)
    refused = command_line.run("results", "B", "--format", "parquet")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--format parquet needs pyarrow; install it with: pip install 'batchjobs[parquet]'" in refused.stderr


def test_the_values_of_a_large_row_group_are_all_there(migrated_sqlite_file: Path, tmp_path: Path) -> None:
    (tmp_path / "b.sqlite3").write_bytes(migrated_sqlite_file.read_bytes())
    store = Store(f"sqlite:///{tmp_path / 'b.sqlite3'}")
    batch_id = create(store, shard_size=1500)
    store.add_requests(batch_id, [request(index) for index in range(1500)])
    store.open_batch(batch_id)
    lease = claim(store, batch_id)
    store.record([(lease, answer(index, tokens=index % 7)) for index in range(1500)])
    stream = io.BytesIO()
    formats.write(store.results(batch_id), "parquet", stream)
    store.close()
    table = pq.read_table(stream)
    assert table["index"].to_pylist() == list(range(1500))
    assert [len(ids) for ids in table["token_ids"].to_pylist()] == [index % 7 for index in range(1500)]
