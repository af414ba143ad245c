"""The audit: every row of a finished run is looked at, and every change that the database noted of it.

An audit returns violations as sentences; an empty list is the proof. Each check looks at one promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.types import RequestStatus

if TYPE_CHECKING:
    from batchjobs.database import Database
    from batchjobs.store import Store, StoredResult
    from batchjobs.types import Completion
    from tests.chaos.workload import Expected, Job

MOST_OF_A_KIND = 5
"""So many violations of one check are put into words; the rest is counted."""

_COUNTED = ("completed", "failed", "cancelled", "expired", "prompt_tokens", "completion_tokens")
WRITTEN_BY_STORE = ("worker_crashed",)
"""Errors of rows that no worker writes."""


class Audit:
    """Of one database, against what was asked of it. ``allow_crashed`` lets rows with worker_crashed pass."""

    def __init__(self, database: Database, store: Store, jobs: Sequence[Job], *, allow_crashed: bool = False) -> None:
        self._database = database
        self._store = store
        self._jobs = jobs
        self._allow_crashed = allow_crashed
        self.violations: list[str] = []
        self.figures: Counter[str] = Counter()

    def run(self) -> list[str]:
        """All checks. Returns the violations, in words."""
        for check in (
            self._batches,
            self._outcomes,
            self._inserts,
            self._owners,
            self._fences,
            self._takeovers,
            self._shards,
            self._ranges,
            self._checkpoints,
            self._counts,
        ):
            found = list(check())
            self.violations += found[:MOST_OF_A_KIND]
            if len(found) > MOST_OF_A_KIND:
                self.violations.append(f"... and {len(found) - MOST_OF_A_KIND} more like that")
        return self.violations

    def _rows(self, statement: str, parameters: Mapping[str, Any] | None = None) -> list[SimpleNamespace]:
        return rows_of(self._database, statement, parameters)

    # What was asked is there, once

    def _batches(self) -> Iterator[str]:
        """One batch a key, and none that nobody asked for."""
        stored = {row.key: row.id for row in self._rows("SELECT key, id FROM batches")}
        for key in sorted(stored.keys() - {job.key for job in self._jobs}, key=str):
            yield f"there is a batch {stored[key]} with the key {key!r} that nobody submitted"
        for job in self._jobs:
            if job.key not in stored:
                yield f"batch {job.key} is not stored"
            elif job.submitted_as != {stored[job.key]}:
                yield f"the submissions of {job.key} gave {sorted(job.submitted_as)}, stored is {stored[job.key]}"

    def _outcomes(self) -> Iterator[str]:
        """Each line has its outcome, which is what an undisturbed run gives."""
        for job in self._jobs:
            if job.batch_id is None:
                continue
            found = 0
            for result in self._store.results(job.batch_id):
                yield from self._request(job, result)
                found += 1
            self.figures["requests"] += found
            if found != len(job.lines):
                yield f"batch {job.key} has {found} requests instead of {len(job.lines)}"
        stored = self._rows("SELECT count(*) AS rows FROM completions")[0].rows
        if stored != self.figures["rows"]:
            yield f"{stored} completions are stored, {self.figures['rows']} of them of requests that were asked"

    def _request(self, job: Job, result: StoredResult) -> Iterator[str]:
        index, choices = result.request.index, result.choices
        name = f"{job.key}[{index}]"
        line = job.lines[index] if index < len(job.lines) else {}
        if any(result.request.body.get(field) != line.get(field) for field in ("prompt", "max_tokens")):
            yield f"{name} was stored as {result.request.body}, and submitted as {line}"
        if not choices:
            yield f"{name} has no outcome"
            return
        self.figures["rows"] += len(choices)
        numbers = [choice.choice for choice in choices]
        wanted = list(range(line.get("n", 1)))
        is_answered = all(choice.status == RequestStatus.COMPLETED for choice in choices)
        # What ended early has the choices that were begun, or one.
        if numbers != (wanted if is_answered else wanted[: len(numbers)]):
            yield f"{name} has the choices {numbers}"
        self.figures[result.state] += 1
        for choice in choices:
            yield from self._choice(job, f"{name}.{choice.choice}", choice)

    def _choice(self, job: Job, name: str, row: Completion) -> Iterator[str]:
        expected = job.answers.get((row.index, row.choice))
        lengths = [len(each) for each in (row.token_ids, row.tokens, row.logprobs, row.token_times)]
        self.figures["tokens"] += lengths[0]
        if len(set(lengths)) > 1:
            yield f"{name} has {lengths} ids, tokens, logprobs and times"
        if list(row.token_times) != sorted(row.token_times):
            yield f"{name} has times that run backwards"
        if row.status == RequestStatus.COMPLETED:
            is_same = expected is not None and (row.text, row.token_ids) == (expected.text, expected.token_ids)
            if not is_same and not (expected and self._is_rounded(job, row, len(expected.token_ids))):
                yield f"{name} answers {row.text[:60]!r} instead of {expected.text[:60] if expected else None!r}"
        elif row.status == RequestStatus.CANCELLED:
            if not job.cancelled and row.index not in job.cancelled_requests:
                yield f"{name} is cancelled, and nobody asked for that"
            if expected is not None and not _begins(expected, row) and not self._is_rounded(job, row, 0):
                yield f"{name} was cancelled with {row.text[:60]!r}, which is not the beginning of its answer"
        elif not (self._allow_crashed and row.error is not None and row.error.code in WRITTEN_BY_STORE):
            yield f"{name} is {row.status}: {row.error}"

    def _is_rounded(self, job: Job, row: Completion, tokens: int) -> bool:
        """Whether another answer of at least so many tokens is as right."""
        if job.rounding is None or len(row.token_ids) < tokens:
            return False
        is_right = job.rounding.allows(job.lines[row.index], row.choice, row.token_ids)
        self.figures["rounded"] += is_right
        return is_right

    # Each row was written once, by whom it was for

    def _inserts(self) -> Iterator[str]:
        query = """SELECT batch_id, "index", choice, action, count(*) AS times FROM chaos_rows
          GROUP BY batch_id, "index", choice, action HAVING action <> 'insert' OR count(*) <> 1"""
        for row in self._rows(query):
            yield f"{row.batch_id}[{row.index}].{row.choice}: {row.times} times {row.action}"
        query = """SELECT c.batch_id, c."index", c.choice FROM completions c LEFT JOIN chaos_rows n
          ON n.batch_id = c.batch_id AND n."index" = c."index" AND n.choice = c.choice AND n.action = 'insert'
          WHERE n.id IS NULL"""
        for row in self._rows(query):
            yield f"{row.batch_id}[{row.index}].{row.choice} is there, and its insert was not noted"
        query = """SELECT n.batch_id, n."index", n.choice FROM chaos_rows n LEFT JOIN completions c
          ON n.batch_id = c.batch_id AND n."index" = c."index" AND n.choice = c.choice
          WHERE c.batch_id IS NULL AND n.action = 'insert'"""
        for row in self._rows(query):
            yield f"{row.batch_id}[{row.index}].{row.choice} was inserted, and is not there"

    def _owners(self) -> Iterator[str]:
        """A worker writes under its own lease. What the store ends itself is in the name of the last owner."""
        for row in self._rows("SELECT * FROM chaos_rows WHERE action = 'insert'"):
            name = f"{row.batch_id}[{row.index}].{row.choice}"
            if row.shard_no is None:
                yield f"{name} was written while no shard held it"
            elif _by_store(row):
                if row.worker not in (None, row.owner):
                    yield f"{name} was {row.status} in the name of {row.worker}, its shard was of {row.owner}"
            elif row.worker is None:
                yield f"{name} was written as {row.status} by no worker"
            elif (row.worker, row.state) != (row.owner, "leased"):
                yield f"{name} was written by {row.worker} while its shard was {row.state} by {row.owner}"
            elif row.attempt != row.attempts:
                yield f"{name} was written by {row.worker} under attempt {row.attempt}, in attempt {row.attempts}"

    def _fences(self) -> Iterator[str]:
        """Fences only grow, and whoever becomes the owner has a new one."""
        last: dict[tuple[str, int], int] = {}
        for row in self._rows("SELECT * FROM chaos_shards WHERE action = 'update' ORDER BY id"):
            name = f"shard {row.batch_id}-{row.shard_no}"
            before = last.get((row.batch_id, row.shard_no), row.old_fence)
            last[row.batch_id, row.shard_no] = row.new_fence
            if row.new_fence < row.old_fence or row.old_fence < before:
                yield f"the fence of {name} went from {max(before, row.old_fence)} to {row.new_fence}"
            if row.new_state == "leased" and row.new_fence == row.old_fence:
                yield f"{name} was leased to {row.new_owner} without a new fence"
            if row.old_state == "done" and row.new_state != "done":
                yield f"{name} was done and became {row.new_state}"

    def _takeovers(self) -> Iterator[str]:
        """A live lease is never taken over."""
        query = """SELECT * FROM chaos_shards WHERE action = 'update' AND old_state = 'leased'
          AND new_fence > old_fence AND old_lease_until > at_seconds"""
        for row in self._rows(query):
            left = row.old_lease_until - row.at_seconds
            yield (
                f"shard {row.batch_id}-{row.shard_no} was taken from {row.old_owner} by {row.new_owner} "
                f"{left:.3f} s before its lease ran out"
            )

    # Nothing is left

    def _shards(self) -> Iterator[str]:
        for row in self._rows("SELECT * FROM shards WHERE state <> 'done'"):
            yield f"shard {row.batch_id}-{row.shard_no} is still {row.state}, by {row.owner}"

    def _ranges(self) -> Iterator[str]:
        """Each request is in one shard, however often shards were split."""
        query = """SELECT r.batch_id, r."index", count(s.shard_no) AS shards FROM requests r LEFT JOIN shards s
          ON s.batch_id = r.batch_id AND r."index" BETWEEN s.first_index AND s.last_index
          GROUP BY r.batch_id, r."index" HAVING count(s.shard_no) <> 1"""
        for row in self._rows(query):
            yield f"{row.batch_id}[{row.index}] is in {row.shards} shards"

    def _checkpoints(self) -> Iterator[str]:
        for row in self._rows('SELECT batch_id, "index", choice FROM checkpoints'):
            yield f"a checkpoint of {row.batch_id}[{row.index}].{row.choice} is left"

    # What is shown is what is there

    def _counts(self) -> Iterator[str]:
        for row in self._rows("SELECT * FROM batch_progress"):
            counted = self._counted(row.batch_id)
            shown = {name: getattr(row, name) for name in _COUNTED}
            if shown != counted:
                yield f"batch {row.batch_id} shows {shown}, its rows give {counted}"
            total = sum(counted[name] for name in _COUNTED[:4])
            if row.total != total or row.status not in ("completed", "cancelled"):
                yield f"batch {row.batch_id} is {row.status} with {total} outcomes of {row.total} requests"

    def _counted(self, batch_id: str) -> dict[str, int]:
        """A request counts in the state of its worst choice, and its prompt with the first."""
        counts = dict.fromkeys(_COUNTED, 0)
        statuses: dict[int, list[RequestStatus]] = {}
        query = """SELECT "index", choice, status, prompt_tokens, completion_tokens FROM completions
          WHERE batch_id = :batch"""
        for row in self._rows(query, {"batch": batch_id}):
            statuses.setdefault(row.index, []).append(RequestStatus(row.status))
            counts["prompt_tokens"] += row.prompt_tokens if row.choice == 0 else 0
            counts["completion_tokens"] += row.completion_tokens
        for each in statuses.values():
            counts[RequestStatus.of_choices(each)] += 1
        return counts


def _by_store(row: SimpleNamespace) -> bool:
    """Whether no worker wrote this, but whoever cancelled or gave up what nobody held."""
    is_cancelled = row.status == RequestStatus.CANCELLED and row.attempt == 0
    return is_cancelled or row.error_code in WRITTEN_BY_STORE


def _begins(expected: Expected, row: Completion) -> bool:
    """Whether this is how the answer begins. Spaces and a character that is cut through do not count."""
    text, whole = (each.replace(" ", "").rstrip("\ufffd") for each in (row.text, expected.text))
    return row.token_ids == expected.token_ids[: len(row.token_ids)] and whole.startswith(text)


def rows_of(database: Database, statement: str, parameters: Mapping[str, Any] | None = None) -> list[SimpleNamespace]:
    """A query's rows; a column named index is an attribute as the others are."""
    with database.reading() as connection:
        return [SimpleNamespace(**row) for row in connection.execute(sa.text(statement), parameters or {}).mappings()]
