"""Lines -> a stored batch: whole or not at all, in flat memory, and once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import submission
from batchjobs.errors import ConnectionFailed, InvalidInput, KeyConflict, UsageError
from batchjobs.inputs import ObjectInput, StreamInput, open_source
from batchjobs.line_map import LineMap
from batchjobs.sampling_fields import Defaults
from batchjobs.store import Store
from batchjobs.submission import CHUNK_REQUESTS, Plan, Submission, submit
from batchjobs.types import BatchStatus, Priority, ShardId
from tests.support.cases import case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Queue:
    """Stands in for the queue: keeps what is put in, or cannot be reached."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.shards: list[tuple[ShardId, Priority]] = []

    def enqueue(self, shards: Iterable[tuple[ShardId, Priority]]) -> int:
        if self.broken:
            raise ConnectionFailed("the Redis at h cannot be reached")
        before = len(self.shards)
        self.shards.extend(shards)
        return len(self.shards) - before


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'b.sqlite3'}")
    store.prepare()
    yield store
    store.close()


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def send(sqlite: Store, queue: Queue) -> Callable[..., Submission]:
    def send(*sources: Any, **plan: Any) -> Submission:
        inputs = [open_source(io.BytesIO(s) if isinstance(s, bytes) else s) for s in sources]
        return submit(sqlite, lambda: queue, inputs, Plan(**plan))  # type: ignore[arg-type,return-value]

    return send


Send = "Callable[..., Submission]"


def prompts(count: int) -> bytes:
    return b"".join(b'{"prompt":"p%d","temperature":0}\n' % number for number in range(count))


def count_rows(store: Store, table: str) -> int:
    _, rows = store.select(f"select count(*) from {table}")
    return int(next(rows)[0])


def test_a_batch_is_stored_opened_and_queued(sqlite: Store, queue: Queue, send: Send) -> None:
    made = send(prompts(5), shard_size=2, queue=Priority.LOW, name="n", model="m", defaults=Defaults({"max_tokens": 3}))
    info = sqlite.batch(made.batch_id)
    assert (info.name, info.model, info.queue, info.shard_size) == ("n", "m", Priority.LOW, 2)
    assert (info.status, info.counts.total, made.requests, made.created) == (BatchStatus.QUEUED, 5, 5, True)
    assert queue.shards == [(ShardId(made.batch_id, number), Priority.LOW) for number in range(3)]
    stored = list(sqlite.results(made.batch_id))
    assert [row.request.body for row in stored] == [
        {"prompt": f"p{number}", "max_tokens": 3, "temperature": 0} for number in range(5)
    ]
    assert [row.request.custom_id for row in stored] == [f"request-{number}" for number in range(5)]


def test_many_chunks_make_one_batch(sqlite: Store, queue: Queue) -> None:
    seen: list[int] = []
    count = 2 * CHUNK_REQUESTS + 1
    source = StreamInput(io.BytesIO(prompts(count)), None)
    made = submit(sqlite, lambda: queue, [source], Plan(shard_size=500), seen.append)  # type: ignore[arg-type,return-value]
    assert sqlite.batch(made.batch_id).counts.total == count
    assert seen == [CHUNK_REQUESTS, 2 * CHUNK_REQUESTS, count]
    assert len(queue.shards) == 5


def test_an_unreachable_queue_is_a_warning(sqlite: Store, queue: Queue, send: Send) -> None:
    queue.broken = True
    made = send(prompts(2))
    assert made.warning is not None
    assert made.warning.startswith("the batch is stored, but not queued yet: the Redis at h cannot be reached")
    assert sqlite.batch(made.batch_id).submitted_at is not None


