"""What is written of unfinished answers, and when."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from batchjobs.errors import ConnectionFailed
from batchjobs.types import Lease, Progress, ShardId
from tests.support.stub_engine import StubEngine
from workers import checkpointer
from workers.checkpointer import Checkpointer
from workers.engine.outbox import EngineStopped
from workers.held import request_id
from workers.holdings import Holdings

LEASES = [Lease(ShardId("B", number), 1, 1) for number in range(2)]


def progress(tokens: int, choice: int = 0) -> Progress:
    return Progress(
        choice=choice,
        token_ids=tuple(range(tokens)),
        tokens=("t",) * tokens,
        logprobs=(-0.5,) * tokens,
        token_times=(0.1,) * tokens,
        started_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


class FakeLoop:
    def __init__(self) -> None:
        self.engine = StubEngine()
        self.now: dict[Hashable, tuple[Progress, ...]] = {}
        self.failure: Exception | None = None
        self.cancelled: list[Hashable] = []

    def progress(self, timeout: float | None = None) -> dict[Hashable, tuple[Progress, ...]]:
        if self.failure is not None:
            raise self.failure
        return dict(self.now)

    def cancel(self, name: Hashable) -> None:
        self.cancelled.append(name)


class FakeRq:
    def end(self, shard: ShardId, ending: Any) -> None:
        pass


class FakeStore:
    def __init__(self) -> None:
        self.versions: list[str] = []
        self.calls: list[list[tuple[int, int]]] = []
        """(index, tokens) of each record of each call."""
        self.stale: set[ShardId] = set()
        self.is_away = False

    def save_checkpoints(
        self, records: Sequence[tuple[Lease, int, tuple[Progress, ...]]], model_version: str
    ) -> list[ShardId]:
        self.versions.append(model_version)
        if self.is_away:
            raise ConnectionFailed("the database is away")
        self.calls.append([(index, sum(len(c.token_ids) for c in choices)) for _, index, choices in records])
        return sorted({lease.shard for lease, _, _ in records} & self.stale, key=str)


class Parts:
    """Two shards are held, with requests 0 and 1, and 2 and 3."""

    def __init__(self) -> None:
        self.loop, self.store = FakeLoop(), FakeStore()
        self.holdings = Holdings(self.loop, FakeRq(), unread_size=2)  # type: ignore[arg-type]
        for number, lease in enumerate(LEASES):
            self.holdings.take(lease)
            self.holdings.fill(lease, {2 * number: 1, 2 * number + 1: 1})
        self.checkpointer = Checkpointer(self.store, self.loop, self.holdings)  # type: ignore[arg-type]

    def grow(self, index: int, *tokens: int) -> None:
        parts = tuple(progress(count, choice) for choice, count in enumerate(tokens))
        self.loop.now[request_id(LEASES[index // 2], index)] = parts


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_only_what_has_grown_is_written_again(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 3, 4)
    assert parts.checkpointer.save() == 2
    parts.grow(2, 3, 5)
    assert parts.checkpointer.save() == 1
    assert parts.checkpointer.save() == 0
    assert parts.store.calls == [[(0, 5), (2, 7)], [(2, 8)]]


def test_what_is_not_held_any_more_is_not_written(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(1, 5)
    parts.grow(2, 5)
    parts.holdings.finish(LEASES[0], 1)
    parts.holdings.lose(LEASES[1])
    assert parts.checkpointer.save() == 1
    assert parts.store.calls == [[(0, 5)]]


def test_a_stale_lease_is_let_go(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 5)
    parts.store.stale = {LEASES[1].shard}
    assert parts.checkpointer.save() == 1
    assert parts.holdings.leases == [LEASES[0]]
    assert parts.loop.cancelled == [request_id(LEASES[1], 2), request_id(LEASES[1], 3)]


def test_after_an_outage_all_of_it_is_written(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.store.is_away = True
    with pytest.raises(ConnectionFailed):
        parts.checkpointer.save()
    parts.store.is_away = False
    assert parts.checkpointer.save() == 1
    assert parts.store.calls == [[(0, 5)]]


@pytest.mark.parametrize("failure", [EngineStopped("it ended"), TimeoutError("a long step")])
def test_an_engine_that_cannot_be_asked_is_asked_later(failure: Exception, parts: Parts) -> None:
    parts.grow(0, 5)
    parts.loop.failure = failure
    assert parts.checkpointer.save(1) == 0
    parts.loop.failure = None
    assert parts.checkpointer.save(1) == 1


def test_many_tokens_go_in_several_transactions(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "MAX_TOKENS_AT_ONCE", 10)
    for index, tokens in enumerate((4, 6, 1, 20)):
        parts.grow(index, tokens)
    assert parts.checkpointer.save() == 4
    assert parts.store.calls == [[(0, 4), (1, 6)], [(2, 1)], [(3, 20)]]


def test_only_requests_of_some_leases(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 3)
    assert parts.checkpointer.save(of=[LEASES[1]]) == 1
    assert parts.checkpointer.save() == 1
    assert parts.checkpointer.save() == 0
    assert parts.store.calls == [[(2, 3)], [(0, 5)]]


def test_after_an_update_all_of_it_is_written_under_the_new_version(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 3)
    assert parts.checkpointer.save() == 2
    parts.loop.engine.model_version = "stub-2"
    parts.grow(0, 1)  # begun anew
    assert parts.checkpointer.save() == 2
    assert parts.store.calls == [[(0, 5), (2, 3)], [(0, 1), (2, 3)]]
    assert parts.store.versions == ["stub-1", "stub-2"]


def test_of_answers_that_began_anew_nothing_old_stays_stored(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 3)
    assert parts.checkpointer.save() == 2
    parts.loop.engine.model_version = "stub-2"
    parts.loop.now.clear()
    parts.grow(2, 1)
    parts.checkpointer.save(begun_anew=True)
    assert parts.store.calls[1:] == [[(0, 0), (1, 0), (2, 1), (3, 0)]]
    parts.grow(0, 1)
    assert parts.checkpointer.save() == 1


def test_what_is_forgotten_is_written_again_when_it_goes_on(parts: Parts) -> None:
    parts.grow(0, 5)
    parts.grow(2, 3)
    assert parts.checkpointer.save() == 2
    parts.checkpointer.forget([LEASES[0]])
    assert parts.store.calls[1:] == [[(0, 0), (1, 0)]]
    assert parts.checkpointer.save() == 1
    assert parts.store.calls[2:] == [[(0, 5)]]


def test_an_update_in_the_middle_of_a_look_makes_it_look_again(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.grow(0, 5)
    look = parts.loop.progress

    def updated_meanwhile(timeout: float | None = None) -> dict[Hashable, tuple[Progress, ...]]:
        seen = look(timeout)
        if parts.loop.engine.model_version == "stub-1":
            parts.loop.engine.model_version = "stub-2"
            parts.grow(0, 2)
        return seen

    monkeypatch.setattr(parts.loop, "progress", updated_meanwhile)
    assert parts.checkpointer.save() == 1
    assert (parts.store.calls, parts.store.versions) == ([[(0, 2)]], ["stub-2"])
