"""A process that dies at each named point between a submission and the last acknowledgement; others go on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import failpoints
from batchjobs import queue as queues
from batchjobs.errors import UsageError
from batchjobs.failpoints import KILLED, POINTS
from batchjobs.queue import JobQueue
from batchjobs.reconcile import reconcile
from batchjobs.settings import Settings, load_settings
from tests.support.batches import request, select, submit
from tests.support.cases import case
from tests.support.running import postgresql, sqlite
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from tests.support.workers import ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.store import Store

ROOT = Path(__file__).parents[2]
REQUESTS, TOKENS = 24, 8
SUBMIT_POINTS = sorted(point for point in POINTS if point.startswith("submit_"))
END_POINTS = ["after_release", "before_release"]
WORK_POINTS = sorted(POINTS.keys() - {*SUBMIT_POINTS, *END_POINTS})

IN_SQL = ["inside_record", "after_commit_before_ack", "after_claim"]
"""Where it matters what the database does with a connection that is gone."""


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    return load_settings(
        home=tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        lease_seconds=1,
        heartbeat_seconds=0.2,
        checkpoint_seconds=0.05,
        max_requests_per_batch=8,
    )


@pytest.fixture
def queue(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobQueue]:
    monkeypatch.setattr(queues, "STRANDED_SECONDS", 1)  # what was popped and never started is found as soon
    queue = JobQueue(redis_url)
    yield queue
    queue.close()


def process(settings: Settings, point: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=settings.as_environment() | {"BATCHJOBS_FAILPOINTS": point},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(doomed: subprocess.Popen[str], code: int = KILLED) -> tuple[str, str]:
    """What it printed, and its log."""
    try:
        out, log = doomed.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        doomed.kill()
        out, log = doomed.communicate()
        pytest.fail(f"it did not come to its end; its log was: {log}")
    assert doomed.returncode == code, log
    return out, log


def dying_worker(settings: Settings, point: str) -> subprocess.Popen[str]:
    return process(settings, point, "-m", "tests.support.workers", "doomed", "--step-seconds=0.02")


def finish(settings: Settings, store: Store, queue: JobQueue, batch_id: str) -> None:
    """Another worker does what is left."""
    worker = ThreadWorker(settings, store, queue, "heir")
    try:
        eventually(lambda: store.batch(batch_id).status.is_final, "the other worker finishes the batch", 30)
    finally:
        assert worker.stop() == 0


def check_outcomes(store: Store, batch_id: str, workers: set[str]) -> None:
    rows = select(
        store,
        f"""SELECT "index", status, text, worker, attempt FROM completions
        WHERE batch_id = '{batch_id}' ORDER BY "index" """,
    )
    texts = [expected_text(f"prompt {index}", TOKENS) for index in range(REQUESTS)]
    assert [(row[0], row[1], row[2]) for row in rows] == [(i, "completed", texts[i]) for i in range(REQUESTS)]
    assert {row[3] for row in rows} <= workers
    shards = select(store, f"SELECT state, lease_until FROM shards WHERE batch_id = '{batch_id}'")
    assert {row[0] for row in shards} == {"done"}
    left = select(store, "SELECT count(*) FROM checkpoints")
    assert left[0][0] == 0


def check_redis(settings: Settings, store: Store, queue: JobQueue) -> None:
    """Once RQ's clean-up has come round, and a worker to what it queued again, nothing waits or seems to run."""
    for rq in queue.queues.values():
        for entry in queue.connection.zrange(rq.started_job_registry.key, 0, -1):
            queue.connection.zadd(rq.started_job_registry.key, {entry: 1})  # as if its time had passed
    queue.tidy()
    reconcile(store, queue, thorough=True)
    lists = [key for rq in queue.queues.values() for key in (rq.key, rq.intermediate_queue_key)]
    until = lambda: not any(queue.connection.llen(key) for key in lists)  # noqa: E731
    assert ThreadWorker(settings, store, queue, "sweeper", until=until).join() == 0
    assert [rq.started_job_registry.count for rq in queue.queues.values()] == [0, 0, 0]
    assert [rq.failed_job_registry.count for rq in queue.queues.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("database_url", "point"),
    [("sqlite", point) for point in WORK_POINTS] + [("postgresql", point) for point in IN_SQL],
    indirect=["database_url"],
)
@case("A-q-03", "A-q-04")
def test_a_worker_dies_at_a_point(point: str, settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, REQUESTS)
    queue.enqueue(store.claimable(1000))
    end_of(dying_worker(settings, point))
    finish(settings, store, queue, batch_id)
    check_outcomes(store, batch_id, {"doomed", "heir"})
    check_redis(settings, store, queue)


