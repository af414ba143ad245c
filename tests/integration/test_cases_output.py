"""Known faults of others with output files, on whole workers and real servers: none of them may be ours."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.client import Client
from batchjobs.types import BatchStatus
from tests.support.batches import answer, claim, create, request
from tests.support.cases import case
from tests.support.running import is_complete, queue, settings, sqlite, start
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.settings import Settings
    from batchjobs.store import Store
    from tests.support.workers import ThreadWorker

__all__ = ["queue", "settings", "start"]

ROOT = Path(__file__).parents[2]
LONG = 1_000_000
"""Tokens of an answer that does not end by itself within a test."""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "batchjobs", *map(str, arguments)]


def batchjobs(settings: Settings, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=settings.as_environment(), capture_output=True, text=True, timeout=60
    )


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


# ------------------------------------------------------------------------------------------------------------- A-out-01


@sqlite
@case("A-out-01")
def test_answers_come_in_input_order_however_they_ended(
    start: Callable[..., ThreadWorker], settings: Settings, store: Store
) -> None:
    """Long and short answers in turns, in one shard and in several."""
    lengths = [60, 1, 45, 2, 30, 60, 1, 20, 3, 10]
    lines = [{"custom_id": f"q{i}", "prompt": f"p{i}", "max_tokens": length} for i, length in enumerate(lengths)]
    with Client(settings) as client:
        batch = client.submit(lines, shard_size=5)
        assert start(burst=True).join() == 0
        ends = [result.finished_at for result in batch.results() if result.finished_at]
    assert ends != sorted(ends), "they did not end in this order"
    printed = rows(batchjobs(settings, "results", batch.id).stdout)
    assert [(row["index"], row["custom_id"]) for row in printed] == [(i, f"q{i}") for i in range(10)]
    assert [row["completion_tokens"] for row in printed] == lengths


# ------------------------------------------------------------------------------------------------------------- A-out-02


@sqlite
@case("A-out-02")
def test_what_was_made_before_everything_was_killed_is_there(settings: Settings, store: Store) -> None:
    """The results so far are whole lines, and after a restart only the rest is generated."""
    with Client(settings) as client:
        batch = client.submit([{"prompt": f"p{i}", "max_tokens": 6} for i in range(60)], shard_size=4)
        victim = ProcessWorker(settings, "victim", step_seconds=0.03)
        eventually(lambda: batch.counts.completed >= 16, "some are done")
        victim.kill()
        done = {result.index: result for result in batch.results()}
        assert 16 <= len(done) < 60
        printed = rows(batchjobs(settings, "results", batch.id).stdout)
        assert [row["index"] for row in printed] == sorted(done)
        heir = ProcessWorker(settings, "heir", step_seconds=0.002)
        eventually(lambda: is_complete(store, batch.id), "the rest is done", 30)
        heir.signal(signal.SIGTERM)
        assert heir.join()[0] == 0
        after = {result.index: result for result in batch.results()}
    assert len(after) == 60
    assert {index: after[index] for index in done} == done
    assert {after[index].worker for index in set(after) - set(done)} == {"heir"}


# --------------------------------------------------------------------------------------------------- A-out-03, A-out-04


@pytest.fixture
def big(store: Store) -> str:
    """A finished batch whose results take about 6 MB."""
    batch_id = create(store, shard_size=1000)
    store.add_requests(batch_id, [request(index) for index in range(2000)])
    store.open_batch(batch_id)
    for shard_no in (0, 1):
        lease = claim(store, batch_id, shard_no)
        indexes = range(1000 * shard_no, 1000 * (shard_no + 1))
        store.record([(lease, answer(index, tokens=60)) for index in indexes])
    return batch_id


@sqlite
@case("A-out-03")
def test_results_never_go_over_the_input_by_accident(
    settings: Settings, store: Store, start: Callable[..., ThreadWorker], tmp_path: Path
) -> None:
    """Through a link, and not even with --force."""
    source, link = tmp_path / "in.jsonl", tmp_path / "o.jsonl"
    source.write_text('{"prompt":"a","max_tokens":2}\n')
    link.symlink_to("in.jsonl")
    batch_id = batchjobs(settings, "submit", source).stdout.strip()
    assert start(burst=True).join() == 0
    refused = batchjobs(settings, "results", batch_id, "-o", link, "--force")
    assert refused.returncode == 2
    assert "is the input file; choose another name for the output" in refused.stderr
    assert source.read_text() == '{"prompt":"a","max_tokens":2}\n'
    answers = tmp_path / "answers.jsonl"
    assert batchjobs(settings, "results", batch_id, "-o", answers).returncode == 0
    assert rows(answers.read_text())[0]["text"] == expected_text("a", 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@sqlite
@case("A-out-04")
def test_an_interrupted_export_leaves_the_old_file_alone(
    settings: Settings, big: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C or SIGTERM half-way."""
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "answers.jsonl"
    target.write_text("old\n")
    process = subprocess.Popen(
        command("results", big, "-o", target, "--force"),
        cwd=ROOT,
        env=settings.as_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: [part for part in folder.glob("*.part") if part.stat().st_size], "a part is there", 30)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert [path.name for path in folder.iterdir()] == ["answers.jsonl"]
    assert target.read_text() == "old\n"


