"""The audit of a chaos run can fail: each damage that is done to a finished database is named by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from batchjobs.database import Database
from batchjobs.errors import ConnectionFailed
from batchjobs.inputs import open_source
from batchjobs.queue import JobQueue
from batchjobs.store import Store
from batchjobs.submission import Plan, submit
from batchjobs.tables import checkpoints
from batchjobs.types import Completion, FinishReason, Lease, RequestStatus, ShardId
from tests.chaos.audit import MOST_OF_A_KIND, Audit
from tests.chaos.figures import longest_gap, recoveries
from tests.chaos.notes import keep_notes
from tests.chaos.workload import Job, stub_jobs
from tests.support.batches import FOREVER, GONE, create

CANCELLED = 9
"""The request that somebody cancels while nobody holds it."""


@dataclass
class Finished:
    """A database in which one batch has run as it should."""

    database: Database
    store: Store
    job: Job

    def audit(self) -> list[str]:
        return Audit(self.database, self.store, [self.job]).run()

    def execute(self, *statements: str) -> None:
        with self.database.writing() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)


@pytest.fixture
def submitted(database_url: str, tmp_path: Path) -> Iterator[Finished]:
    """A batch of 12 requests in three shards, of which nothing has run."""
    database, store = Database(database_url), Store(database_url)
    keep_notes(database)
    [job] = stub_jobs(12, 1, seed=5, tokens=4)
    job.shard_size = 4
    job.lines[2]["n"] = 2
    job.answers[2, 1] = stub_answer(job, 2, 1)
    made = submit(store, no_queue, [open_source(job.write(tmp_path))], Plan(key=job.key, shard_size=4))
    job.batch_id = made.batch_id
    job.submitted_as.add(made.batch_id)
    yield Finished(database, store, job)
    database.close()
    store.close()


@pytest.fixture
def finished(submitted: Finished) -> Finished:
    assert submitted.job.batch_id is not None
    submitted.job.cancelled_requests.add(CANCELLED)
    submitted.store.cancel_request(submitted.job.batch_id, CANCELLED)
    for number in range(3):
        lease = claim(submitted, number, "w1")
        pending = [request.index for request in submitted.store.pending_requests(lease)]
        submitted.store.record([(lease, row) for index in pending for row in answers(submitted.job, index, lease)])
    return submitted


def no_queue() -> JobQueue:
    raise ConnectionFailed("there is no Redis")


def stub_answer(job: Job, index: int, choice: int) -> Any:
    from tests.chaos.workload import Expected
    from tests.support.stub_engine import expected_text

    line = job.lines[index]
    return Expected(expected_text(line["prompt"], line["max_tokens"], choice), tuple(range(line["max_tokens"])))


def claim(run: Finished, number: int, worker: str, ttl: float = FOREVER) -> Lease:
    assert run.job.batch_id is not None
    [lease] = run.store.claim([ShardId(run.job.batch_id, number)], worker, ttl)
    return lease


def answers(job: Job, index: int, lease: Lease, worker: str = "w1") -> list[Completion]:
    rows = []
    for (which, choice), expected in sorted(job.answers.items()):
        if which == index:
            rows.append(
                Completion(
                    index=index,
                    choice=choice,
                    status=RequestStatus.COMPLETED,
                    finish_reason=FinishReason.LENGTH,
                    text=expected.text,
                    prompt_tokens=len(job.lines[index]["prompt"]),
                    token_ids=expected.token_ids,
                    tokens=tuple(expected.text.split()),
                    logprobs=tuple(-0.5 for _ in expected.token_ids),
                    token_times=tuple(0.1 * n for n in expected.token_ids),
                    worker=worker,
                    attempt=lease.attempt,
                )
            )
    return rows


def test_a_good_run_passes(finished: Finished) -> None:
    audit = Audit(finished.database, finished.store, [finished.job])
    assert audit.run() == []
    assert (audit.figures["requests"], audit.figures["completed"], audit.figures["cancelled"]) == (12, 11, 1)
    assert longest_gap(finished.database) > 0


AT_3 = 'WHERE "index" = 3'
NOTE_3 = f"{AT_3} AND action = 'insert'"
COLUMNS = 'batch_id, "index", choice, status, worker, attempt, shard_no, owner, fence, state, attempts, at_seconds'
DAMAGES = {
    "an outcome is lost": ([f"DELETE FROM completions {AT_3}"], "[3] has no outcome"),
    "a delete is noted": ([f"DELETE FROM completions {AT_3}"], "[3].0: 1 times delete"),
    "an outcome vanished unseen": (
        [f"DELETE FROM completions {AT_3}", f"DELETE FROM chaos_rows {AT_3} AND action = 'delete'"],
        "[3].0 was inserted, and is not there",
    ),
    "an outcome came unseen": ([f"DELETE FROM chaos_rows {AT_3}"], "[3].0 is there, and its insert was not noted"),
    "a second insert": (
        [f"INSERT INTO chaos_rows (action, {COLUMNS}) SELECT action, {COLUMNS} FROM chaos_rows {NOTE_3}"],
        "[3].0: 2 times insert",
    ),
    "a choice is missing": (
        ['DELETE FROM completions WHERE "index" = 2 AND choice = 1'],
        "[2] has the choices [0]",
    ),
    "a wrong text": ([f"UPDATE completions SET text = 'wrong' {AT_3}"], "[3].0 answers 'wrong' instead of"),
    "a change of a row": ([f"UPDATE completions SET text = 'wrong' {AT_3}"], "[3].0: 1 times update"),
    "a wrong token": ([f"UPDATE completions SET token_ids = '[7]' {AT_3}"], "[3].0 answers"),
    "a token without a time": (
        [f"UPDATE completions SET token_times = '[0.1]' {AT_3}"],
        "ids, tokens, logprobs and times",
    ),
    "times run backwards": (
        [f"UPDATE completions SET token_times = '[2, 1]' {AT_3}"],
        "[3].0 has times that run backwards",
    ),
    "cancelled unasked": (
        [f"UPDATE completions SET status = 'cancelled' {AT_3}"],
        "[3].0 is cancelled, and nobody asked for that",
    ),
    "failed": ([f"UPDATE completions SET status = 'failed' {AT_3}"], "[3].0 is failed"),
    "a request is lost": (
        ['DELETE FROM completions WHERE "index" = 11', 'DELETE FROM requests WHERE "index" = 11'],
        "has 11 requests instead of 12",
    ),
    "a request has changed": (
        [f"""UPDATE requests SET body = '{{"prompt": "other", "max_tokens": 4}}' {AT_3}"""],
        "[3] was stored as",
    ),
    "a stale writer": ([f"UPDATE chaos_rows SET owner = 'w2' {NOTE_3}"], "[3].0 was written by w1 while its shard"),
    "a writer after the end": (
        [f"UPDATE chaos_rows SET state = 'done' {NOTE_3}"],
        "[3].0 was written by w1 while its shard was done by w1",
    ),
    "a stale attempt": (
        [f"UPDATE chaos_rows SET attempts = 2 {NOTE_3}"],
        "[3].0 was written by w1 under attempt 1, in attempt 2",
    ),
    "written by nobody": (
        [f"UPDATE chaos_rows SET worker = NULL {NOTE_3}"],
        "[3].0 was written as completed by no worker",
    ),
    "cancelled in another's name": (
        [f"UPDATE chaos_rows SET worker = 'w2', status = 'cancelled', attempt = 0 {NOTE_3}"],
        "[3].0 was cancelled in the name of w2, its shard was of w1",
    ),
    "a cancelled answer with other tokens": (
        [
            "UPDATE completions SET token_ids = '[7]', tokens = '[\"x\"]', logprobs = '[0]', token_times = '[1]' "
            f'WHERE "index" = {CANCELLED}'
        ],
        f"[{CANCELLED}].0 was cancelled with",
    ),
    "a cancelled answer with another text": (
        [f"UPDATE completions SET text = 'other' WHERE \"index\" = {CANCELLED}"],
        f"[{CANCELLED}].0 was cancelled with 'other'",
    ),
    "written into no shard": (
        [f"UPDATE chaos_rows SET shard_no = NULL {NOTE_3}"],
        "[3].0 was written while no shard held it",
    ),
    "a lease is left": (["UPDATE shards SET state = 'leased' WHERE shard_no = 1"], "-1 is still leased, by w1"),
    "a shard is ready again": (
        ["UPDATE shards SET state = 'ready' WHERE shard_no = 1"],
        "-1 was done and became ready",
    ),
    "a fence shrinks": (["UPDATE shards SET fence = fence - 1 WHERE shard_no = 1"], "-1 went from 1 to 0"),
    "an owner without a fence": (
        ["UPDATE shards SET state = 'leased', owner = 'w2' WHERE shard_no = 1"],
        "-1 was leased to w2 without a new fence",
    ),
    "counts that are wrong": (["UPDATE shards SET completed = completed + 1 WHERE shard_no = 1"], "its rows give"),
    "a batch without an end": (["UPDATE shards SET requests = 5 WHERE shard_no = 1"], "is running with 12 outcomes"),
    "overlapping shards": (["UPDATE shards SET first_index = 3 WHERE shard_no = 1"], "[3] is in 2 shards"),
    "a gap between shards": (["UPDATE shards SET first_index = 5 WHERE shard_no = 1"], "[4] is in 0 shards"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_audit_names_each_damage(finished: Finished, damage: str) -> None:
    statements, sentence = DAMAGES[damage]
    finished.execute(*statements)
    found = finished.audit()
    assert [each for each in found if sentence in each], found


def test_the_audit_names_a_write_behind_the_fence(submitted: Finished) -> None:
    """What a worker without a fence would do: its shard is another's by now, and it writes."""
    batch = submitted.job.batch_id
    lost, kept = claim(submitted, 0, "w1", ttl=GONE), claim(submitted, 0, "w2")
    stale = [(lost, row) for row in answers(submitted.job, 3, lost)]
    assert submitted.store.record(stale).stale == [lost.shard]
    submitted.store.record([(kept, row) for row in answers(submitted.job, 3, kept, "w2")])
    assert not [each for each in submitted.audit() if "was written by" in each]
    copied = "batch_id, status, text, finish_reason, prompt_tokens, completion_tokens, cached_tokens, token_ids"
    copied += ", tokens, logprobs, token_times, created_at"
    submitted.execute(
        f'INSERT INTO completions ("index", choice, worker, attempt, {copied}) '
        f"SELECT 1, 0, 'w1', 1, {copied} FROM completions WHERE batch_id = '{batch}' AND \"index\" = 3"
    )
    assert f"{batch}[1].0 was written by w1 while its shard was leased by w2" in submitted.audit()