@sqlite
@pytest.mark.parametrize("point", END_POINTS)
def test_a_worker_dies_while_it_ends(point: str, settings: Settings, store: Store, queue: JobQueue) -> None:
    batch_id = submit(store, REQUESTS)
    queue.enqueue(store.claimable(1000))
    doomed = dying_worker(settings, point)
    eventually(lambda: store.batch(batch_id).counts.completed >= 1, "it works", 30)
    doomed.send_signal(signal.SIGTERM)
    end_of(doomed)
    rows = select(store, f"SELECT state, attempts FROM shards WHERE batch_id = '{batch_id}'")
    if point == "after_release":  # given back in good order: the attempt does not count
        assert all(attempts == (1 if state == "done" else 0) for state, attempts in rows)
    else:
        assert any((state, attempts) == ("leased", 1) for state, attempts in rows)
    finish(settings, store, queue, batch_id)
    check_outcomes(store, batch_id, {"doomed", "heir"})
    check_redis(settings, store, queue)


def write_prompts(file: Path) -> None:
    lines = [{"prompt": f"prompt {index}", "max_tokens": TOKENS} for index in range(REQUESTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@sqlite
@pytest.mark.parametrize("point", SUBMIT_POINTS)
def test_a_producer_dies_at_a_point_and_submits_again(
    point: str, settings: Settings, store: Store, queue: JobQueue, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    write_prompts(file)
    command = ("-m", "batchjobs", "submit", str(file), "--key", "k")
    end_of(process(settings, point, *command))
    batches = [batch.id for batch in store.batches()]
    assert len(batches) == 1
    out, _ = end_of(process(settings, "", *command), 0)
    assert out.split() == batches
    finish(settings, store, queue, batches[0])
    check_outcomes(store, batches[0], {"heir"})
    assert [batch.id for batch in store.batches()] == batches


@postgresql
def test_what_a_cut_submission_opened_starts_by_itself(
    settings: Settings, store: Store, queue: JobQueue, tmp_path: Path
) -> None:
    """Redis never heard of the batch, and nobody submits again."""
    file = tmp_path / "prompts.jsonl"
    write_prompts(file)
    end_of(process(settings, "submit_after_open", "-m", "batchjobs", "submit", str(file)))
    (batch,) = store.batches()
    finish(settings, store, queue, batch.id)
    check_outcomes(store, batch.id, {"heir"})


def test_every_point_is_reached_by_the_code() -> None:
    calls: Counter[str] = Counter()
    for folder in ("batchjobs", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            calls.update(re.findall(r'\breach\("(\w+)"\)', path.read_text()))
    assert calls == dict.fromkeys(POINTS, 1)


def test_points_are_armed_by_name() -> None:
    seen: list[Any] = []
    failpoints.reach("before_record")
    with failpoints.armed({"before_record": lambda: seen.append(1)}):
        failpoints.reach("before_record")
        failpoints.reach("after_ack")
    failpoints.reach("before_record")
    assert seen == [1]
    with pytest.raises(UsageError, match="no failpoint 'before_recrod'"), failpoints.armed({"before_recrod": print}):
        pass


def test_a_settings_check_knows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchjobs.settings import unknown_variables

    monkeypatch.setenv("BATCHJOBS_FAILPOINTS", "before_record")
    assert not [sentence for sentence in unknown_variables() if "FAILPOINTS" in sentence]


def test_requests_of_the_helper_are_what_the_checks_expect() -> None:
    assert request(3).body == {"prompt": "prompt 3", "max_tokens": TOKENS}
