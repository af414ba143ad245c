"""Operators steer running work: pause everything, update one worker's model, resume, cancel; then every row is audited.

Real commands in real processes, a real Redis and PostgreSQL, two tiny models of the same shape.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchjobs import Client
from batchjobs.store import Store
from batchjobs.types import Completion, RequestStatus
from tests.support.batches import select
from tests.support.machine import Machine
from tests.support.models import save_chat_model
from tests.support.waiting import eventually
from workers.engine import Engine, EngineConfig, SamplingParams

REQUESTS, TOKENS = 200, 120
STILL_SECONDS = 5.0
PATIENCE = 120.0
ADDRESSES = ("home", "database_url", "redis_url")
SHARED = "Every prompt of this batch begins with the very same words, so that their pages are shared. "
PROBE = "A prompt that is asked again and again, before the new weights and after them."


@dataclass(frozen=True)
class Models:
    old: Path
    new: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(
        save_chat_model(tmp_path_factory.mktemp("old")), save_chat_model(tmp_path_factory.mktemp("new"), seed=1)
    )


@pytest.fixture
def machine(home: Path, models: Models, database_url: str, redis_url: str) -> Iterator[Machine]:
    machine = Machine(
        home,
        models.old,
        BATCHJOBS_DATABASE_URL=database_url,
        BATCHJOBS_REDIS_URL=redis_url,
        BATCHJOBS_MAX_REQUESTS_PER_BATCH="16",
        BATCHJOBS_SHARD_SIZE="20",
        BATCHJOBS_CHECKPOINT_SECONDS="0.5",
    )
    yield machine
    machine.end()


def prompt(number: int) -> str:
    return f"{SHARED}{number}"


def submit(machine: Machine, name: str, count: int, *options: str) -> str:
    path = machine.home / name
    lines = ({"prompt": prompt(n), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return machine.call("submit", str(path), *options).strip()


def probe(machine: Machine, store: Store, *options: str) -> Completion:
    """One request whose prompt begins like no other, answered before everything else."""
    path = machine.home / "probe.jsonl"
    path.write_text(json.dumps({"prompt": PROBE, "max_tokens": 2, "temperature": 0, "ignore_eos": True}) + "\n")
    batch = machine.call("submit", str(path), "--queue", "high", "--wait", *options).strip()
    [found] = outcomes(store, batch)
    return found


def states(store: Store) -> dict[str, str]:
    return {row.name: row.state for row in store.workers()}


def made(store: Store) -> tuple[int, int]:
    """Tokens that workers say they have made, and heartbeats that came with it."""
    rows = store.workers()
    return sum(row.generated_tokens for row in rows), sum(row.heartbeat_age_seconds < 2 for row in rows)


def written(store: Store) -> int:
    """Tokens in the store, of what has ended and of what runs."""
    sums = (f"(SELECT coalesce(sum(completion_tokens), 0) FROM {table})" for table in ("completions", "checkpoints"))
    [(tokens,)] = select(store, f"SELECT {' + '.join(sums)}")
    return int(tokens)


def outcomes(store: Store, batch: str) -> list[Completion]:
    counted = select(store, f'SELECT "index", count(*) FROM completions WHERE batch_id = \'{batch}\' GROUP BY "index"')
    assert all(count == 1 for _, count in counted)
    return [result.completion for result in store.results(batch) if result.completion is not None]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_pause_update_resume_cancel(machine: Machine, models: Models) -> None:
    with closing(machine.store()) as store:
        machine.start("worker", "--name", "left")
        assert [probe(machine, store).cached_tokens > 0 for _ in range(2)] == [False, True], "prefixes are shared"
        machine.start("worker", "--name", "right")
        eventually(lambda: "right" in states(store), "both are there", PATIENCE)
        batch, other = submit(machine, "main.jsonl", REQUESTS), submit(machine, "other.jsonl", 20, "--queue", "low")
        eventually(lambda: store.batch(batch).counts.completed >= 10, "both work", PATIENCE)
        eventually(lambda: states(store) == {"left": "busy", "right": "busy"}, "both work", PATIENCE)

        machine.call("pause", "--all-workers", "--reason", "new weights")
        eventually(lambda: states(store) == {"left": "paused", "right": "paused"}, "both stand still")
        eventually(lambda: written(store) == made(store)[0], "what was made before is written")
        _stands_still(store, batch)
        shown = json.loads(machine.call("status", batch, "--json"))
        assert "paused" in shown["note"]
        rows = [json.loads(line) for line in machine.call("workers", "--json").splitlines()]
        assert all(row["pause"]["reason"] == "new weights" and "@" in row["pause"]["by"] for row in rows)

        told = machine.call("model", "update", str(models.new), "--worker", "left", "--yes", "--json")
        update = json.loads(told)
        assert update["worker"] == "left"
        assert update["error"] is None
        old, new = update["result"]["old_version"], update["result"]["new_version"]
        assert old != new
        before = made(store)[0]

        victim = _youngest(store, batch)
        with Client(**{name: machine.environment[f"BATCHJOBS_{name.upper()}"] for name in ADDRESSES}) as client:
            client.cancel_request(batch, victim)
        eventually(lambda: store.batch(batch).counts.cancelled == 1, "a paused worker lets it go", PATIENCE)
        machine.call("resume", "--all-workers")
        eventually(lambda: made(store)[0] > before, "they go on", PATIENCE)
        machine.call("cancel", other, "--yes")
        after = [probe(machine, store, "--model-version", new) for _ in range(2)]
        assert [each.cached_tokens > 0 for each in after] == [False, True], "nothing of the old weights is found"
        assert {each.worker for each in after} == {"left"}
        machine.call("wait", batch)
        eventually(lambda: store.batch(other).status.is_final, "the other batch has ended")

        _audit_counts(store, batch, other, victim)
        _audit_spans(store, batch, old, new)
        _audit_texts(outcomes(store, batch), old, models)


def _stands_still(store: Store, batch: str) -> None:
    """No token is made, while the workers say that they live."""
    before, info = made(store), store.batch(batch)
    begun = _now(store)
    while _now(store) < begun + STILL_SECONDS:
        assert made(store) == (before[0], 2)
        assert store.batch(batch).counts == info.counts
        assert store.batch(batch).tokens.completion == info.tokens.completion


def _now(store: Store) -> float:
    [(now,)] = select(store, "SELECT extract(epoch FROM clock_timestamp())")
    return float(now)


def _youngest(store: Store, batch: str) -> int:
    """Of the requests that workers hold the one with the fewest tokens."""
    query = f"SELECT \"index\" FROM checkpoints WHERE batch_id = '{batch}' ORDER BY completion_tokens LIMIT 1"
    [(index,)] = eventually(lambda: select(store, query), "something runs")
    return int(index)


def _audit_counts(store: Store, batch: str, other: str, victim: int) -> None:
    info, rows = store.batch(batch), outcomes(store, batch)
    assert len(rows) == REQUESTS
    assert Counter(row.status for row in rows) == {RequestStatus.COMPLETED: REQUESTS - 1, RequestStatus.CANCELLED: 1}
    assert (rows[victim].status, rows[victim].completion_tokens < TOKENS) == (RequestStatus.CANCELLED, True)
    assert (info.counts.completed, info.counts.cancelled, info.counts.done) == (REQUESTS - 1, 1, REQUESTS)
    assert sum(row.completion_tokens for row in rows) == info.tokens.completion
    ended = store.batch(other).counts
    assert ended.cancelled + ended.completed == ended.total == len(outcomes(store, other)) == 20


def _audit_spans(store: Store, batch: str, old: str, new: str) -> None:
    for row in outcomes(store, batch):
        starts = [span.from_token for span in row.version_spans]
        assert starts == sorted(set(starts))
        if row.completion_tokens:
            assert starts[0] == 0
            assert starts[-1] < row.completion_tokens
            assert row.model_version == row.version_spans[-1].version
            assert (row.worker, row.attempt) == (row.version_spans[-1].worker, row.version_spans[-1].attempt)
        for span in row.version_spans:
            assert span.version in (old, new)
            assert span.version == old or span.worker == "left"
    versions = Counter(tuple(span.version for span in row.version_spans) for row in outcomes(store, batch))
    assert versions[old,] > 0
    assert versions[new,] > 0
    assert versions[old, new] > 0, "what ran in the updated worker went on under the new weights"
    counted = select(
        store,
        "SELECT version, count(*), sum(tokens) FROM completion_versions"
        f" WHERE batch_id = '{batch}' GROUP BY version ORDER BY version",
    )
    spans = [span for row in outcomes(store, batch) for span in row.version_spans]
    assert {version: count for version, count, _ in counted} == Counter(span.version for span in spans)
    assert sum(int(tokens) for _, _, tokens in counted) == store.batch(batch).tokens.completion


def _audit_texts(rows: list[Completion], old: str, models: Models) -> None:
    """Each part of an answer is what its version gives behind what there was, by an engine of its own."""
    engines = {True: _engine(models.old), False: _engine(models.new)}
    parts: dict[bool, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {True: [], False: []}
    for row in rows:
        ends = [*(span.from_token for span in row.version_spans[1:]), row.completion_tokens]
        for span, end in zip(row.version_spans, ends, strict=True):
            known = (*engines[True].encode_prompt(prompt(row.index)), *row.token_ids[: span.from_token])
            parts[span.version == old].append((known, row.token_ids[span.from_token : end]))
    for is_old, engine in engines.items():
        asked = [SamplingParams(temperature=0, max_tokens=len(want), ignore_eos=True) for _, want in parts[is_old]]
        answers = engine.generate([known for known, _ in parts[is_old]], asked)
        for (_, want), answer in zip(parts[is_old], answers, strict=True):
            assert answer.token_ids == want


def _engine(model: Path) -> Engine:
    return Engine(str(model), EngineConfig(device="cpu", num_blocks=600))