@case("A-in-03", "A-cli-02")
def test_one_bad_line_refuses_everything(sqlite: Store, queue: Queue, send: Send) -> None:
    """Every bad line is named by its number, blank lines counted; nothing stays stored."""
    content = b'{"prompt":"ok"}\n\n{"prompt":"\xe6\x87"}\n{"prompt":"ok"}\n{"prompt":1}\n'
    with pytest.raises(InvalidInput, match="2 invalid lines; nothing was stored") as caught:
        send(content)
    assert [(error.line, error.code) for error in caught.value.errors] == [(3, "invalid_utf8"), (5, "invalid_request")]
    assert count_rows(sqlite, "batches") == count_rows(sqlite, "requests") == 0
    assert queue.shards == []


def test_a_bad_line_behind_stored_chunks_takes_them_back(sqlite: Store, send: Send) -> None:
    with pytest.raises(InvalidInput) as caught:
        send(prompts(CHUNK_REQUESTS + 5) + b"{}\n")
    assert [error.line for error in caught.value.errors] == [CHUNK_REQUESTS + 6]
    assert count_rows(sqlite, "batches") == count_rows(sqlite, "requests") == 0


@case("A-in-04")
def test_skipped_lines_become_failed_requests(sqlite: Store, send: Send) -> None:
    content = b'{"prompt":"a"}\n{"custom_id":"bad","prompt":1}\nnull\n{"prompt":"b"}\n'
    made = send(content, skip_invalid=True)
    assert [error.line for error in made.errors] == [2, 3]
    rows = list(sqlite.results(made.batch_id))
    assert [row.state for row in rows] == ["queued", "failed", "failed", "queued"]
    assert [row.request.custom_id for row in rows] == ["request-0", "bad", "request-2", "request-3"]
    assert rows[1].completion is not None
    assert rows[1].completion.error is not None
    assert rows[1].completion.error.message == "line 2: prompt must be a string or a list of token ids, not an integer"
    counts = sqlite.batch(made.batch_id).counts
    assert (counts.total, counts.queued, counts.failed) == (4, 2, 2)


def test_a_batch_of_bad_lines_alone_has_ended(sqlite: Store, send: Send) -> None:
    info = sqlite.batch(send(b"null\n[1]\n", skip_invalid=True).batch_id)
    assert (info.status, info.counts.failed) == (BatchStatus.COMPLETED, 2)


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
@case("A-in-08")
def test_no_requests_is_an_error(sqlite: Store, send: Send, content: bytes) -> None:
    with pytest.raises(UsageError, match="no requests in the input"):
        send(content)
    assert count_rows(sqlite, "batches") == 0


@case("A-in-09")
def test_a_custom_id_twice_is_refused_with_both_lines(send: Send) -> None:
    """Also with blank lines between and chunks apart."""
    first, filler = b'{"custom_id":"q1","prompt":"A"}\n\n', prompts(CHUNK_REQUESTS)
    with pytest.raises(InvalidInput) as caught:
        send(first + filler + b'{"custom_id":"q1","prompt":"B"}\n{"custom_id":"q1","prompt":"C"}\nnull\n')
    last = CHUNK_REQUESTS + 3
    assert [(error.line, error.code) for error in caught.value.errors] == [
        (last, "duplicate_custom_id"),
        (last + 1, "duplicate_custom_id"),
        (last + 2, "invalid_request"),
    ]
    assert str(caught.value.errors[0]) == f'line {last}: custom_id "q1" was used before, on line 1'


def test_a_made_up_id_that_is_taken_is_refused_too(send: Send) -> None:
    with pytest.raises(InvalidInput, match="1 invalid line"):
        send(b'{"custom_id":"request-1","prompt":"A"}\n{"prompt":"B"}\n')