# --------------------------------------------------------------------------------------------------- A-out-05, A-out-06


@case("A-out-05", "A-out-06")
def test_every_row_says_how_it_ended(
    start: Callable[..., ThreadWorker], settings: Settings, store: Store, tmp_path: Path
) -> None:
    """Cut off, complete, failed, cancelled before and after its beginning: all differ, in every
    form, and tokens are counted."""
    lines = [
        {"custom_id": "cut", "prompt": "Write a long poem", "max_tokens": 5},
        {"custom_id": "whole", "prompt": "uneven", "max_tokens": 50},
        {"custom_id": "failed", "prompt": "untokenizable", "max_tokens": 5},
        {"custom_id": "stopped", "prompt": "endless", "max_tokens": LONG},
        {"custom_id": "never", "prompt": "never begun", "max_tokens": 5},
    ]
    with Client(settings) as client:
        batch = client.submit(lines)
        client.cancel_request(batch.id, 4)
        worker = start()
        eventually(lambda: batch.counts.done == 4 and worker.loop.stats().running == 1, "one is still at it")
        client.cancel_request(batch.id, 3)
        eventually(lambda: batch.status == BatchStatus.COMPLETED, "it is cancelled")
    flat = {row["custom_id"]: row for row in rows(batchjobs(settings, "results", batch.id).stdout)}
    ends = {name: (row["status"], row["finish_reason"]) for name, row in flat.items()}
    assert ends == {
        "cut": ("completed", "length"),
        "whole": ("completed", "stop"),
        "failed": ("failed", "error"),
        "stopped": ("cancelled", "cancelled"),
        "never": ("cancelled", "cancelled"),
    }
    usage = {name: (row["prompt_tokens"], row["completion_tokens"]) for name, row in flat.items()}
    assert usage["cut"] == (len("Write a long poem"), 5)
    assert usage["whole"] == (len("uneven"), 1)
    assert usage["failed"][1] == usage["never"][1] == 0
    assert usage["stopped"][1] == len(flat["stopped"]["token_ids"]) > 0
    assert {name: row["error"] is None for name, row in flat.items()} == {name: name != "failed" for name in flat}

    table = list(csv.DictReader(io.StringIO(batchjobs(settings, "results", batch.id, "--format", "csv").stdout)))
    assert {row["custom_id"]: (row["status"], row["finish_reason"]) for row in table} == ends
    errors = tmp_path / "errors.jsonl"
    done = batchjobs(settings, "results", batch.id, "--format", "openai", "--errors", errors)
    good, bad = rows(done.stdout), rows(errors.read_text())
    assert {
        row["custom_id"]: (
            row["response"]["status_code"],
            row["error"],
            row["response"]["body"]["choices"][0]["finish_reason"],
            row["response"]["body"]["usage"]["completion_tokens"],
        )
        for row in good
    } == {"cut": (200, None, "length", 5), "whole": (200, None, "stop", 1)}
    assert {row["custom_id"]: (row["response"], row["error"]["code"]) for row in bad} == {
        "failed": (None, "invalid_prompt"),
        "stopped": (None, "batch_cancelled"),
        "never": (None, "batch_cancelled"),
    }
    assert all(row["error"]["message"] for row in bad)
