"""The parts of a worker that operators steer, one by one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from batchjobs.errors import ConnectionFailed, UsageError
from batchjobs.store import Orders
from batchjobs.types import Command, CommandKind, Lease, Pause, ShardId
from tests.support.waiting import eventually
from workers.command_words import report, wish
from workers.commands import Commands, Stopping
from workers.control import Control
from workers.gate import Gate
from workers.held import request_id
from workers.holdings import Holdings
from workers.mode import Mode
from workers.returns import Returns
from workers.rq_states import Ending

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
PAUSE = Pause(by="ann@host", at=NOON, reason="a test")
RELEASE = Pause(by="ann@host", at=NOON, release=True)


def lease(batch: str, shard_no: int = 0, version: str | None = None) -> Lease:
    return Lease(ShardId(batch, shard_no), 1, 1, model_version=version)


def names(of: Lease, *indexes: int) -> list[Hashable]:
    return [request_id(of, index) for index in indexes]


class FakeLoop:
    def __init__(self) -> None:
        self.told: list[tuple[str, list[Hashable]]] = []

    def suspend(self, request_ids: Sequence[Hashable]) -> None:
        self.told.append(("suspend", list(request_ids)))

    def resume(self, request_ids: Sequence[Hashable]) -> None:
        self.told.append(("resume", list(request_ids)))

    def cancel(self, request_id: Hashable) -> None:
        self.told.append(("cancel", [request_id]))


class FakeRq:
    is_paused = False
    name = "w1"

    def __init__(self) -> None:
        self.ended: list[tuple[ShardId, Ending]] = []
        self.given_back: list[ShardId] = []

    def end(self, shard: ShardId, ending: Ending) -> None:
        self.ended.append((shard, ending))

    def give_back(self, shards: Sequence[ShardId]) -> None:
        self.given_back += shards


class FakeStore:
    def __init__(self) -> None:
        self.released: list[ShardId] = []
        self.failures = 0
        self.calls: list[tuple[str, str, Any]] = []

    def release(self, leases: Sequence[Lease]) -> None:
        self._fail()
        self.released += [each.shard for each in leases]

    def begin_command(self, command_id: str) -> bool:
        is_first = not any(call[:2] == ("begin", command_id) for call in self.calls)
        self.calls.append(("begin", command_id, None))
        self._fail()
        return is_first

    def end_command(self, command_id: str, *, result: Any = None, error: str | None = None) -> bool:
        self._fail()
        self.calls.append(("end", command_id, error or result))
        return True

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionFailed("the database is away")


class FakeCheckpoints:
    def __init__(self) -> None:
        self.saved: list[Collection[Lease]] = []
        self.forgotten: list[Collection[Lease]] = []
        self.is_away = False

    def save(self, timeout: float, of: Collection[Lease]) -> int:
        if self.is_away:
            raise ConnectionFailed("the database is away")
        self.saved.append(of)
        return 0

    def forget(self, of: Collection[Lease]) -> None:
        self.forgotten.append(of)


class FakeRecorder:
    is_flushed = True

    def flush(self, seconds: float) -> bool:
        return self.is_flushed


class FakeIntake:
    is_clearing = False
    woken = 0

    def wake(self) -> None:
        self.woken += 1


class FakeStandstill:
    is_wanted = False

    def want(self, is_wanted: bool) -> None:
        self.is_wanted = is_wanted


class FakeCommands:
    def __init__(self) -> None:
        self.offered: list[Sequence[Command]] = []

    def offer(self, commands: Sequence[Command]) -> None:
        self.offered.append(commands)


class Parts:
    """Two shards of batch A, with two requests each, and one of batch B, that is not read yet."""

    def __init__(self) -> None:
        self.loop, self.rq, self.store, self.recorder = FakeLoop(), FakeRq(), FakeStore(), FakeRecorder()
        self.checkpoints, self.intake, self.gate = FakeCheckpoints(), FakeIntake(), Gate()
        self.standstill, self.commands, self.mode = FakeStandstill(), FakeCommands(), Mode(lambda: None)
        given: Any = self
        self.holdings = Holdings(given.loop, given.rq, unread_size=2)
        self.leases = [lease("A", 0), lease("A", 1, "v1"), lease("B")]
        for each in self.leases:
            self.holdings.take(each)
        self.holdings.fill(self.leases[0], {0: 1, 1: 2})
        self.holdings.fill(self.leases[1], {2: 1, 3: 1})
        self.returns = Returns(given.store, given.rq, self.holdings, given.recorder, given.checkpoints)
        self.control = Control(
            given.store,
            given.rq,
            self.holdings,
            given.intake,
            self.gate,
            given.standstill,
            self.returns,
            given.commands,
            self.mode,
        )

    def is_open(self) -> bool:
        with self.gate.passing() as is_open:
            return is_open


@pytest.fixture
def parts() -> Parts:
    return Parts()


class TestHoldings:
    def test_what_is_paused_is_not_counted(self, parts: Parts) -> None:
        first, second, third = parts.leases
        assert (parts.holdings.unfinished, parts.holdings.unread, parts.holdings.active) == (7, 2, 3)
        parts.holdings.pause({"A"})
        assert parts.loop.told == [("suspend", names(first, 0, 1) + names(second, 2, 3))]
        assert (parts.holdings.unfinished, parts.holdings.unread, parts.holdings.active) == (2, 2, 1)
        assert parts.holdings.suspended == [first, second]
        assert len(parts.holdings) == 3
        parts.holdings.pause({"B"})
        assert parts.loop.told[1:] == [("resume", names(first, 0, 1) + names(second, 2, 3))]
        assert parts.holdings.unread == 0
        assert parts.holdings.suspended == [third]

    def test_what_is_added_is_suspended_or_not(self, parts: Parts) -> None:
        first, second, third = parts.leases
        parts.holdings.pause({"B"})
        parts.holdings.hold_back([second], but=names(second, 3))
        seen = []
        for each, index in ((first, 0), (second, 2), (second, 3), (third, 0)):
            with parts.holdings.adding(each, index) as is_suspended:
                seen.append(is_suspended)
        assert seen == [False, True, False, True]

    def test_held_back_and_paused_it_goes_on_when_both_are_undone(self, parts: Parts) -> None:
        first = parts.leases[0]
        parts.holdings.pause({"A"})
        parts.holdings.hold_back([first])
        parts.loop.told.clear()
        parts.holdings.let_on([first])
        assert parts.loop.told == []
        parts.holdings.hold_back([first])
        parts.loop.told.clear()
        parts.holdings.pause(set())
        assert parts.loop.told == [("resume", names(parts.leases[1], 2, 3))]
        parts.holdings.let_on([first])
        assert parts.loop.told[1:] == [("resume", names(first, 0, 1))]

    def test_a_shard_of_a_paused_batch_is_not_shared(self, parts: Parts) -> None:
        parts.holdings.lose(parts.leases[2])
        parts.holdings.pause({"A"})
        assert parts.holdings.spare(100) is None

    def test_let_go_it_leaves_the_engine_without_an_outcome(self, parts: Parts) -> None:
        first, _, third = parts.leases
        parts.holdings.finish(first, 0)
        assert parts.holdings.let_go([first, third, lease("gone")]) == {first: 1, third: 0}
        assert parts.loop.told == [("cancel", names(first, 1))]
        assert not parts.holdings.finish(first, 1)

    def test_what_is_read_while_it_is_held_back_gets_no_token_either(self, parts: Parts) -> None:
        third = parts.leases[2]
        parts.holdings.hold_back([third])
        parts.holdings.fill(third, {0: 1})
        with parts.holdings.adding(third, 0) as is_suspended:
            assert is_suspended
        parts.loop.told.clear()
        parts.holdings.let_on([third])
        assert parts.loop.told == [("resume", names(third, 0))]
        with parts.holdings.adding(third, 0) as is_suspended:
            assert is_suspended is False

    def test_what_was_let_go_is_not_added_any_more(self, parts: Parts) -> None:
        first = parts.leases[0]
        parts.holdings.let_go([first])
        with parts.holdings.adding(first, 0) as is_suspended:
            assert is_suspended is None

    def test_what_is_added_in_this_moment_is_in_the_engine_before_it_is_let_go(self, parts: Parts) -> None:
        first = parts.leases[0]
        letting_go = threading.Thread(target=parts.holdings.let_go, args=([first],))
        with parts.holdings.adding(first, 0):
            letting_go.start()
            letting_go.join(0.05)
            assert parts.loop.told == []
        letting_go.join(10)
        assert parts.loop.told == [("cancel", names(first, 0)), ("cancel", names(first, 1))]

    def test_those_for_another_version(self, parts: Parts) -> None:
        assert parts.holdings.for_other_versions("v2") == [parts.leases[1]]
        assert parts.holdings.for_other_versions("v1") == []


class TestReturns:
    def test_stored_then_released_then_told(self, parts: Parts) -> None:
        first, *_ = parts.leases
        assert parts.returns.give_back([first]) == 2
        assert parts.loop.told[0] == ("suspend", names(first, 0, 1)), "nothing is made behind what is stored"
        assert parts.checkpoints.saved == [[first]]
        assert parts.store.released == parts.rq.given_back == [first.shard]
        assert not parts.holdings.has(first)

    @pytest.mark.parametrize("fault", ["checkpoint", "outcomes"])
    def test_what_cannot_be_stored_is_kept_and_goes_on(self, parts: Parts, fault: str) -> None:
        first, *_ = parts.leases
        parts.checkpoints.is_away, parts.recorder.is_flushed = fault == "checkpoint", fault != "outcomes"
        with pytest.raises(ConnectionFailed):
            parts.returns.give_back([first])
        assert parts.holdings.has(first)
        assert parts.loop.told == [("suspend", names(first, 0, 1)), ("resume", names(first, 0, 1))]
        assert parts.store.released == []

    def test_without_their_tokens_nothing_stays_stored(self, parts: Parts) -> None:
        first, *_ = parts.leases
        assert parts.returns.give_back([first], keeps_tokens=False) == 2
        assert (parts.checkpoints.saved, parts.checkpoints.forgotten) == ([], [[first]])

    def test_it_does_not_wait_for_who_reads(self, parts: Parts) -> None:
        first, *_ = parts.leases
        with parts.gate.passing() as is_open:
            assert is_open
            assert parts.returns.give_back([first]) == 2

    def test_what_cannot_be_released_is_released_later(self, parts: Parts) -> None:
        first, *_ = parts.leases
        parts.store.failures = 1
        assert parts.returns.give_back([first]) == 2
        assert parts.rq.ended == [(first.shard, Ending.LOST)]
        assert parts.returns.release([]) == 1
        assert parts.store.released == [first.shard]
        assert parts.returns.release([]) == 0


class TestControl:
    def test_a_pause_shuts_once_and_opens_once(self, parts: Parts) -> None:
        for pause in (PAUSE, PAUSE, Pause(by="bob@host", at=NOON)):
            parts.control.apply(Orders(pause=pause))
            assert (parts.is_open(), parts.standstill.is_wanted, parts.rq.is_paused) == (False, True, True)
        for _ in range(2):
            parts.control.apply(Orders())
            assert (parts.is_open(), parts.standstill.is_wanted, parts.rq.is_paused) == (True, False, False)
        assert parts.intake.woken == 1
        assert parts.mode.state(is_busy=True, is_suspended=False) == "busy"

    def test_a_release_is_tried_again_until_it_is_done(self, parts: Parts) -> None:
        parts.checkpoints.is_away = True
        with pytest.raises(ConnectionFailed):
            parts.control.apply(Orders(pause=RELEASE))
        assert parts.mode.pause == RELEASE
        assert len(parts.holdings) == 3
        parts.checkpoints.is_away = False
        parts.control.apply(Orders(pause=RELEASE))
        assert len(parts.holdings) == 0
        assert parts.rq.given_back == [each.shard for each in parts.leases]

    def test_of_a_paused_batch_only_what_shall_be_released_goes(self, parts: Parts) -> None:
        parts.control.apply(Orders(paused_batches={"A": PAUSE, "B": RELEASE}))
        assert parts.rq.given_back == [parts.leases[2].shard]
        parts.intake.is_clearing = True
        parts.control.apply(Orders(paused_batches={"A": PAUSE}))
        assert len(parts.holdings) == 0, "a shard that is to run alone waits for it"

    def test_commands_are_heard_also_where_a_release_fails(self, parts: Parts) -> None:
        parts.checkpoints.is_away = True
        given = (command("1"),)
        with pytest.raises(ConnectionFailed):
            parts.control.apply(Orders(pause=RELEASE, commands=given))
        assert parts.commands.offered == [given]


def test_while_a_gate_is_shut_nobody_is_inside() -> None:
    gate = Gate()
    inside, leave = threading.Event(), threading.Event()

    def walk() -> None:
        with gate.passing() as is_open:
            assert is_open
            inside.set()
            leave.wait(10)

    walker = threading.Thread(target=walk)
    walker.start()
    inside.wait(10)
    waiting = threading.Thread(target=lambda: gate.shut_within().__enter__())
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "it waits for who is inside"
    leave.set()
    for thread in (walker, waiting):
        thread.join(10)
        assert not thread.is_alive()
    with gate.shut_within(), gate.passing() as is_open:
        assert not is_open


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "busy"),
        ({"pause": PAUSE}, "busy"),  # the step in progress is not over yet
        ({"pause": PAUSE, "stands_still": True}, "paused"),
        ({"pause": PAUSE, "is_draining": True}, "draining"),
        ({"pause": PAUSE, "is_updating": True}, "updating"),
    ],
)
def test_the_word_for_what_it_does(fields: dict[str, Any], state: str) -> None:
    assert Mode(lambda: None, **fields).state(is_busy=True, is_suspended=True) == state
    assert Mode(lambda: None).state(is_busy=False, is_suspended=True) == "suspended"
    assert Mode(lambda: None, pause=PAUSE).state(is_busy=False, is_suspended=False) == "paused"


def command(number: str, kind: CommandKind = CommandKind.UPDATE_MODEL) -> Command:
    return Command(id=number, kind=kind, worker="w1", arguments={}, given_by="ann@host", created_at=NOON)


UPDATED = {"old_model": "a", "old_version": "v1", "new_model": "b", "new_version": "v2", "dry_run": False}


@pytest.mark.parametrize(
    ("kind", "arguments", "sentence"),
    [
        ("drain", {"release": False}, "ann@host drains this worker: what it holds is finished"),
        ("drain", {"release": True}, "ann@host drains this worker: what it holds is given back"),
        (
            "update_model",
            {"model": "b", "revision": None, "inflight": "keep", "dry_run": False},
            "ann@host updates the model to b (--inflight keep)",
        ),
        (
            "update_model",
            {"model": "b\x1b", "revision": "main", "dry_run": True},
            "ann@host tries whether the model could be updated to b\\x1b at revision main (--inflight recompute)",
        ),
    ],
)
def test_a_wish_is_a_sentence(kind: str, arguments: dict[str, Any], sentence: str) -> None:
    assert wish(replace(command("1", CommandKind(kind)), arguments=arguments)) == sentence


@pytest.mark.parametrize(
    ("kind", "result", "sentence"),
    [
        ("drain", {"finished": 1, "given_back": 4}, "drained: 1 request finished, 4 given back"),
        (
            "update_model",
            {**UPDATED, "paused_seconds": 0.25, "recomputed": 8, "kept": 0, "given_back": 1},
            "updated the model: a v1 -> b v2; no token was made for 0.250 s; 8 requests recomputed; "
            "1 request given back",
        ),
        (
            "update_model",
            {**UPDATED, "dry_run": True, "is_reload": True},
            "the model can be updated by a full reload: a v1 -> b v2; nothing was changed",
        ),
    ],
)
def test_a_report_is_a_sentence(kind: str, result: dict[str, Any], sentence: str) -> None:
    assert report(command("1", CommandKind(kind)), result) == sentence


class TestCommands:
    @pytest.fixture
    def store(self) -> FakeStore:
        return FakeStore()

    def commands(self, store: Any, way: Any, ended: list[str] | None = None) -> Commands:
        told = [] if ended is None else ended
        return Commands(store, Stopping(), {CommandKind.UPDATE_MODEL: way}, lambda done: told.append(done.id))

    def test_one_after_the_other_each_once(self, store: FakeStore) -> None:
        ended: list[str] = []
        commands = self.commands(store, lambda done: {"n": done.id}, ended)
        both = [command("1"), command("2")]
        commands.offer(both)
        commands.start()
        eventually(lambda: ended == ["1", "2"], "both are done")
        commands.offer(both)  # as a look saw them that was slower
        assert not commands.is_busy
        commands.stop()
        assert store.calls == [
            ("begin", "1", None),
            ("end", "1", {"n": "1"}),
            ("begin", "2", None),
            ("end", "2", {"n": "2"}),
        ]

    @pytest.mark.parametrize(
        ("error", "told"),
        [(UsageError("no such model"), "no such model"), (KeyError("a bug"), "KeyError: 'a bug'")],
    )
    def test_a_refusal_is_told_and_the_next_one_goes_on(self, store: FakeStore, error: Exception, told: str) -> None:
        def fail(done: Command) -> dict[str, Any]:
            if done.id == "1":
                raise error
            return {}

        commands = self.commands(store, fail)
        commands.offer([command("1"), command("2")])
        commands.start()
        eventually(lambda: len(store.calls) == 4, "both are done")
        commands.stop()
        assert store.calls[1] == ("end", "1", told)
        assert commands.failure is None

    def test_an_answer_that_was_lost_is_asked_for_again(self, store: FakeStore) -> None:
        """The note that it has begun was stored, and the connection broke then."""
        store.failures = 1
        commands = self.commands(store, lambda done: {"done": 1})
        commands.offer([command("1")])
        commands.start()
        eventually(lambda: ("end", "1", {"done": 1}) in store.calls, "it is carried out all the same")
        commands.stop()

    def test_one_that_somebody_ended_is_left_alone(self, store: FakeStore) -> None:
        store.calls.append(("begin", "1", None))
        ended: list[str] = []
        commands = self.commands(store, lambda done: {}, ended)
        commands.offer([command("1"), command("2")])
        commands.start()
        eventually(lambda: ended == ["2"], "the next one is carried out")
        commands.stop()

    def test_one_that_waits_is_interrupted_and_one_that_cannot_be_is_told_by_who_ends_it(
        self, store: FakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("workers.commands.STOP_SECONDS", 0.05)
        going, done = threading.Event(), threading.Event()
        stopping = Stopping()

        def wait(ordered: Command) -> dict[str, Any]:
            going.set()
            if ordered.id == "1":
                stopping.wait(10)
            done.wait(10)
            return {}

        for number in ("1", "2"):
            given: Any = store
            stopping = Stopping()
            commands = Commands(given, stopping, {CommandKind.UPDATE_MODEL: wait}, lambda done: None)
            commands.offer([command(number)])
            commands.start()
            going.wait(10)
            going.clear()
            commands.stop()
            told = [call for call in store.calls if call[:2] == ("end", number)]
            assert "the worker ended before update_model was carried out" in told[0][2]
        done.set()