@case("A-in-09")
def test_of_many_skipped_lines_the_first_errors_are_kept_and_all_are_counted(
    sqlite: Store, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MAX_ERRORS", 3)
    made = send(b"null\n[1]\n" * 4 + b'{"prompt":"a"}\n', skip_invalid=True)
    assert (made.invalid, [error.line for error in made.errors]) == (8, [1, 2, 3])
    assert [row.error is not None for row in sqlite.results(made.batch_id)] == [True] * 8 + [False]
    assert made.errors[0].message is made.errors[2].message  # once in memory


def test_lines_are_found_behind_any_number_of_blank_ones() -> None:
    first, second = ObjectInput([]), ObjectInput([])
    lines = LineMap()
    for index, source, line in ((0, first, 1), (1, first, 3), (4, first, 9), (5, second, 2)):
        lines.begin(index, source, line)
    found = [lines[index] for index in range(7)]
    assert [line for _, line in found] == [1, 3, 4, 5, 9, 2, 3]
    assert [source is second for source, _ in found] == [False] * 5 + [True] * 2


def test_the_second_use_of_a_custom_id_can_be_skipped(sqlite: Store, send: Send) -> None:
    made = send(b'{"custom_id":"q1","prompt":"A"}\n{"custom_id":"q1","prompt":"B"}\n', skip_invalid=True)
    rows = list(sqlite.results(made.batch_id))
    assert [(row.request.custom_id, row.state) for row in rows] == [("q1", "queued"), ("q1", "failed")]


@case("A-cli-04")
def test_ids_that_differ_in_case_only_are_two(sqlite: Store, send: Send) -> None:
    made = send(b'{"custom_id":"a","prompt":"A"}\n{"custom_id":"A","prompt":"B"}\n')
    assert sqlite.result_by_custom_id(made.batch_id, "A").request.index == 1


@case("A-in-16")
def test_one_batch_has_one_model(send: Send) -> None:
    """A second model is refused by name; the first is told."""

    def line(number: int, model: str | None) -> bytes:
        body = {"prompt": "a"} | ({"model": model} if model else {})
        return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}).encode()

    with pytest.raises(InvalidInput) as caught:
        send(b"\n".join([line(1, "small"), line(2, None), line(3, "other")]))
    (error,) = caught.value.errors
    assert (error.line, error.field, error.custom_id) == (3, "body.model", "3")
    assert error.message == 'model "other" differs from "small" in an earlier line; a batch has one model'
    assert send(b"\n".join([line(1, "small"), line(2, None)])).line_model == "small"


def test_several_files_are_one_batch_and_errors_name_theirs(sqlite: Store, tmp_path: Path, send: Send) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(b'{"custom_id":"a","prompt":"1"}\n')
    two.write_bytes(b'{"custom_id":"b","prompt":"2"}\n')
    made = send(one, two)
    assert [row.request.body["prompt"] for row in sqlite.results(made.batch_id)] == ["1", "2"]
    two.write_bytes(b'\n{"custom_id":"a","prompt":"2"}\n')
    with pytest.raises(InvalidInput) as caught:
        send(one, two)
    assert str(caught.value.errors[0]) == f'{two}, line 2: custom_id "a" was used before, on line 1 of {one}'


def source_of(store: Store, made: Submission) -> str | None:
    _, rows = store.select(f"select source from batches where id = '{made.batch_id}'")
    return next(rows)[0]


def test_files_are_kept_by_their_absolute_paths(
    sqlite: Store, tmp_path: Path, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two, too.jsonl"
    one.write_bytes(b'{"custom_id":"a","prompt":"1"}\n')
    two.write_bytes(b'{"custom_id":"b","prompt":"2"}\n')
    monkeypatch.chdir(tmp_path)
    assert source_of(sqlite, send("one.jsonl")) == str(one)
    assert source_of(sqlite, send("./one.jsonl", two)) == f"{one}\n{two}"
    with open("one.jsonl", "rb") as opened:
        assert source_of(sqlite, send(opened)) == str(one)
    assert source_of(sqlite, send("one.jsonl", key="k")) == str(one)


def test_what_is_no_file_has_its_name_or_none(sqlite: Store, queue: Queue, send: Send) -> None:
    assert source_of(sqlite, send(prompts(1))) is None
    assert source_of(sqlite, send([{"prompt": "a"}])) is None
    piped = StreamInput(io.BytesIO(prompts(1)), "standard input")
    made = submit(sqlite, lambda: queue, [piped], Plan())  # type: ignore[arg-type,return-value]
    assert source_of(sqlite, made) == "standard input"


@case("A-q-02")
def test_a_key_gives_the_same_batch_again(sqlite: Store, queue: Queue, send: Send) -> None:
    first = send(prompts(3), key="k")
    again = send(prompts(3), key="k")
    assert (again.batch_id, again.created, again.requests) == (first.batch_id, False, 3)
    assert count_rows(sqlite, "requests") == 3
    assert len(queue.shards) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "m"},
        {"defaults": Defaults({"seed": 1})},
        {"defaults": Defaults(system="s")},
        {"defaults": Defaults(model_version="sha256:0123456789abcdef")},
        {},
    ],
)
def test_a_key_refuses_other_content(sqlite: Store, send: Send, changes: dict[str, Any]) -> None:
    send(prompts(3), key="k")
    content = prompts(3) if changes else prompts(4)
    with pytest.raises(KeyConflict, match="'k' was used for batch"):
        send(content, key="k", **changes)
    assert count_rows(sqlite, "requests") == 3


