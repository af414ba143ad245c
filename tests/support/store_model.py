"""What the store shall do, in a few lines: shards, leases, crashes and outcomes of a batch, without a database."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from batchjobs.store.leases import FAIL_AT, SPLIT_AT
from batchjobs.types import Completion, FinishReason, Priority, RequestStatus, ShardId
from tests.support.batches import answer, failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WAYS = ("failed", "answered", "half failed", "cancelled")
COUNTED = {"answered": "completed", "failed": "failed", "half failed": "failed", "cancelled": "cancelled"}


@dataclass
class Shard:
    indexes: tuple[int, ...]
    state: str = "ready"
    fence: int = 0
    attempts: int = 0
    forgiven: int = 0
    ran_out: bool = False
    pin: str | None = None

    @property
    def is_free(self) -> bool:
        return self.state == "ready" or (self.state == "leased" and self.ran_out)

    @property
    def crashed_too_often(self) -> bool:
        return self.attempts - self.forgiven >= (SPLIT_AT if len(self.indexes) > 1 else FAIL_AT)


@dataclass
class Batch:
    """``outcomes`` has the way in which a request ended, its tokens and its attempt; ``begun`` tokens and fence of its
    checkpoint; ``past`` how often it was run again."""

    shards: dict[int, Shard]
    outcomes: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)
    past: Counter[int] = field(default_factory=Counter)
    is_cancelled: bool = False
    is_paused: bool = False

    @property
    def indexes(self) -> list[int]:
        return sorted(index for shard in self.shards.values() for index in shard.indexes)

    @property
    def has_ended(self) -> bool:
        return all(shard.state == "done" for shard in self.shards.values())

    def shard_of(self, index: int) -> Shard:
        [shard] = [shard for shard in self.shards.values() if index in shard.indexes]
        return shard

    def pending(self, shard: Shard) -> list[int]:
        return [index for index in shard.indexes if index not in self.outcomes]

    def end(self, shard: Shard, index: int, way: str, tokens: int, attempt: int, *, raise_fence: bool = False) -> None:
        if index in self.outcomes:
            return
        self.outcomes[index] = (way, tokens, attempt)
        self.begun.pop(index, None)
        if not self.pending(shard):
            shard.state = "done"
            shard.fence += raise_fence

    def end_by_store(self, shard: Shard, way: str, indexes: list[int]) -> int:
        """What there was of the answers is kept."""
        for index in indexes:
            tokens, _ = self.begun.get(index, (0, 0))
            self.end(shard, index, way, tokens, shard.attempts, raise_fence=True)
        return len(indexes)

    def pause(self) -> bool:
        is_new = not (self.is_paused or self.is_cancelled or self.has_ended)
        self.is_paused |= is_new
        return is_new

    def resume(self) -> bool:
        was_paused, self.is_paused = self.is_paused, False
        return was_paused

    def cancel(self) -> None:
        if not self.has_ended:
            self.is_cancelled, self.is_paused = True, False
        self.cancel_free()

    def cancel_free(self) -> int:
        free = [shard for shard in self.shards.values() if shard.is_free]
        return sum(self.end_by_store(shard, "cancelled", self.pending(shard)) for shard in free)

    def isolate(self) -> Counter[str]:
        done: Counter[str] = Counter()
        for number in sorted(self.shards):
            shard = self.shards[number]
            if self.is_cancelled or not (shard.is_free and shard.crashed_too_often):
                continue
            if len(shard.indexes) == 1:
                done["failed"] += self.end_by_store(shard, "failed", self.pending(shard))
                continue
            done["split"] += 1
            for place, index in enumerate(shard.indexes, start=max(self.shards) + 1):
                state = "done" if index in self.outcomes else "ready"
                self.shards[place] = replace(shard, indexes=(index,), state=state)
            del self.shards[number]
        return done

    def retry(self) -> int:
        again = 0
        for shard in self.shards.values():
            failed = [i for i in shard.indexes if i in self.outcomes and COUNTED[self.outcomes[i][0]] == "failed"]
            if not failed or (shard.state == "leased" and not shard.ran_out):
                continue
            for index in failed:
                _, _, attempt = self.outcomes.pop(index)
                self.past[index] += 1
                shard.attempts = max(shard.attempts, attempt)
            again += len(failed)
            shard.state, shard.fence, shard.forgiven = "ready", shard.fence + 1, shard.attempts
        return again


class Queue:
    """Redis as far as reconciling needs it."""

    def __init__(self) -> None:
        self.entries: set[ShardId] = set()

    @contextmanager
    def reconciling(self) -> Iterator[bool]:
        yield True

    def tidy(self) -> None:
        pass

    def unstrand(self) -> None:
        pass

    def depths(self) -> dict[Priority, int]:
        return {Priority.DEFAULT: len(self.entries)}

    def missing(
        self, page: Iterable[tuple[ShardId, Priority]], *, among_first: int | None = None
    ) -> list[tuple[ShardId, Priority]]:
        return [each for each in page if each[0] not in self.entries]

    def enqueue(self, page: Iterable[tuple[ShardId, Priority]], *, at_front: bool = False) -> int:
        new = {shard for shard, _ in page} - self.entries
        self.entries |= new
        return len(new)


def made(way: str, index: int, tokens: int, attempt: int) -> list[Completion]:
    done = replace(answer(index, tokens=tokens), attempt=attempt)
    if way == "failed":
        return [replace(failure(index), attempt=attempt)]
    if way == "half failed":
        return [done, replace(failure(index), choice=1, attempt=attempt)]
    if way == "cancelled":
        return [replace(done, status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED)]
    return [done]
