"""Random work on a batch, step by step beside a model of a few lines: every request gets exactly one outcome."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from batchjobs.types import Completion, FinishReason, Lease, RequestStatus, ShardId
from tests.support.batches import FOREVER, GONE, answer, failure, submit

if TYPE_CHECKING:
    from batchjobs.store import Store

REQUESTS, SHARD_SIZE, STEPS = 18, 3, 120


@dataclass
class ShardModel:
    indexes: range
    state: str = "ready"
    fence: int = 0
    ran_out: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return self.state == "ready" or (self.state == "leased" and self.ran_out)

    def is_held(self, lease: Lease) -> bool:
        return self.state == "leased" and self.fence == lease.fence

    def add(self, outcomes: dict[int, str]) -> int:
        new = {index: status for index, status in outcomes.items() if index not in self.outcomes}
        self.outcomes |= new
        return len(new)

    def close_if_full(self, *, raise_fence: bool) -> None:
        if self.state != "done" and len(self.outcomes) == len(self.indexes):
            self.state = "done"
            self.fence += raise_fence

    def cancel(self) -> int:
        added = self.add(dict.fromkeys(self.indexes, "cancelled"))
        self.close_if_full(raise_fence=True)
        return added


class Simulation:
    def __init__(self, store: Store, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.batch_id = submit(store, REQUESTS, shard_size=SHARD_SIZE)
        self.shards = [ShardModel(range(first, first + SHARD_SIZE)) for first in range(0, REQUESTS, SHARD_SIZE)]
        self.leases: list[Lease] = []
        self.is_cancelled = False

    def run(self) -> None:
        steps = [self.claim] * 3 + [self.record] * 4 + [self.release, self.renew, self.cancel_request, self.sweep]
        for number in range(STEPS):
            self.random.choice(steps)()
            if number == STEPS // 2 and self.random.random() < 0.5:
                self.cancel_batch()
            self.check()
        self.finish()

    def some_leases(self) -> list[Lease]:
        return self.random.sample(self.leases, min(len(self.leases), self.random.randint(0, 4)))

    def claim(self) -> None:
        wanted = self.random.sample(range(len(self.shards)), 3)
        ttl = self.random.choice([FOREVER, GONE])
        expected = []
        for number in sorted(wanted):
            shard = self.shards[number]
            if shard.is_free and not self.is_cancelled:
                shard.state, shard.fence, shard.ran_out = "leased", shard.fence + 1, ttl == GONE
                expected.append((number, shard.fence))
        leases = self.store.claim([ShardId(self.batch_id, number) for number in wanted], "w", ttl)
        assert [(lease.shard.shard_no, lease.fence) for lease in leases] == expected
        self.leases += leases

    def record(self) -> None:
        records: list[tuple[Lease, Completion]] = []
        stale, done = set(), set()
        for lease in self.some_leases():
            shard = self.shards[lease.shard.shard_no]
            indexes = self.random.sample(shard.indexes, self.random.randint(1, SHARD_SIZE))
            made = [self.random.choice([answer, failure, cancelled])(index) for index in indexes]
            records += [(lease, completion) for completion in made]
            if not (shard.is_held(lease) or (shard.state == "done" and shard.fence == lease.fence)):
                stale.add((lease.shard, lease.fence))
                continue
            shard.add({completion.index: completion.status.value for completion in made})
            shard.close_if_full(raise_fence=False)
            if shard.state == "done":
                done.add(lease.shard)
        for _ in range(self.random.randint(1, 2)):  # a second time as after a commit that nobody heard of
            recorded = self.store.record(records)
            assert set(recorded.done) == done
            assert Counter(recorded.stale) == Counter(shard for shard, _ in stale)

    def release(self) -> None:
        leases = self.some_leases()
        for lease in leases:
            if self.shards[lease.shard.shard_no].is_held(lease):
                self.shards[lease.shard.shard_no].state = "ready"
        self.store.release(leases)

    def renew(self) -> None:
        leases = self.some_leases()
        ttl = self.random.choice([FOREVER, GONE])
        held = [lease for lease in leases if self.shards[lease.shard.shard_no].is_held(lease)]
        for lease in held:
            self.shards[lease.shard.shard_no].ran_out = ttl == GONE
        assert self.store.renew(leases, ttl) == {lease.shard for lease in held}

    def cancel_request(self) -> None:
        index = self.random.randrange(REQUESTS)
        shard = self.shards[index // SHARD_SIZE]
        if shard.is_free:
            shard.add({index: "cancelled"})
            shard.close_if_full(raise_fence=True)
        self.store.cancel_request(self.batch_id, index)

    def cancel_batch(self) -> None:
        self.is_cancelled = any(shard.state != "done" for shard in self.shards)
        for shard in self.shards:
            if shard.is_free:
                shard.cancel()
        self.store.cancel_batch(self.batch_id)

    def sweep(self) -> None:
        free = [shard for shard in self.shards if shard.is_free] if self.is_cancelled else []
        assert self.store.sweep_cancelled() == sum(shard.cancel() for shard in free)

    def check(self) -> None:
        counts = self.store.batch(self.batch_id).counts
        statuses = Counter(status for shard in self.shards for status in shard.outcomes.values())
        assert (counts.completed, counts.failed, counts.cancelled) == tuple(
            statuses[status] for status in ("completed", "failed", "cancelled")
        )
        held = sum(
            SHARD_SIZE - len(shard.outcomes) for shard in self.shards if shard.state == "leased" and not shard.ran_out
        )
        assert (counts.running, counts.queued) == (held, REQUESTS - counts.done - held)

    def finish(self) -> None:
        """Whatever happened, the rest can be finished, and then there is one outcome for each request."""
        for shard in self.shards:
            shard.ran_out = True
        self.store.renew(self.leases, GONE)
        for shard, _ in self.store.claimable(100):
            for lease in self.store.claim([shard], "last", FOREVER):
                rest = self.store.pending_requests(lease)
                self.shards[shard.shard_no].add({pending.index: "completed" for pending in rest})
                assert self.store.record([(lease, answer(pending.index)) for pending in rest]).done == [shard]
        self.store.sweep_cancelled()
        if self.is_cancelled:
            for model in self.shards:
                model.add(dict.fromkeys(model.indexes, "cancelled"))
        expected = {index: status for model in self.shards for index, status in model.outcomes.items()}
        assert [stored.state for stored in self.store.results(self.batch_id)] == [expected[i] for i in range(REQUESTS)]
        assert self.store.batch(self.batch_id).status.is_final


def cancelled(index: int) -> Completion:
    return replace(answer(index), status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_exactly_one_outcome(store: Store, seed: int) -> None:
    Simulation(store, seed).run()