def test_a_cut_submission_with_a_key_is_finished_by_the_same_one(sqlite: Store, queue: Queue, send: Send) -> None:
    class Cut(Exception):
        pass

    def cut(stored: int) -> None:
        raise Cut

    content = prompts(CHUNK_REQUESTS + 3)
    with pytest.raises(Cut):
        submit(sqlite, lambda: queue, [open_source(io.BytesIO(content))], Plan(key="k"), cut)  # type: ignore[arg-type,return-value]
    info = sqlite.batch_by_key("k")
    assert info is not None
    assert (info.status, info.submitted_at) == (BatchStatus.LOADING, None)
    seeds = [row.request.body for row in sqlite.results(info.id)]
    assert len(seeds) == CHUNK_REQUESTS
    made = send(content, key="k")
    assert made.batch_id == info.id
    assert sqlite.batch(info.id).counts.total == CHUNK_REQUESTS + 3
    assert [row.request.body for row in sqlite.results(info.id)][:CHUNK_REQUESTS] == seeds


def test_a_cut_submission_without_a_key_is_taken_back(sqlite: Store, queue: Queue) -> None:
    def cut(stored: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(sqlite, lambda: queue, [open_source(io.BytesIO(prompts(3)))], Plan(), cut)  # type: ignore[arg-type,return-value]
    assert count_rows(sqlite, "batches") == count_rows(sqlite, "requests") == 0


def test_a_refused_submission_with_a_key_frees_the_key(sqlite: Store, send: Send) -> None:
    with pytest.raises(InvalidInput):
        send(b"null\n", key="k")
    assert send(prompts(1), key="k").created


def test_objects_are_checked_like_lines(sqlite: Store, send: Send) -> None:
    made = send([{"prompt": "a", "logit_bias": {5: 1.0}, "temperature": 0}])
    (row,) = sqlite.results(made.batch_id)
    assert row.request.body["logit_bias"] == {"5": 1.0}
    with pytest.raises(InvalidInput) as caught:
        send([{"prompt": "a"}, {"prompt": "b", "temperature": float("nan")}])
    assert str(caught.value.errors[0]) == "line 2: temperature is NaN, which is no JSON number"


@case("A-in-21")
def test_memory_stays_flat(sqlite: Store, queue: Queue) -> None:
    """Objects are taken as they come; never more than a chunk is waiting."""
    ahead = {"made": 0, "most": 0, "stored": 0}

    def objects() -> Iterator[dict[str, Any]]:
        for _ in range(5 * CHUNK_REQUESTS):
            ahead["made"] += 1
            ahead["most"] = max(ahead["most"], ahead["made"] - ahead["stored"])
            yield {"prompt": "x", "temperature": 0}

    def stored(count: int) -> None:
        ahead["stored"] = count

    submit(sqlite, lambda: queue, [ObjectInput(objects())], Plan(), stored)  # type: ignore[arg-type,return-value]
    assert ahead["made"] == 5 * CHUNK_REQUESTS
    assert ahead["most"] <= CHUNK_REQUESTS + 2
