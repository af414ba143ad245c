"""Workers on requests with several choices, with the prompt repeated, and with a response format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.errors import ConnectionFailed
from batchjobs.jsonl import parse_line
from batchjobs.openai_format import openai_line
from batchjobs.results import Result, json_line
from batchjobs.store import Recorded
from batchjobs.types import Counts, RequestStatus
from tests.integration.test_daemon import enqueue, is_complete, open_batch, queue, settings, sqlite, start
from tests.support.cases import case
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from batchjobs.types import Completion, Lease
    from tests.support.workers import ThreadWorker

__all__ = ["queue", "settings", "start"]


def submit_lines(store: Store, queue: JobQueue, *lines: dict[str, Any]) -> str:
    """A batch of input lines, in the queue."""
    batch_id = open_batch(store, *(parse_line(json_line(line), index + 1, index) for index, line in enumerate(lines)))
    enqueue(store, queue)
    return batch_id


def rows(store: Store, batch_id: str) -> list[tuple[Any, ...]]:
    """(index, choice, status, text), straight from the table."""
    columns = '"index", choice, status, text'
    where = f"WHERE batch_id = '{batch_id}' ORDER BY \"index\", choice"
    return list(store.select(f"SELECT {columns} FROM completions {where}")[1])


@case("A-sp-04")
def test_every_choice_is_stored_and_every_request_counted_once(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    """With requests of one, three and 128 choices side by side, more than the engine holds at once."""
    numbers = [1, 3, 128, 1, 3, 2]
    lines = [{"prompt": f"p{index}", "n": n, "max_tokens": 3} for index, n in enumerate(numbers)]
    batch_id = submit_lines(store, queue, *lines)
    assert start(burst=True).join() == 0
    assert rows(store, batch_id) == [
        (index, choice, "completed", expected_text("p0", 3, choice))
        for index, n in enumerate(numbers)
        for choice in range(n)
    ]
    info = store.batch(batch_id)
    assert info.counts == Counts(total=6, completed=6)
    assert (info.tokens.prompt, info.tokens.completion) == (6 * 2, 3 * sum(numbers))
    assert [(r.request.index, len(r.choices)) for r in store.results(batch_id)] == list(enumerate(numbers))


def test_choices_that_end_differently(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    batch_id = submit_lines(
        store, queue, {"prompt": "faulty", "n": 3, "max_tokens": 4}, {"prompt": "uneven", "n": 2, "max_tokens": 4}
    )
    assert start(burst=True).join() == 0
    assert rows(store, batch_id) == [
        (0, 0, "completed", expected_text("faulty", 4)),
        (0, 1, "failed", expected_text("faulty", 1, 1)),
        (0, 2, "completed", expected_text("faulty", 4, 2)),
        (1, 0, "completed", expected_text("uneven", 1)),
        (1, 1, "completed", expected_text("uneven", 4, 1)),
    ]
    assert store.batch(batch_id).counts == Counts(total=2, completed=1, failed=1)
    assert store.failures(batch_id) == {"non_finite_logits": 1}


def test_cancelling_keeps_the_choices_that_had_ended(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit_lines(
        store, queue, {"prompt": "uneven", "n": 3, "max_tokens": 100_000}, {"prompt": "other", "n": 2, "max_tokens": 2}
    )
    worker = start()
    eventually(lambda: store.batch(batch_id).counts.completed == 1, "its neighbour is done")
    assert worker.loop.stats().running == 2, "the choice that stopped by itself has left"
    store.cancel_request(batch_id, 0)
    eventually(lambda: is_complete(store, batch_id), "it is cancelled")
    found = store.result(batch_id, 0)
    assert found.state == RequestStatus.CANCELLED
    assert [(c.status, bool(c.text)) for c in found.choices] == [
        ("completed", True),
        ("cancelled", True),
        ("cancelled", True),
    ]
    assert store.batch(batch_id).counts == Counts(total=2, completed=1, cancelled=1)


def test_cancelled_before_it_began_a_request_has_one_row(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit_lines(store, queue, {"prompt": "a", "n": 3}, {"prompt": "b", "n": 3, "max_tokens": 2})
    store.cancel_request(batch_id, 0)
    assert start(burst=True).join() == 0
    assert [row[:3] for row in rows(store, batch_id)] == [
        (0, 0, "cancelled"),
        *((1, choice, "completed") for choice in range(3)),
    ]
    (cancelled, _) = (Result.of(each) for each in store.results(batch_id))
    assert (cancelled.n, len(cancelled.choices)) == (3, 1)


def test_a_commit_that_nobody_heard_of_stores_nothing_twice(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = store.record, []

    def record(records: Sequence[tuple[Lease, Completion]]) -> Recorded:
        recorded = really(records)
        calls.append(len(records))
        if len(calls) == 1:
            raise ConnectionFailed("the connection broke right after the commit")
        return recorded

    monkeypatch.setattr(store, "record", record)
    lines = [{"prompt": f"p{index}", "n": 3, "max_tokens": 2} for index in range(4)]
    batch_id = submit_lines(store, queue, *lines)
    assert start(burst=True).join() == 0
    assert len(calls) >= 2
    assert calls[0] == calls[1]
    assert len(rows(store, batch_id)) == 12
    info = store.batch(batch_id)
    assert (info.counts, info.tokens.prompt, info.tokens.completion) == (Counts(total=4, completed=4), 8, 24)


@sqlite
def test_a_prompt_that_cannot_be_tokenised_fails_once_for_all_choices(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit_lines(store, queue, {"prompt": "untokenizable", "n": 3}, {"prompt": "b", "n": 2, "max_tokens": 1})
    assert start(burst=True).join() == 0
    assert [row[:3] for row in rows(store, batch_id)] == [(0, 0, "failed"), (1, 0, "completed"), (1, 1, "completed")]
    assert store.batch(batch_id).counts == Counts(total=2, completed=1, failed=1)


def openai(**body: Any) -> dict[str, Any]:
    return {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}


@case("A-sp-09")
def test_scoring_a_prompt(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue) -> None:
    """The prompt with its logprobs, the first one null, and no generated token."""
    batch_id = submit_lines(store, queue, openai(prompt="sky", max_tokens=0, echo=True, logprobs=1))
    assert start(burst=True).join() == 0
    (found,) = store.results(batch_id)
    body = read(openai_line(found))["response"]["body"]
    assert body["choices"] == [
        {
            "text": "sky",
            "index": 0,
            "logprobs": {
                "tokens": ["s", "k", "y"],
                "token_logprobs": [None, -0.25, -0.25],
                "top_logprobs": [None, {"k": -0.25}, {"y": -0.25}],
                "text_offset": [0, 1, 2],
            },
            "finish_reason": "length",
        }
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    row = read(Result.of(found).as_json())
    assert (row["text"], row["token_ids"], row["prompt_token_ids"]) == ("sky", [], [115, 107, 121])
    assert row["prompt_logprobs"] == [None, -0.25, -0.25]


def test_an_echo_stands_in_front_of_every_choice(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    batch_id = submit_lines(
        store,
        queue,
        {"prompt": "\n1. Carol", "echo": True, "n": 2, "max_tokens": 2},
        {"prompt": [72, 105], "echo": True, "max_tokens": 1},
        {"prompt": [72, 105], "echo": True, "max_tokens": 1, "logprobs": 0},
    )
    assert start(burst=True).join() == 0
    assert [row[3] for row in rows(store, batch_id)] == [
        "\n1. Carol" + expected_text("\n1. Carol", 2),
        "\n1. Carol" + expected_text("\n1. Carol", 2, 1),
        "Hi" + expected_text("Hi", 1),
        "Hi" + expected_text("Hi", 1),
    ]
    scores = [r.completion and r.completion.prompt_scores for r in store.results(batch_id)]
    assert [found and (found.logprobs, found.top_logprobs) for found in scores] == [None, None, ((None, -0.25), None)]


@case("A-sp-15")
def test_a_response_format_that_the_worker_cannot_use_fails_closed(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue
) -> None:
    """An error under the engine's code, never free text; the others go on."""
    formats = [{"type": "json_schema", "json_schema": {"schema": {"type": kind}}} for kind in ("impossible", "object")]
    lines = [{"prompt": "car", "response_format": each, "n": 2, "max_tokens": 2} for each in formats]
    batch_id = submit_lines(store, queue, *lines)
    assert start(burst=True).join() == 0
    failed, good = store.results(batch_id)
    assert (failed.state, [c.text for c in failed.choices]) == ("failed", ["", ""])
    assert read(openai_line(failed))["error"] == {"code": "invalid_response_format", "message": "no such type"}
    assert read(openai_line(failed))["response"] is None
    assert good.state == "completed"
    assert good.request.sampling.response_format == formats[1]


def read(line: bytes) -> Any:
    return orjson.loads(line)
