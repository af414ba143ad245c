"""The queries of docs/sql.md run on both databases and answer what they promise."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.types import CommandKind, FinishReason, PromptScores, VersionSpan
from tests.support.batches import GONE, STARTED, answer, claim, failure, select, submit

if TYPE_CHECKING:
    from batchjobs.store import Store

DRAIN, UPDATE = CommandKind.DRAIN, CommandKind.UPDATE_MODEL
PAGE = Path(__file__).parents[2] / "docs" / "sql.md"


def queries(dialect: str) -> dict[str, str]:
    """Number -> statement, those of the other dialect left out."""
    found = {}
    for number, section in re.findall(r"^## (\d+)\..*?$(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        [found[number]] = re.findall(rf"```sql(?: {dialect})?\n(.*?)```", section, re.DOTALL)
    return found


@pytest.fixture
def batch_id(store: Store) -> str:
    """Two answers, one of two versions, one cut and in the second try; two failures; one request still waiting. The
    batch and all workers are paused, and one worker has got three orders."""
    batch_id = submit(store, 5, shard_size=4, name="eval")
    claim(store, batch_id, ttl=GONE)
    lease = claim(store, batch_id, worker="w2")
    cut = replace(
        answer(1, tokens=2, finish_reason=FinishReason.LENGTH, worker="w2", attempt=2),
        logprobs=(-3.0, -0.25),
        finished_at=STARTED + timedelta(seconds=2),
    )
    scores = PromptScores(token_ids=(1, 2, 3), tokens=("a", "b", "c"), logprobs=(None, -1.5, -0.5), top_logprobs=None)
    mixed = (VersionSpan(version="v0", worker="w3"), VersionSpan(version="v1", from_token=1, worker="w1", attempt=1))
    first = answer(0, prompt_scores=scores, version_spans=mixed)
    store.record([(lease, first), (lease, cut), (lease, failure(2)), (lease, failure(3, message="later"))])
    store.register_model_version("v1", "tiny", "/models/tiny", "float32", {})
    store.pause_batch(batch_id, by="ann@desk", reason="the disk fills up", release=True)
    store.pause_worker(None, by="bob@desk")
    [done, _, failed] = (store.order(kind, ["w2"], by="ann@desk")[0] for kind in (DRAIN, DRAIN, UPDATE))
    store.end_command(done.id, result={"finished": 0, "given_back": 2})
    store.end_command(failed.id, error="no such file")
    return batch_id


def paused_at(store: Store, table: str) -> str:
    [[instant]] = select(store, f"SELECT paused_at FROM {table}")
    return str(instant)


def test_each_query_gives_the_right_rows(store: Store, batch_id: str) -> None:
    seconds = pytest.approx
    expected: dict[str, list[tuple[Any, ...]]] = {
        "1": [("request-0", "answer 0"), ("request-1", "answer 1")],
        "2": [("request-1", seconds(2.0, abs=1e-3), 2, "w2"), ("request-0", seconds(0.75, abs=1e-3), 3, "w1")],
        "3": [("context_length_exceeded", 2, "later")],
        "4": [("request-1", 2, "answer 1")],
        "5": [
            (1, 0, " t0", -3.0),
            (0, 2, " t2", -1.0),
            (0, 1, " t1", -0.5),
            (1, 1, " t1", -0.25),
            (0, 0, " t0", 0.0),
        ],
        "6": [(1, -1.625, 2), (0, -0.5, 3)],
        "7": [("2026-03-01T12:00:01", 3, 1), ("2026-03-01T12:00:02", 2, 1)],
        "8": [("tiny", "v1", 2, 5)],
        "9": [
            ("w1", 1, seconds(0.25, abs=1e-3), seconds(0.25, abs=1e-3), 0.4),
            ("w2", 1, seconds(0.25, abs=1e-3), seconds(0.25, abs=1e-3), 0.4),
        ],
        "10": [(batch_id, "eval", "running", 5, 4, 0, 0)],
        "11": [(2, 0, "failed", ""), (3, 0, "failed", "")],
        "12": [(0, -1.5)],
        "13": [(batch_id, 0, "w2", 2, "done")],
        "14": [("v1", "tiny", 2, 4), ("v0", None, 1, 1)],
        "15": [(0, 0, "v0", "v1", 1)],
        "16": [
            ("batch", batch_id, "ann@desk", "the disk fills up", True, paused_at(store, "batches")),
            ("worker", "*", "bob@desk", None, False, paused_at(store, "worker_pauses")),
        ],
        "17": [
            ("w2", "update_model", "ann@desk", "failed", "no such file"),
            ("w2", "drain", "ann@desk", "waits", None),
            ("w2", "drain", "ann@desk", "done", None),
        ],
    }
    dialect = "postgresql" if "postgresql" in store.url_without_password else "sqlite"
    found = {number: list(store.select(sql)[1]) for number, sql in queries(dialect).items()}
    assert found == expected


def test_every_table_and_view_is_named(store: Store) -> None:
    from batchjobs.tables import VIEWS, metadata

    text = PAGE.read_text()
    assert [table.name for table in (*metadata.sorted_tables, *VIEWS) if f"`{table.name}`" not in text] == []
