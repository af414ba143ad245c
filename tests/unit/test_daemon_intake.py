"""How much a worker takes, and from whom it takes nothing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.errors import ConnectionFailed
from batchjobs.types import Endpoint, Lease, Pause, Priority, Request, ShardId
from tests.support.stub_engine import StubEngine
from workers.engine.requests import EngineStats
from workers.gate import Gate
from workers.holdings import Holdings
from workers.intake import Intake
from workers.mode import Mode
from workers.outcomes import Outcomes
from workers.queue_view import QueueView
from workers.reader import encode
from workers.recorder import MAX_BACKLOG
from workers.returns import Returns
from workers.serving import Serving
from workers.upkeep import UPDATE_SECONDS, Upkeep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchjobs.store import WorkerFigures


def shard(number: int) -> ShardId:
    return ShardId("B", number)


class FakeLoop:
    is_updating = False

    def __init__(self) -> None:
        self.engine = StubEngine()
        self.engine.model_name = "m"
        self.running = self.waiting = self.steps = self.generated = 0
        self.ticked_at = time.monotonic()
        self.added: list[Any] = []

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=self.waiting,
            kv_usage_ratio=0.0,
            prompt_tokens=0,
            generated_tokens=self.generated,
            preemptions=0,
            steps=self.steps,
            ticked_at=self.ticked_at,
        )

    def add(self, request: Any, on_finish: Any) -> None:
        self.added.append(request)

    def cancel(self, request_id: Any) -> None:
        pass

    def suspend(self, request_ids: Any) -> None:
        pass

    def resume(self, request_ids: Any) -> None:
        pass


class FakeRq:
    name = "w1"
    is_suspended = False

    def __init__(self) -> None:
        self.queued: list[ShardId] = []
        self.idle_others = 0
        self.is_away = False
        self.started: list[ShardId] = []
        self.dropped: list[ShardId] = []
        self.given_back: list[ShardId] = []
        self.adopted: list[ShardId] = []
        self.pops: list[int] = []
        self.ended: list[ShardId] = []

    def look(self) -> QueueView:
        if self.is_away:
            raise ConnectionFailed("Redis is away")
        return QueueView(depths=(0, len(self.queued), 0), idle_others=self.idle_others, suspended=False)

    def pop(self, count: int, view: QueueView) -> list[ShardId]:
        self.pops.append(count)
        taken, self.queued = self.queued[:count], self.queued[count:]
        return taken

    def start(self, shards: Iterable[ShardId]) -> None:
        self.started += shards

    def drop(self, shards: Iterable[ShardId]) -> None:
        self.dropped += shards

    def put_back(self, shards: Iterable[ShardId], *, at_front: bool = True) -> None:
        self.queued = [*shards, *self.queued] if at_front else [*self.queued, *shards]

    def give_back(self, shards: Iterable[ShardId]) -> None:
        self.given_back += shards

    def adopt(self, shards: Iterable[tuple[ShardId, Priority]]) -> None:
        self.adopted += [each for each, _ in shards]

    def end(self, shard: ShardId, ending: Any) -> None:
        self.ended.append(shard)


class FakeStore:
    """Gives away every shard but the refused ones; each has ``size`` requests."""

    def __init__(self) -> None:
        self.size = 8
        self.n = 1
        self.refused: set[ShardId] = set()
        self.foreign: set[ShardId] = set()  # of batches that ask for another model
        self.ready: list[ShardId] = []
        self.alone: set[ShardId] = set()  # took their workers down before
        self.released: list[ShardId] = []
        self.refuses_release = False
        self.is_away = False
        self.beats: list[WorkerFigures] = []
        self.renewed = 0

    def claim(
        self, shards: Sequence[ShardId], worker: str, ttl_seconds: float, models: frozenset[str], version: str
    ) -> list[Lease]:
        assert (models, version) == ({"m"}, "stub-1")
        if self.is_away:
            raise ConnectionFailed("the database is away")
        return [Lease(each, 1, 1, each in self.alone) for each in shards if each not in self.refused | self.foreign]

    def for_other_models(self, shards: set[ShardId], models: frozenset[str], version: str) -> set[ShardId]:
        return shards & self.foreign

    def claimable(self, limit: int, *, models: frozenset[str], version: str) -> list[tuple[ShardId, Priority]]:
        return [(each, Priority.DEFAULT) for each in self.ready[:limit]]

    def pending_requests(self, lease: Lease) -> list[Request]:
        return [
            Request(
                index=i,
                custom_id=str(i),
                endpoint=Endpoint.COMPLETIONS,
                body={"prompt": "p", "max_tokens": 1, "n": self.n},
            )
            for i in range(self.size)
        ]

    def checkpoints(self, lease: Lease, model_version: str) -> dict[int, Any]:
        return {}

    def release(self, leases: Sequence[Lease]) -> None:
        if self.refuses_release:
            raise ConnectionFailed("the database is away")
        self.released += [lease.shard for lease in leases]

    def beat(self, name: str, figures: WorkerFigures) -> bool:
        self.beats.append(figures)
        return True

    def renew(self, leases: Sequence[Lease], ttl_seconds: float) -> set[ShardId]:
        self.renewed += 1
        return {lease.shard for lease in leases}


class FakeRecorder:
    backlog = 0

    def flush(self, seconds: float) -> bool:
        return not self.backlog

    def put(self, lease: Lease, completion: Any) -> None:
        pass


class Parts:
    """An intake whose passes the test makes itself, for an engine of 64 requests and shards of 8."""

    def __init__(self) -> None:
        self.loop, self.rq, self.store, self.recorder = FakeLoop(), FakeRq(), FakeStore(), FakeRecorder()
        self.holdings = Holdings(self.loop, self.rq, unread_size=8)  # type: ignore[arg-type]
        self.mode, self.gate = Mode(lambda: None), Gate()
        self.intake = self.make_intake(max_requests=64)

    def make_intake(self, max_requests: int) -> Intake:
        store: Any = self.store
        rq: Any = self.rq
        loop: Any = self.loop
        recorder: Any = self.recorder
        serving = Serving(loop.engine)
        return Intake(
            store,
            rq,
            loop,
            self.holdings,
            recorder,
            Outcomes("w1", serving),
            serving,
            self.gate,
            Returns(store, rq, self.holdings, recorder, None),
            lease_seconds=15,
            shard_size=8,
            max_requests=max_requests,
        )

    def settle(self) -> None:
        """Passes until there is nothing more to do."""
        while self.intake._pass() == 0.0:
            self.loop.running = min(64, self.holdings.unfinished)
            self.loop.waiting = len(self.loop.added) - self.loop.running


@pytest.fixture
def parts() -> Parts:
    return Parts()


def finish(parts: Parts, count: int) -> None:
    """The oldest ones get their outcomes, and the engine begins as many others."""
    held = [(lease, index) for lease, index in parts.holdings.held_requests().values()]
    for lease, index in held[:count]:
        assert parts.holdings.finish(lease, index)
    parts.loop.waiting -= count


def test_it_takes_enough_to_run_and_half_as_much_again(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(100)]
    parts.settle()
    assert parts.holdings.unfinished == 64 + 32
    assert parts.rq.started == [shard(n) for n in range(12)]
    assert len(parts.loop.added) == 96


def test_where_answers_end_at_once_it_takes_a_moments_work_and_several_shards_together(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(1000)]
    parts.intake._pace = SimpleNamespace(per_second=lambda: 1600.0)  # type: ignore[assignment]
    parts.settle()
    assert parts.holdings.unfinished == 400, "a quarter of a second's"
    parts.rq.pops.clear()
    for _ in range(17):
        finish(parts, 8)
        parts.intake._pass()
    assert parts.rq.pops == [], "beside what runs half of it is left"
    finish(parts, 8)
    parts.intake._pass()
    assert parts.rq.pops == [26]


def test_however_fast_it_takes_no_more_than_may_wait_for_the_database(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(1000)]
    parts.intake._pace = SimpleNamespace(per_second=lambda: 1e6)  # type: ignore[assignment]
    parts.settle()
    assert parts.holdings.unfinished == MAX_BACKLOG // 2


def test_it_wakes_up_when_something_may_be_missing_and_not_before(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(100)]
    parts.settle()
    parts.intake._woken.clear()
    parts.intake.count_ended(1)
    assert parts.intake._woken.is_set(), "32 waited, as many as shall"

    parts.intake._ahead = 20
    parts.intake._woken.clear()
    parts.intake._pass()
    parts.intake.count_ended(12)
    assert not parts.intake._woken.is_set()
    parts.intake.count_ended(1)
    assert parts.intake._woken.is_set(), "one less than 20 wait now"

    parts.loop.running = 60  # it may begin four more at any time
    parts.intake._pass()
    parts.intake._woken.clear()
    parts.intake.count_ended(13)
    assert parts.intake._woken.is_set()


def test_requests_of_several_choices_are_that_much_more_work(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(100)]
    parts.store.n = 4
    parts.intake._choices_a_shard = 32.0
    parts.settle()
    assert parts.holdings.unfinished == 64 + 32
    assert len(parts.loop.added) == 24


def test_choices_that_have_ended_do_not_count_as_waiting(parts: Parts) -> None:
    """With one long choice left of each request, the engine must not run empty."""
    parts.store.n = 8
    parts.intake._choices_a_shard = 64.0
    parts.rq.queued = [shard(n) for n in range(100)]
    parts.settle()
    assert len(parts.loop.added) == 16
    parts.loop.running, parts.loop.waiting = 16, 0
    assert parts.intake._shortage() == 0, "the engine may not have seen the last ones yet"
    parts.loop.steps = 2
    assert parts.intake._shortage() == 1


def test_a_small_engine_has_sixteen_in_waiting(parts: Parts) -> None:
    small = parts.make_intake(max_requests=4)
    assert small._shortage() == 2


def test_beside_an_idle_worker_it_takes_an_equal_part(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(6)]
    parts.rq.idle_others = 2
    assert parts.intake._pass() == 0.0
    assert parts.rq.pops == [2]


def test_a_starving_worker_takes_one_however_many_are_idle(parts: Parts) -> None:
    parts.rq.queued = [shard(0)]
    parts.rq.idle_others = 9
    assert parts.intake._pass() == 0.0
    assert parts.rq.started == [shard(0)]


def test_one_that_runs_full_leaves_the_last_shard_to_an_idle_worker(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(9)]
    parts.settle()
    parts.loop.running, parts.loop.waiting = 64, 8
    parts.rq.queued, parts.rq.idle_others = [shard(50)], 1
    parts.intake.wake()
    parts.settle()
    assert parts.rq.queued == [shard(50)]


def test_refused_shards_are_dropped_faster_and_faster(parts: Parts) -> None:  # a large batch was cancelled
    parts.rq.queued = [shard(n) for n in range(1000)]
    parts.store.refused = set(parts.rq.queued[:990])
    parts.settle()
    assert parts.rq.dropped == [shard(n) for n in range(990)]
    assert len(parts.rq.pops) < 20
    assert parts.rq.started == [shard(n) for n in range(990, 1000)]


def test_a_surplus_that_came_along_is_given_back_in_order(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(40)]
    parts.intake._claims._probe = 32
    assert parts.intake._pass() == 0.0
    assert parts.rq.started == [shard(n) for n in range(4)]
    assert parts.store.released == [shard(n) for n in range(4, 32)]
    assert parts.rq.queued == [shard(n) for n in range(4, 40)]


def test_without_the_database_popped_shards_go_back(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(3)]
    parts.store.is_away = True
    assert parts.intake._pass() > 0
    assert parts.rq.queued == [shard(n) for n in range(3)]
    assert len(parts.holdings) == 0


def test_without_redis_it_takes_work_from_sql(parts: Parts) -> None:
    parts.store.ready = [shard(n) for n in range(3)]
    parts.rq.is_away = True
    assert parts.intake._pass() == 0.0
    assert sorted(parts.rq.adopted, key=lambda each: each.shard_no) == parts.store.ready
    assert len(parts.holdings) == 3


def test_with_too_many_outcomes_unstored_it_takes_nothing(parts: Parts) -> None:
    parts.rq.queued = [shard(0)]
    parts.recorder.backlog = 5000
    parts.settle()
    assert parts.rq.queued == [shard(0)]


def test_what_was_not_begun_goes_to_an_idle_worker_when_the_queue_is_empty(parts: Parts) -> None:
    parts.rq.queued = [shard(n) for n in range(9)]
    parts.settle()
    parts.loop.running, parts.loop.waiting, parts.rq.idle_others = 64, 8, 1
    parts.intake._share_at = 0.0
    parts.intake.wake()
    parts.settle()
    assert parts.rq.given_back == parts.store.released == [shard(8)]
    assert parts.holdings.unfinished == 64


def test_a_shard_that_is_given_back_is_not_read_on(parts: Parts) -> None:
    parts.rq.queued = [shard(0)]
    read: list[Any] = []

    def compile_format(response_format: Any) -> None:
        read.append(response_format)
        if len(read) == 4:  # an order that another thread obeys in the middle of it
            assert parts.intake._returns.give_back(parts.holdings.leases) == 8

    parts.loop.engine.compile_format = compile_format  # type: ignore[method-assign]
    parts.settle()
    assert len(read) == 4
    assert len(parts.loop.added) == 3
    assert parts.rq.given_back == parts.store.released == [shard(0)]
    assert len(parts.holdings) == 0


@pytest.mark.parametrize("is_away", [False, True])
def test_redis_knows_of_a_shard_before_anybody_can_give_it_back(parts: Parts, is_away: bool) -> None:
    parts.rq.queued = parts.store.ready = [shard(0)]
    parts.rq.is_away = is_away
    known: list[Sequence[ShardId]] = []
    take = parts.holdings.take
    parts.holdings.take = lambda lease: known.append(parts.rq.started + parts.rq.adopted) or take(lease)  # type: ignore[method-assign,func-returns-value]
    parts.intake._pass()
    assert known == [[shard(0)]]


def test_chats_and_prompts_are_encoded_each_in_its_way() -> None:
    engine: Any = StubEngine()
    chat = Request(
        index=0,
        custom_id="c",
        endpoint=Endpoint.CHAT,
        body={"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}},
    )
    text = Request(index=1, custom_id="t", endpoint=Endpoint.COMPLETIONS, body={"prompt": "hi"})
    ids = Request(index=2, custom_id="i", endpoint=Endpoint.COMPLETIONS, body={"prompt": [5, 6]})
    assert encode(engine, chat) == encode(engine, text) == (104, 105)
    assert encode(engine, ids) == (5, 6)


class TestUpkeep:
    @pytest.fixture
    def upkeep(self, parts: Parts) -> Upkeep:
        return Upkeep(
            parts.store,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            parts.rq,  # type: ignore[arg-type]
            parts.loop,  # type: ignore[arg-type]
            parts.holdings,
            parts.mode,
            lease_seconds=15,
            heartbeat_seconds=3,
            stall_seconds=60,
        )

    def test_a_heartbeat_carries_figures_and_renews(self, parts: Parts, upkeep: Upkeep) -> None:
        parts.holdings.take(Lease(shard(0), 1, 1))
        parts.loop.running = 3
        upkeep.keep_leases()
        (figures,) = parts.store.beats
        assert (figures.state, figures.running, figures.waiting) == ("busy", 3, 5)
        assert parts.store.renewed == 1

    def test_heartbeats_stop_while_the_engine_hangs(
        self, parts: Parts, upkeep: Upkeep, caplog: pytest.LogCaptureFixture
    ) -> None:
        parts.holdings.take(Lease(shard(0), 1, 1))
        parts.loop.running, parts.loop.ticked_at = 3, time.monotonic() - 61
        upkeep.keep_leases()
        upkeep.keep_leases()
        upkeep.keep_rq()  # the stub would raise: it has no flush
        assert parts.store.beats == []
        assert parts.store.renewed == 0
        assert caplog.text.count("the engine has not moved for 61 s") == 1
        parts.loop.ticked_at = time.monotonic()
        upkeep.keep_leases()
        assert parts.store.renewed == 1

    def test_an_update_may_take_longer_and_not_for_ever(self, parts: Parts, upkeep: Upkeep) -> None:
        parts.holdings.take(Lease(shard(0), 1, 1))
        parts.loop.running, parts.loop.is_updating = 3, True
        for silent, beats in ((UPDATE_SECONDS - 1, 1), (UPDATE_SECONDS + 1, 1)):
            parts.loop.ticked_at = time.monotonic() - silent
            upkeep.keep_leases()
            assert len(parts.store.beats) == beats

    def test_while_it_stands_still_it_has_no_speed(self, parts: Parts, upkeep: Upkeep) -> None:
        parts.holdings.take(Lease(shard(0), 1, 1))
        parts.mode.pause, parts.mode.stands_still = Pause(by="ann@host", at=datetime(2030, 1, 1, tzinfo=UTC)), True
        parts.loop.generated = 500  # since the last heartbeat, before the pause
        upkeep.keep_leases()
        assert [(each.state, each.tokens_per_second, each.generated_tokens) for each in parts.store.beats] == [
            ("paused", 0.0, 500)
        ]

    def test_an_idle_engine_may_be_silent(self, parts: Parts, upkeep: Upkeep) -> None:
        parts.loop.ticked_at = time.monotonic() - 1000
        upkeep.keep_leases()
        assert [figures.state for figures in parts.store.beats] == ["idle"]


def test_shards_for_other_models_go_to_the_end_of_the_queue_and_are_kept() -> None:
    parts = Parts()
    parts.rq.queued = [shard(n) for n in range(4)]
    parts.store.foreign = {shard(0), shard(1), shard(3)}
    parts.settle()
    assert parts.rq.started == [shard(2)]
    assert sorted(s.shard_no for s in parts.rq.queued) == [0, 1, 3]
    assert parts.rq.dropped == []


class TestAlone:
    """A shard that took its workers down before."""

    def test_it_waits_until_the_rest_is_finished(self, parts: Parts) -> None:
        parts.rq.queued = [shard(0), shard(1)]
        parts.settle()
        parts.store.alone = {shard(2)}
        parts.rq.queued = [shard(n) for n in range(2, 20)]
        self.look(parts)
        assert [lease.shard for lease in parts.holdings.leases] == [shard(0), shard(1)]
        assert parts.rq.queued[0] == shard(2)
        assert shard(2) in parts.store.released, "held, it would be blamed for what others do"
        parts.holdings.done(shard(0))
        self.look(parts)
        assert [lease.shard for lease in parts.holdings.leases] == [shard(1)], "nothing is claimed meanwhile"
        parts.holdings.done(shard(1))
        self.look(parts)
        assert [lease.shard for lease in parts.holdings.leases] == [shard(2)], "and nothing beside it"
        parts.holdings.done(shard(2))
        self.look(parts)
        assert len(parts.holdings) == 12

    def test_several_run_one_by_one(self, parts: Parts) -> None:
        parts.rq.queued = [shard(n) for n in range(5)]
        parts.store.alone = {shard(n) for n in range(5)}
        ran = []
        for _ in range(5):
            self.look(parts)
            (lease,) = parts.holdings.leases
            ran.append(lease.shard)
            parts.holdings.done(lease.shard)
        assert ran == [shard(n) for n in range(5)]

    def test_without_redis_too(self, parts: Parts) -> None:
        parts.rq.is_away = True
        parts.store.ready = [shard(n) for n in range(12)]
        parts.store.alone = set(parts.store.ready)
        parts.intake._pass()
        assert len(parts.holdings) == 1
        assert len(parts.rq.adopted) == 1
        assert len(parts.store.released) == 3
        assert parts.rq.adopted[0] not in parts.store.released

    def look(self, parts: Parts) -> None:
        parts.loop.waiting = 0
        parts.intake._claims._empty_until = 0.0
        parts.settle()


def test_what_it_holds_is_not_claimed_a_second_time(parts: Parts) -> None:
    """Its lease ran out while the database was away, and somebody queued it again: it goes on when that is renewed."""
    parts.rq.queued = [shard(0)]
    parts.settle()
    (lease,) = parts.holdings.leases
    parts.rq.queued = [shard(0), shard(1)]
    parts.intake._claims._empty_until = 0.0
    parts.settle()
    assert [each.shard for each in parts.holdings.leases] == [shard(0), shard(1)]
    assert parts.holdings.has(lease)
    assert parts.rq.dropped == [shard(0)]
    parts.rq.is_away, parts.store.ready = True, [shard(0), shard(1), shard(2)]
    parts.intake._claims._empty_until = 0.0
    parts.intake._pass()
    assert parts.rq.adopted == [shard(2)]


class TestReleaseFails:
    """The database goes away between a claim and the release of what is not wanted."""

    def test_of_a_surplus(self, parts: Parts) -> None:
        parts.intake._claims._probe = 4
        parts.loop.waiting = parts.loop.running = 0
        parts.rq.queued = [shard(n) for n in range(4)]
        parts.intake._ahead = 8  # one shard is wanted
        parts.store.refuses_release = True
        parts.intake._pass()
        assert parts.rq.started == [shard(0)], "what is kept is shown as started all the same"
        assert parts.rq.dropped == [shard(1), shard(2), shard(3)]
        assert parts.store.released == []
        parts.store.refuses_release = False
        parts.intake._pass()
        assert parts.store.released == [shard(1), shard(2), shard(3)], "an attempt that was none does not count"

    def test_of_what_was_to_be_shared(self, parts: Parts) -> None:
        parts.rq.queued = [shard(n) for n in range(12)]
        parts.settle()
        parts.loop.steps, parts.rq.idle_others = 5, 1
        parts.store.refuses_release = True
        parts.intake._share_at = 0.0
        parts.settle()
        (given_up,) = parts.rq.ended
        assert parts.rq.given_back == []
        parts.store.refuses_release = False
        parts.intake._pass()
        assert parts.store.released == [given_up]
