"""Random work on the store, rule by rule beside a model of a few lines, on both databases.

After every rule the tables are what the model says: each request is in exactly one shard and has at most one outcome,
fences only grow, counts add up, no checkpoint outlives its request, and what a stale lease brings changes nothing. In
the end everything can be finished, and then each request has exactly one outcome.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batchjobs.reconcile import reconcile
from batchjobs.store import Isolated, Store
from batchjobs.store.leases import ALONE_AT
from batchjobs.tables import batch_progress, checkpoints, completions, metadata, past_completions, results, shards
from batchjobs.types import Lease, ShardId
from tests.support.batches import FOREVER, GONE, answer, create, progress, request
from tests.support.store_model import COUNTED, WAYS, Batch, Queue, Shard, made

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.types import Completion

PINS = ((("v1",) * 3 + (None,) * 6, 3), ((None, "v1", "v2"), 1), (("v1", "v2"), 2))
"""What the requests of each batch are pinned to, and requests in a shard."""
THEN = ("", "again", "give back", "retry")

TABLES = {
    "shards": sa.select(shards),
    "completions": sa.select(completions.c.batch_id, completions.c.index.label("index_")),
    "past": sa.select(past_completions.c.batch_id, past_completions.c.index.label("index_")).where(
        past_completions.c.choice == 0
    ),
    "checkpoints": sa.select(
        checkpoints.c.batch_id,
        checkpoints.c.index.label("index_"),
        checkpoints.c.fence,
        sa.func.json_array_length(checkpoints.c.token_ids).label("tokens"),
    ),
    "results": sa.select(results.c.batch_id, results.c.state).order_by(results.c.batch_id, results.c.index),
    "progress": sa.select(batch_progress),
}

picks = st.lists(st.integers(0, 99), min_size=1, max_size=4)
lasts = st.sampled_from([FOREVER, GONE])
versions = st.sampled_from([None, None, "v1", "v2"])


def opened(pins: Sequence[str | None], size: int) -> dict[int, Shard]:
    """The shards of a new batch: one whose pins differ is replaced by single ones behind the others."""
    slices = [tuple(range(first, first + size)) for first in range(0, len(pins), size)]
    new = {number: Shard(indexes, pin=pins[indexes[0]]) for number, indexes in enumerate(slices)}
    for number, indexes in enumerate(slices):
        if len({pins[index] for index in indexes}) > 1:
            del new[number]
            behind = max([*new, len(slices) - 1]) + 1
            new |= {behind + place: Shard((index,), pin=pins[index]) for place, index in enumerate(indexes)}
    return new


def some(everything: list[Any], likely: list[Any], picked: list[int]) -> list[Any]:
    """Three times out of four from what is likely to be of use."""
    chosen = [(pick // 4, likely if pick % 4 and likely else everything) for pick in picked]
    return [each[number % len(each)] for number, each in chosen]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.queue = Queue()
        self.leases: list[Lease] = []
        self.fences: dict[ShardId, int] = {}
        with store._database.writing() as connection:
            for table in reversed(metadata.sorted_tables):
                connection.execute(sa.delete(table))
        self.batches = {self.submit(pins, size): Batch(opened(pins, size)) for pins, size in PINS}

    def submit(self, pins: Sequence[str | None], shard_size: int) -> str:
        batch_id = create(self.store, shard_size=shard_size)
        bodies = [{"prompt": "p"} if pin is None else {"prompt": "p", "model_version": pin} for pin in pins]
        self.store.add_requests(batch_id, [request(index, **body) for index, body in enumerate(bodies)])
        self.store.open_batch(batch_id)
        return batch_id

    # What the rules choose from

    def claimable(self, version: str | None = None) -> list[ShardId]:
        return [
            ShardId(batch_id, number)
            for batch_id, batch in self.batches.items()
            for number, shard in sorted(batch.shards.items())
            if shard.is_free and not shard.crashed_too_often and not batch.is_cancelled and not batch.is_paused
            if version is None or shard.pin in (None, version)
        ]

    def some_shards(self, picked: list[int]) -> set[ShardId]:
        everything = [ShardId(b, number) for b, batch in self.batches.items() for number in batch.shards]
        return set(some(everything, self.claimable(), picked))

    def some_leases(self, picked: list[int]) -> list[Lease]:
        held = [lease for lease in self.leases if self.held(lease)]
        return list(dict.fromkeys(some(self.leases, held, picked)))

    def shard(self, lease: Lease) -> Shard | None:
        return self.batches[lease.shard.batch_id].shards.get(lease.shard.shard_no)

    def held(self, lease: Lease, states: tuple[str, ...] = ("leased",)) -> Shard | None:
        shard = self.shard(lease)
        return shard if shard is not None and shard.state in states and shard.fence == lease.fence else None

    def some_request(self, pick: int) -> tuple[str, Batch, int]:
        everything = [(b, batch, index) for b, batch in self.batches.items() for index in batch.indexes]
        return everything[pick % len(everything)]

    # Rules

    @initialize(picked=picks)
    def begin(self, picked: list[int]) -> None:
        self.claim(picked, "w1", FOREVER)
        self.claim([4 * pick + 1 for pick in picked], "w2", GONE)

    @rule(picked=picks, worker=st.sampled_from(["w1", "w2", "w3"]), ttl=lasts, version=versions)
    def claim(self, picked: list[int], worker: str, ttl: float, version: str | None = None) -> None:
        wanted = self.some_shards(picked)
        expected = []
        for number in [number for number in self.claimable(version) if number in wanted]:
            shard = self.batches[number.batch_id].shards[number.shard_no]
            alone = len(shard.indexes) == 1 and shard.attempts - shard.forgiven >= ALONE_AT
            shard.state, shard.ran_out = "leased", ttl == GONE
            shard.fence, shard.attempts = shard.fence + 1, shard.attempts + 1
            expected.append(Lease(number, shard.fence, shard.attempts, alone, shard.pin))
        leases = self.store.claim(list(wanted), worker, ttl, version=version)
        assert leases == expected
        for lease in leases:
            batch = self.batches[lease.shard.batch_id]
            shard = batch.shards[lease.shard.shard_no]
            assert [pending.index for pending in self.store.pending_requests(lease)] == batch.pending(shard)
            begun = {index: batch.begun[index][0] for index in shard.indexes if index in batch.begun}
            stored = self.store.checkpoints(lease, "v1")
            assert {index: len(choices[0].token_ids) for index, choices in stored.items()} == begun
        self.leases += leases

    @rule(pick=st.integers(0, 24), times=st.integers(1, 4))
    def crash(self, pick: int, times: int) -> None:
        for _ in range(times):
            self.claim([4 * pick + 1], "w4", GONE)

    @precondition(lambda self: self.leases)
    @rule(picked=picks, ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=2), then=st.sampled_from(THEN))
    def record(self, picked: list[int], ways: list[str], then: str) -> None:
        records: list[tuple[Lease, Completion]] = []
        done, stale = set(), []
        for lease in self.some_leases(picked):
            batch, shard = self.batches[lease.shard.batch_id], self.held(lease, ("leased", "done"))
            indexes = shard.indexes if shard else (lease.shard.shard_no,)
            chosen = {indexes[pick % len(indexes)]: (way, pick) for way, pick in zip(ways, picked, strict=False)}
            for index, (way, pick) in chosen.items():
                records += [(lease, each) for each in made(way, index, pick % 4, lease.attempt)]
                if shard:
                    batch.end(shard, index, way, 0 if way == "failed" else pick % 4, lease.attempt)
            if shard is None:
                stale.append(lease.shard)
            elif shard.state == "done":
                done.add(lease.shard)
        for _ in range(2 if then == "again" else 1):  # as after a commit that nobody heard of
            recorded = self.store.record(records)
            assert (set(recorded.done), sorted(map(str, recorded.stale))) == (done, sorted(map(str, stale)))
        if then == "give back":
            self.release(picked)
        if then == "retry":
            self.retry()

    @precondition(lambda self: self.leases)
    @rule(picked=picks, tokens=st.integers(1, 5))
    def checkpoint(self, picked: list[int], tokens: int) -> None:
        records, stale = [], []
        for lease in self.some_leases(picked):
            shard, batch = self.held(lease, ("leased", "done")), self.batches[lease.shard.batch_id]
            if shard is None:
                stale.append(lease.shard)
            for index in shard.indexes if shard else (0,):
                records.append((lease, index, (progress(tokens),)))
                if shard and index not in batch.outcomes:
                    batch.begun[index] = (tokens, lease.fence)
        assert self.store.save_checkpoints(records, "v1") == stale

    @precondition(lambda self: self.leases)
    @rule(picked=picks, ttl=lasts)
    def renew(self, picked: list[int], ttl: float) -> None:
        leases = self.some_leases(picked)
        held = {lease.shard: shard for lease in leases if (shard := self.held(lease))}
        for shard in held.values():
            shard.ran_out = ttl == GONE
        assert self.store.renew(leases, ttl) == held.keys()

    @precondition(lambda self: self.leases)
    @rule(picked=picks)
    def release(self, picked: list[int]) -> None:
        leases = self.some_leases(picked)
        for lease in leases:
            if shard := self.held(lease):
                shard.state, shard.attempts = "ready", shard.attempts - 1
        self.store.release(leases)

    @rule(pick=st.integers(0, 99))
    def cancel_request(self, pick: int) -> None:
        batch_id, batch, index = self.some_request(pick)
        shard = batch.shard_of(index)
        if shard.is_free:
            batch.end_by_store(shard, "cancelled", [index])
        self.store.cancel_request(batch_id, index)

    @precondition(lambda self: len(self.leases) > 9)
    @rule(pick=st.integers(0, 2), is_paused=st.booleans())
    def cancel_batch(self, pick: int, is_paused: bool) -> None:
        if is_paused:
            self.pause_or_resume(pick, "pause")
        batch_id = sorted(self.batches)[pick]
        self.batches[batch_id].cancel()
        self.store.cancel_batch(batch_id)

    @precondition(lambda self: len(self.leases) > 3)
    @rule(pick=st.integers(0, 2), then=st.sampled_from(["pause", "resume", "resume"]))
    def pause_or_resume(self, pick: int, then: str) -> None:
        batch_id = sorted(self.batches)[pick]
        batch = self.batches[batch_id]
        if then == "pause":
            assert self.store.pause_batch(batch_id) == batch.pause()
        else:
            assert self.store.resume_batch(batch_id) == batch.resume()

    @rule(is_flushed=st.booleans(), isolates_before=st.booleans())
    def reconcile(self, is_flushed: bool, isolates_before: bool) -> None:
        if is_flushed:
            self.queue.entries.clear()
        expected = sum((batch.isolate() for batch in self.batches.values()), Counter())
        isolated = Isolated(expected["split"], expected["failed"])
        if isolates_before:
            assert self.store.isolate() == isolated
            isolated = Isolated()
        swept = sum(batch.cancel_free() for batch in self.batches.values() if batch.is_cancelled)
        done = reconcile(self.store, self.queue, thorough=True)  # type: ignore[arg-type]
        assert (Isolated(done.split, done.failed, done.refused), done.swept, done.discarded) == (isolated, swept, 0)
        assert self.queue.entries.issuperset(self.claimable())

    @rule()
    def retry(self) -> None:
        for batch_id, batch in self.batches.items():
            if not batch.is_cancelled:
                assert self.store.retry_failed(batch_id).requests == batch.retry()

    # What holds after every rule

    @invariant()
    def the_tables_are_those_of_the_model(self) -> None:
        with self.store._database.reading() as connection:
            found = {name: connection.execute(query).all() for name, query in TABLES.items()}
        for batch_id, batch in self.batches.items():
            mine = {name: [row for row in rows if row.batch_id == batch_id] for name, rows in found.items()}
            self.check_shards(batch, {row.shard_no: row for row in mine["shards"]})
            rows = {index: 2 if way == "half failed" else 1 for index, (way, _, _) in batch.outcomes.items()}
            assert Counter(row.index_ for row in mine["completions"]) == Counter(rows)
            assert Counter(row.index_ for row in mine["past"]) == batch.past
            assert {row.index_: (row.tokens, row.fence) for row in mine["checkpoints"]} == batch.begun
            assert not batch.begun.keys() & batch.outcomes.keys()
            states = [self.state(batch, index) for index in batch.indexes]
            assert [row.state for row in mine["results"]] == states
            [counts] = mine["progress"]
            names = ("queued", "running", "completed", "failed", "cancelled", "expired")
            assert [getattr(counts, name) for name in names] == [states.count(name) for name in names]
            assert (counts.total, counts.paused_at is not None) == (len(states), batch.is_paused)
            assert counts.tokens_in_progress == sum(tokens for tokens, _ in batch.begun.values())
        assert [shard for shard, _ in self.store.claimable(100)] == self.claimable()

    def check_shards(self, batch: Batch, rows: dict[int, Any]) -> None:
        ranges = sorted(index for row in rows.values() for index in range(row.first_index, row.last_index + 1))
        assert ranges == list(dict.fromkeys(batch.indexes))
        assert rows.keys() == batch.shards.keys()
        for number, row in rows.items():
            shard_id = ShardId(row.batch_id, number)
            assert row.fence >= self.fences.get(shard_id, 0)
            self.fences[shard_id] = row.fence
            shard = batch.shards[number]
            assert row.requests == len(shard.indexes) == row.last_index - row.first_index + 1
            state = (shard.state, shard.fence, shard.attempts, shard.forgiven, shard.pin)
            assert (row.state, row.fence, row.attempts, row.forgiven, row.model_version) == state
            ended = [batch.outcomes[index] for index in shard.indexes if index in batch.outcomes]
            ways = [COUNTED[way] for way, _, _ in ended]
            counts = (ways.count("completed"), ways.count("failed"), ways.count("cancelled"))
            assert (row.completed, row.failed, row.cancelled) == counts
            assert row.completion_tokens == sum(tokens for _, tokens, _ in ended)

    def state(self, batch: Batch, index: int) -> str:
        if index in batch.outcomes:
            return COUNTED[batch.outcomes[index][0]]
        shard = batch.shard_of(index)
        return "running" if shard.state == "leased" and not shard.ran_out else "queued"

    def teardown(self) -> None:
        """Whatever happened, the rest can be finished, and then there is one outcome for each request."""
        self.store.renew(self.leases, GONE)
        for batch_id in self.batches:
            self.store.resume_batch(batch_id)
        for _ in range(3):
            reconcile(self.store, self.queue)  # type: ignore[arg-type]
            for lease in self.store.claim([shard for shard, _ in self.store.claimable(100)], "last", FOREVER):
                rest = self.store.pending_requests(lease)
                assert self.store.record([(lease, answer(each.index)) for each in rest]).done == [lease.shard]
        for batch_id, batch in self.batches.items():
            assert self.store.batch(batch_id).status.is_final
            assert [bool(stored.choices) for stored in self.store.results(batch_id)] == [True] * len(batch.indexes)
            ended = {index: way for index, (way, _, _) in batch.outcomes.items()}
            states = {stored.request.index: stored.state for stored in self.store.results(batch_id)}
            assert {index: states[index] for index in ended} == {index: COUNTED[way] for index, way in ended.items()}
        assert list(self.store.select("SELECT 1 FROM checkpoints")[1]) == []


def test_whatever_is_done_in_whatever_order(store: Store) -> None:
    is_sqlite = store._database.is_sqlite
    run_state_machine_as_test(
        lambda: StoreMachine(store),
        settings=settings(
            max_examples=50 if is_sqlite else 12,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
