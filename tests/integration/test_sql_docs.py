"""The queries of docs/sql.md run on both databases and answer what they promise."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.types import FinishReason, PromptScores
from tests.support.batches import GONE, STARTED, answer, claim, failure, submit

if TYPE_CHECKING:
    from batchjobs.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"


def queries(dialect: str) -> dict[str, str]:
    """Number -> statement, those of the other dialect left out."""
    found = {}
    for number, section in re.findall(r"^## (\d+)\..*?$(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        [found[number]] = re.findall(rf"```sql(?: {dialect})?\n(.*?)```", section, re.DOTALL)
    return found


@pytest.fixture
def batch_id(store: Store) -> str:
    """Two answers, one of them cut and in the second try, two failures, one request still waiting."""
    batch_id = submit(store, 5, shard_size=4, name="eval")
    claim(store, batch_id, ttl=GONE)
    lease = claim(store, batch_id, worker="w2")
    cut = replace(
        answer(1, tokens=2, finish_reason=FinishReason.LENGTH, worker="w2", attempt=2),
        logprobs=(-3.0, -0.25),
        finished_at=STARTED + timedelta(seconds=2),
    )
    scores = PromptScores(token_ids=(1, 2, 3), tokens=("a", "b", "c"), logprobs=(None, -1.5, -0.5), top_logprobs=None)
    first = answer(0, prompt_scores=scores)
    store.record([(lease, first), (lease, cut), (lease, failure(2)), (lease, failure(3, message="later"))])
    return batch_id


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
    }
    dialect = "postgresql" if "postgresql" in store.url_without_password else "sqlite"
    found = {number: list(store.select(sql)[1]) for number, sql in queries(dialect).items()}
    assert found == expected


def test_every_table_and_view_is_named(store: Store) -> None:
    from batchjobs.tables import VIEWS, metadata

    text = PAGE.read_text()
    assert [table.name for table in (*metadata.sorted_tables, *VIEWS) if f"`{table.name}`" not in text] == []