def test_the_audit_names_a_live_lease_that_is_taken_over(submitted: Finished) -> None:
    claim(submitted, 0, "w1", ttl=FOREVER)
    submitted.execute("UPDATE shards SET owner = 'w2', fence = fence + 1 WHERE shard_no = 0")
    [found] = [each for each in submitted.audit() if "taken from w1 by w2" in each]
    assert "before its lease ran out" in found


def test_the_audit_names_what_was_left_undone(submitted: Finished) -> None:
    claim(submitted, 0, "w1")
    found = submitted.audit()
    assert f"shard {submitted.job.batch_id}-0 is still leased, by w1" in found
    assert f"shard {submitted.job.batch_id}-1 is still ready, by None" in found
    assert f"{submitted.job.key}[0] has no outcome" in found
    assert f"... and {12 - MOST_OF_A_KIND} more like that" in found


def test_the_audit_names_a_checkpoint_that_is_left(finished: Finished) -> None:
    values: dict[str, Any] = {
        "batch_id": finished.job.batch_id,
        "index": 3,
        "choice": 0,
        "fence": 1,
        "model_version": "v",
        **{name: [] for name in ("token_ids", "tokens", "logprobs", "token_times")},
        **dict.fromkeys(("started_at", "updated_at"), datetime.now(UTC)),
    }
    with finished.database.writing() as connection:
        connection.execute(sa.insert(checkpoints), {k: v for k, v in values.items() if k in checkpoints.c})
    assert finished.audit() == [f"a checkpoint of {finished.job.batch_id}[3].0 is left"]


def test_the_audit_names_batches_that_are_not_as_submitted(finished: Finished) -> None:
    other = create(finished.store, key="another")
    finished.job.submitted_as.add("second")
    missing = Job("missing", [], 4)
    found = Audit(finished.database, finished.store, [finished.job, missing]).run()
    assert f"there is a batch {other} with the key 'another' that nobody submitted" in found
    assert "batch missing is not stored" in found
    assert [each for each in found if each.startswith(f"the submissions of {finished.job.key} gave")]


def test_recoveries_are_measured_from_the_notes(submitted: Finished) -> None:
    claim(submitted, 0, "w1", ttl=GONE)
    claim(submitted, 1, "w1", ttl=GONE)
    with submitted.database.reading() as connection:
        killed_at = connection.execute(sa.text("SELECT max(at_seconds) FROM chaos_shards")).scalar_one()
    claim(submitted, 0, "w2")
    claim(submitted, 1, "w2")
    [seconds] = recoveries(submitted.database, [("w1", killed_at), ("w3", killed_at)])
    assert 0 < seconds < 30
