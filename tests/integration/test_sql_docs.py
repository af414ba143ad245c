"""The queries of docs/sql.md run on both databases and answer what they promise."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.types import CommandKind, FinishReason, PromptScores, RequestStatus, VersionSpan
from tests.support.batches import GONE, STARTED, answer, claim, create, failure, request, select, submit

if TYPE_CHECKING:
    from batchjobs.store import Store

DRAIN, UPDATE = CommandKind.DRAIN, CommandKind.UPDATE_MODEL
PAGE = Path(__file__).parents[2] / "docs" / "sql.md"
SECTION = r"^## (\d+)\. ([^\n]+)$(.*?)(?=^## |\Z)"
WORKERS = {0: "w1", 1: "w2", 4: "w1", 6: "w1", 8: "w1"}
"""Who answered what was taken up first."""


def queries(dialect: str) -> dict[str, str]:
    """Title -> statement, those of the other dialect left out."""
    found = {}
    for _, title, section in re.findall(SECTION, PAGE.read_text(), re.DOTALL | re.MULTILINE):
        [found[title]] = re.findall(rf"```sql(?: {dialect})?\n(.*?)```", section, re.DOTALL)
    return found


@pytest.fixture
def older(store: Store) -> str:
    """Two answers of the version before."""
    batch_id = submit(store, 3, name="before")
    lease = claim(store, batch_id)
    made = {"model_version": "v0", "tokens": 1}
    answers = [answer(0, text="yes", **made), answer(1, text="no", **made), failure(2)]
    store.record([(lease, each) for each in answers])
    return batch_id


@pytest.fixture
def batch_id(store: Store, older: str) -> str:
    """Nine requests, two in a shard:

    - 0: answered by two versions, its prompt scored. 1: cut, in the second try. Their shard lost a worker before
    - 2 and 3: failed
    - 4: two choices that agree, and one that is cut and does not
    - 5: failed, was retried, and answered
    - 6: cancelled after a token. 7: has the prompt of 0 and waits
    - 8: one of its two choices failed

    The batch and all workers are paused, and one worker has got three orders.
    """
    batch_id = create(store, shard_size=2, name="eval")
    bodies = {4: {"prompt": "prompt 4", "n": 3}, 7: {"prompt": "prompt 0"}, 8: {"prompt": "prompt 8", "n": 2}}
    store.add_requests(batch_id, [request(index, **bodies.get(index, {})) for index in range(9)])
    store.open_batch(batch_id)
    _answer_first_shard(store, batch_id)
    _answer_choices_and_retry(store, batch_id)
    lease = claim(store, batch_id, 1)
    store.record([(lease, failure(2)), (lease, failure(3, message="later"))])
    lease = claim(store, batch_id, 3, ttl=GONE)
    cancelled = {"status": RequestStatus.CANCELLED, "finish_reason": FinishReason.CANCELLED, "text": "answ"}
    store.record([(lease, answer(6, tokens=1, **cancelled))])
    lease = claim(store, batch_id, 4)
    store.record([(lease, answer(8, text="yes", tokens=1)), (lease, replace(failure(8, message="odd"), choice=1))])
    _pause_and_order(store, batch_id)
    return batch_id


def _answer_first_shard(store: Store, batch_id: str) -> None:
    claim(store, batch_id, ttl=GONE)
    lease = claim(store, batch_id, worker="w2")
    later = STARTED + timedelta(seconds=2)
    cut = answer(1, tokens=2, finish_reason=FinishReason.LENGTH, worker="w2", attempt=2, finished_at=later)
    scores = PromptScores(token_ids=(1, 2, 3), tokens=("a", "b", "c"), logprobs=(None, -1.5, -0.5), top_logprobs=None)
    mixed = (VersionSpan(version="v0", worker="w3"), VersionSpan(version="v1", from_token=1, worker="w1", attempt=1))
    first = answer(0, text="yes", prompt_scores=scores, version_spans=mixed)
    store.record([(lease, first), (lease, replace(cut, logprobs=(-3.0, -0.25)))])


def _answer_choices_and_retry(store: Store, batch_id: str) -> None:
    store.record([(claim(store, batch_id, 2, ttl=GONE), failure(5, message="no memory"))])
    assert store.retry_failed(batch_id).requests == 1
    lease = claim(store, batch_id, 2)
    minute_later = {
        "started_at": STARTED + timedelta(seconds=60),
        "first_token_at": STARTED + timedelta(seconds=60.5),
        "finished_at": STARTED + timedelta(seconds=61),
    }
    choices = [
        answer(4, text="yes", tokens=1, logprobs=(-0.75,)),
        answer(4, text="no", tokens=1, logprobs=(-4.0,), choice=1, finish_reason=FinishReason.LENGTH),
        answer(4, text="yes", tokens=1, logprobs=(-0.75,), choice=2),
        answer(5, text="no", tokens=1, logprobs=(-2.0,), attempt=2, **minute_later),
    ]
    store.record([(lease, each) for each in choices])


def _pause_and_order(store: Store, batch_id: str) -> None:
    store.register_model_version("v1", "tiny", "/models/tiny", "float32", {})
    store.pause_batch(batch_id, by="ann@desk", reason="the disk fills up", release=True)
    store.pause_worker(None, by="bob@desk")
    [done, _, failed] = (store.order(kind, ["w2"], by="ann@desk")[0] for kind in (DRAIN, DRAIN, UPDATE))
    store.end_command(done.id, result={"finished": 0, "given_back": 2})
    store.end_command(failed.id, error="no such file")


def the_only(store: Store, query: str) -> Any:
    [[value]] = select(store, query)
    return value


def about(value: float) -> Any:
    """Instants are kept to the microsecond, and SQLite counts with days."""
    return pytest.approx(value, abs=1e-3)


def test_each_query_gives_the_right_rows(store: Store, older: str, batch_id: str) -> None:
    submitted = datetime.fromisoformat(the_only(store, f"SELECT submitted_at FROM batches WHERE id = '{batch_id}'"))
    waited = (STARTED - submitted).total_seconds()
    too_long = "context_length_exceeded"
    expected: dict[str, list[tuple[Any, ...]]] = {
        "The answers, in input order": [
            ("request-0", "yes"),
            ("request-1", "answer 1"),
            ("request-4", "yes"),
            ("request-5", "no"),
        ],
        "Prompts without an answer, and why": [
            ("request-2", "failed", too_long, "prompt 2"),
            ("request-3", "failed", too_long, "prompt 3"),
            ("request-6", "cancelled", None, "prompt 6"),
            ("request-7", "queued", None, "prompt 0"),
            ("request-8", "failed", too_long, "prompt 8"),
        ],
        "Failures by reason": [(too_long, 3, "later")],
        "Answers cut off by `max_tokens`": [("request-1", 0, 2, "answer 1"), ("request-4", 1, 1, "no")],
        "How often each answer was given": [("yes", 4), ("no", 2), ("answer 1", 1)],
        "What each batch cost": [
            (batch_id, "eval", 6 * 6, 6 * 4, 11, pytest.approx((36 * 0.5 + 24 * 0.05 + 11 * 1.5) / 1e6)),
            (older, "before", 2 * 6, 2 * 4, 2, pytest.approx((12 * 0.5 + 8 * 0.05 + 2 * 1.5) / 1e6)),
        ],
        "How far two batches of the same prompts agree": [(2, 1, 0.5)],
        "Where two batches of the same prompts differ": [("request-1", "no", "answer 1")],
        "Answers beside a table of your own": [("request-1", "no", "answer 1", "completed")],
        "How sure the model was of each label": [
            ("request-1", "answer 1", " t0", pytest.approx(math.exp(-3))),
            ("request-5", "no", " t0", pytest.approx(math.exp(-2))),
            ("request-4", "yes", " t0", pytest.approx(math.exp(-0.75))),
            ("request-0", "yes", " t0", 1.0),
        ],
        "The least certain tokens": [
            (4, 1, 0, " t0", -4.0),
            (1, 0, 0, " t0", -3.0),
            (5, 0, 0, " t0", -2.0),
            (0, 0, 2, " t2", -1.0),
            (4, 0, 0, " t0", -0.75),
            (4, 2, 0, " t0", -0.75),
            (0, 0, 1, " t1", -0.5),
            (1, 0, 1, " t1", -0.25),
            (0, 0, 0, " t0", 0.0),
            (6, 0, 0, " t0", 0.0),
            (8, 0, 0, " t0", 0.0),
        ],
        "The least certain answers": [
            (4, 1, -4.0, 1),
            (5, 0, -2.0, 1),
            (1, 0, -1.625, 2),
            (4, 0, -0.75, 1),
            (4, 2, -0.75, 1),
            (0, 0, -0.5, 3),
            (6, 0, 0.0, 1),
            (8, 0, 0.0, 1),
        ],
        "What the choices of a request agree on": [("request-4", "yes", 2, 3)],
        "Prompts that were sent more than once": [("prompt 0", 2, "request-0", "request-7")],
        "The slowest requests": [
            ("request-1", about(2.0), 2, "w2"),
            ("request-5", about(1.0), 1, "w1"),
            ("request-0", about(0.75), 3, "w1"),
            *((f"request-{index}", about(0.25), 1, "w1") for index in (4, 6, 8)),
        ],
        "The longest waits in the queue": [
            ("request-5", about(waited + 60), "w1"),
            *((f"request-{index}", about(waited), worker) for index, worker in WORKERS.items()),
        ],
        "Tokens per second over time": [
            ("2026-03-01T12:00:00", 9),
            ("2026-03-01T12:00:01", 1),
            ("2026-03-01T12:01:00", 1),
        ],
        "Throughput of each worker by the minute": [
            ("2026-03-01T12:00", "w1", 5, pytest.approx(7 / 60)),
            ("2026-03-01T12:00", "w2", 1, pytest.approx(2 / 60)),
            ("2026-03-01T12:01", "w1", 1, pytest.approx(1 / 60)),
        ],
        "Each worker's time to first token, and what the prompt cache saved it": [
            ("w1", 3, about(1 / 3), about(0.5), 0.4),
            ("w2", 1, about(0.25), about(0.25), 0.4),
        ],
        "Answers and tokens by the version that drew them": [("v1", "tiny", 6, 10), ("v0", None, 1, 1)],
        "Mixed answers, and the token at which they go on with another version": [(0, 0, "v0", "v1", 1)],
        "The least likely token of each scored prompt": [(0, -1.5)],
        "What failed before it was run again": [("request-5", 0, 1, "no memory", "completed")],
        "Shards that took more than one attempt": [(batch_id, 0, "w2", 2, "done"), (batch_id, 2, "w1", 2, "done")],
        "Batches that are not finished, the oldest first": [(batch_id, "eval", "running", 9, 8, 0, 1)],
        "Who paused what, and why": [
            (
                "batch",
                batch_id,
                "ann@desk",
                "the disk fills up",
                True,
                the_only(store, f"SELECT paused_at FROM batches WHERE id = '{batch_id}'"),
            ),
            ("worker", "*", "bob@desk", None, False, the_only(store, "SELECT paused_at FROM worker_pauses")),
        ],
        "What became of orders to workers": [
            ("w2", "update_model", "ann@desk", "failed", "no such file"),
            ("w2", "drain", "ann@desk", "waits", None),
            ("w2", "drain", "ann@desk", "done", None),
        ],
    }
    dialect = "postgresql" if "postgresql" in store.url_without_password else "sqlite"
    found = {title: list(store.select(sql)[1]) for title, sql in queries(dialect).items()}
    for title, rows in expected.items():
        assert found.get(title) == rows, title
    assert list(found) == list(expected)


def test_a_sentence_says_what_each_query_answers() -> None:
    sections = re.findall(SECTION, PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [int(number) for number, _, _ in sections] == list(range(1, len(sections) + 1))
    assert [title for _, title, text in sections if not re.match(r"\n\n[A-Z`][^\n]+\.\n\n", text)] == []


def test_every_table_and_view_is_named(store: Store) -> None:
    from batchjobs.tables import VIEWS, metadata

    text = PAGE.read_text()
    assert [table.name for table in (*metadata.sorted_tables, *VIEWS) if f"`{table.name}`" not in text] == []
