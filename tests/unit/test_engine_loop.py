"""The engine in the background: its life and end, pauses, the queue's limit, and a death that says why."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from batchjobs.types import FinishReason
from tests.support.cases import case
from tests.support.models import save_model
from tests.support.scripted_engine import ScriptedConfig, ScriptedEngine, request
from tests.support.waiting import eventually
from workers.engine import Engine, EngineConfig, EngineLoop, EngineOutput, EngineRequest, EngineStopped, SamplingParams
from workers.engine.loop import EngineFull

WAIT = 60.0
Outcomes = queue.Queue[EngineOutput]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(gated=True)


@pytest.fixture
def loop(engine: ScriptedEngine) -> Iterator[EngineLoop]:
    """Around an engine whose steps wait for the test."""
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    loop.start()
    yield loop
    engine.allow(1000)
    assert loop.stop(WAIT)


@pytest.fixture
def real(folder: Path) -> Iterator[EngineLoop]:
    """Around a tiny model."""
    loop = EngineLoop(Engine(str(folder), EngineConfig(device="cpu", num_blocks=500, max_requests_per_batch=8)))
    loop.start()
    yield loop
    loop.stop(WAIT)


def real_request(name: object, tokens: int = 10) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, (5, 6, 7), sampling)  # type: ignore[arg-type]


class TestWithAModel:
    def test_every_request_of_every_thread_gets_one_outcome(self, real: EngineLoop) -> None:
        outcomes = Outcomes()

        def add(thread: int) -> None:
            for number in range(10):
                real.add(real_request((thread, number)), outcomes.put)

        threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        found = {outcomes.get(timeout=WAIT).request_id for _ in range(40)}
        assert found == {(thread, number) for thread in range(4) for number in range(10)}
        assert outcomes.empty()
        assert real.stats().generated_tokens == 400
        assert real.stats().ticked_at > 0

    def test_cancel_gives_the_tokens_so_far(self, real: EngineLoop) -> None:
        outcomes = Outcomes()
        real.add(real_request("long", 200), outcomes.put)
        real.cancel("long")
        output = outcomes.get(timeout=WAIT)
        assert (output.finish_reason, output.error) == (FinishReason.CANCELLED, None)
        assert len(output.token_ids) < 200
        real.cancel("long")  # too late: nothing happens
        real.add(real_request("next"), outcomes.put)
        assert outcomes.get(timeout=WAIT).request_id == "next"

    @case("A-eng-10")
    def test_a_model_that_raises_in_the_middle_leaves_nobody_waiting(
        self, real: EngineLoop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Five requests in flight, the third step raises."""
        forward, calls = real.engine.runner.forward, []

        def fail_at_the_third(*args: object, **kwargs: object) -> object:
            calls.append(args)
            if len(calls) == 3:
                raise MemoryError("the device is full")
            return forward(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(real.engine.runner, "forward", fail_at_the_third)
        outcomes, lost = Outcomes(), queue.Queue[EngineStopped]()
        with ThreadPoolExecutor(4) as pool, real.pause():
            real.add_requests([real_request(name, 50) for name in range(3)])
            real.add(real_request("handled", 50), outcomes.put, lost.put)
            real.add(EngineRequest("streamed", (5, 6, 7), real_request(0, 50).sampling, stream=True))
            waiting = [pool.submit(real.result, 0, WAIT), pool.submit(lambda: list(real.results(WAIT)))]
            reading = pool.submit(lambda: list(real.stream("streamed", WAIT)))
        began = time.monotonic()
        for failed in (*waiting, reading):
            error = failed.exception(timeout=WAIT)
            assert isinstance(error, EngineStopped)
            assert isinstance(error.__cause__, MemoryError)
        assert isinstance(lost.get(timeout=WAIT).__cause__, MemoryError)
        assert time.monotonic() - began < 5
        assert outcomes.empty(), "the engine failed, not the request"
        assert isinstance(real.failure, MemoryError)
        assert len(calls) == 3

    def test_a_new_loop_goes_on_with_the_engine(self, real: EngineLoop) -> None:
        """What transformers calls to keep the manager for the next session: the engine and its cache stay."""
        real.add(real_request("first"))
        answer = real.result("first", WAIT)
        real.add(real_request("dropped", 200))
        assert real.stop(WAIT)
        assert not real.engine.has_work
        with EngineLoop(real.engine) as again:
            again.add(real_request("first"))
            again.add(real_request("dropped"))
        assert again.result("first").token_ids == answer.token_ids
        assert again.result("dropped").token_ids == answer.token_ids


class TestLife:
    def test_only_the_loops_thread_touches_the_engine(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.gated = False
        loop.add(request("a", 50))
        with loop.pause():
            loop.cancel("a")
            loop.result("a", WAIT)
        loop.add(request("b"))
        loop.result("b", WAIT)
        loop.stop(WAIT)
        assert loop._thread is not None
        assert engine.threads == {loop._thread.ident}

    def test_before_the_start_nothing_is_accepted(self) -> None:
        loop = EngineLoop(ScriptedEngine())  # type: ignore[arg-type]
        assert not loop.is_running
        with pytest.raises(EngineStopped, match="is not running"):
            loop.add(request("early"))
        with pytest.raises(EngineStopped, match="is not running"), loop.pause():
            pass
        assert loop.join()

    def test_a_loop_runs_once(self, loop: EngineLoop) -> None:
        with pytest.raises(RuntimeError, match="a new EngineLoop around the same engine"):
            loop.start()
        assert loop.stop(WAIT)
        with pytest.raises(RuntimeError, match="a new EngineLoop around the same engine"):
            loop.start()

    def test_warmup_is_for_before_the_start(self) -> None:
        engine = ScriptedEngine()
        loop = EngineLoop(engine)  # type: ignore[arg-type]
        loop.warmup()
        assert engine.warmed == 1
        with loop, pytest.raises(RuntimeError, match="before the start"):
            loop.warmup()
        assert engine.warmed == 1

    def test_as_a_context_manager_it_finishes_everything(self) -> None:
        with EngineLoop(ScriptedEngine()) as loop:  # type: ignore[arg-type]
            loop.add_requests(request(name, 20) for name in range(5))
        assert not loop.is_running
        assert [len(output.token_ids) for output in loop.results()] == [20] * 5

    def test_as_a_context_manager_it_cancels_after_an_error(self) -> None:
        engine = ScriptedEngine(gated=True)
        outcomes = Outcomes()
        with contextlib.suppress(ZeroDivisionError), EngineLoop(engine) as loop:  # type: ignore[arg-type]
            loop.add(request("a", 20), outcomes.put)
            engine.allow(3)
            raise ZeroDivisionError
        assert outcomes.get(timeout=WAIT).finish_reason is FinishReason.CANCELLED

    def test_the_same_id_is_refused_until_its_outcome_was_taken(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("same"))
        with pytest.raises(ValueError, match="is in the engine already"):
            loop.add(request("same"), lambda output: None)
        engine.allow(4)
        eventually(lambda: "same" in loop._outbox._kept, "the request has ended")
        with pytest.raises(ValueError, match="has an outcome that nobody took yet"):
            loop.add(request("same"))
        loop.result("same", WAIT)
        loop.add(request("same"))


class TestStop:
    def test_drop_ends_after_the_step_and_calls_no_handler(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes, lost = Outcomes(), queue.Queue[EngineStopped]()
        loop.add(request("short", 1), outcomes.put, lost.put)
        loop.add(request("long", 9), outcomes.put, lost.put)
        loop.add(request("kept", 9))
        engine.await_step()
        assert not loop.stop(0.01), "the step is not over"
        with pytest.raises(EngineStopped, match="was stopped"):
            loop.add(request("late"))
        engine.allow()
        assert loop.join(WAIT)
        assert outcomes.get(timeout=WAIT).request_id == "short", "it ended with the step in progress"
        assert outcomes.empty()
        assert lost.get(timeout=WAIT).__cause__ is None
        assert lost.empty()
        with pytest.raises(EngineStopped):
            loop.result("kept")
        assert engine.requests == set()

    def test_cancel_gives_each_its_partial_output(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add(request("handled", 9), outcomes.put)
        loop.add(request("kept", 9))
        engine.allow(3)
        engine.await_step()
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(loop.stop, WAIT, unfinished="cancel")
            eventually(lambda: loop._inbox.stopping, "the stop was asked for")
            loop.cancel("kept")
            engine.allow()
            assert stopped.result(WAIT)
        for output in (outcomes.get(timeout=WAIT), loop.result("kept")):
            assert (output.finish_reason, output.token_ids) == (FinishReason.CANCELLED, (1, 2, 3, 4))

    def test_cancel_tells_those_who_were_never_begun(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a"))
        engine.await_step()
        loop.add(request("b"))
        engine.allow()
        loop.stop(WAIT, unfinished="cancel")
        assert loop.result("b").finish_reason is FinishReason.CANCELLED
        assert loop.result("a").token_ids == (1,)

    def test_finish_accepts_nothing_more_and_finishes_everything(
        self, engine: ScriptedEngine, loop: EngineLoop
    ) -> None:
        loop.add_requests([request("a", 5), request("b", 7)])
        engine.await_step()
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(loop.stop, WAIT, unfinished="finish")
            eventually(lambda: loop._inbox.stopping, "the stop was asked for")
            with pytest.raises(EngineStopped, match="was stopped"):
                loop.add(request("late"))
            assert loop.is_running
            engine.allow(8)
            assert stopped.result(WAIT)
        assert {output.request_id: len(output.token_ids) for output in loop.results()} == {"a": 5, "b": 7}

    def test_finish_becomes_cancel_when_the_time_is_over(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.gated = False
        loop.add(request("endless", 10**9))
        assert loop.stop(0.05, unfinished="finish")
        assert loop.result("endless").finish_reason is FinishReason.CANCELLED

    def test_a_stop_is_never_slowed_down_by_another(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("long", 10**9))
        engine.await_step()
        assert not loop.stop(0)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(loop.stop, WAIT, unfinished="finish")
            engine.allow()
            assert stopped.result(WAIT)
        with pytest.raises(EngineStopped):
            loop.result("long")

    def test_from_a_handler_it_ends_when_the_handler_has_returned(
        self, engine: ScriptedEngine, loop: EngineLoop
    ) -> None:
        ended = queue.Queue[bool]()
        loop.add(request("a", 1), lambda output: ended.put(loop.stop()))
        engine.allow(5)
        assert ended.get(timeout=WAIT) is False
        assert loop.join(WAIT)
        assert not loop.is_running

    def test_a_loop_that_was_never_started_is_stopped_at_once(self) -> None:
        loop = EngineLoop(ScriptedEngine())  # type: ignore[arg-type]
        assert loop.stop()
        with pytest.raises(RuntimeError):
            loop.start()

    def test_there_are_three_ways(self, loop: EngineLoop) -> None:
        with pytest.raises(ValueError, match="finish, cancel, drop"):
            loop.stop(unfinished="hard")  # type: ignore[arg-type]
        assert loop.is_running


class TestPause:
    def test_no_token_is_made_and_everything_keeps_its_place(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 4))
        engine.await_step()
        entering = threading.Event()

        def hold() -> tuple[int, int]:
            entering.set()
            with loop.pause(WAIT):
                engine.allow(100)
                before = engine.steps
                loop.add(request("b", 2))
                eventually(lambda: "b" in engine.requests, "an add during the pause is taken")
                return before, engine.steps

        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hold)
            entering.wait(WAIT)
            eventually(lambda: loop._inbox.holders, "the pause was asked for")
            assert not loop.is_paused, "the step in progress is waited for"
            engine.allow()
            assert held.result(WAIT) == (1, 1)
        assert engine.settled == 1
        assert loop.result("a", WAIT).token_ids == (1, 2, 3, 4)
        assert loop.result("b", WAIT).token_ids == (1, 2)

    def test_what_the_step_in_flight_finished_is_delivered(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add(request("a", 1), outcomes.put)
        engine.await_step()
        engine.allow()  # the token of this step is known at the next one, or when the engine is settled
        with loop.pause(WAIT):
            assert outcomes.get(timeout=WAIT).token_ids == (1,)
            assert engine.steps == engine.settled == 1

    def test_a_cancel_during_a_pause_delivers_at_once(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 9))
        engine.allow(3)
        engine.await_step()
        engine.allow()
        with loop.pause(WAIT):
            loop.cancel("a")
            loop.add(request("b", 9))
            loop.cancel("b")
            assert loop.result("a", WAIT).finish_reason is FinishReason.CANCELLED
            assert loop.result("b", WAIT).token_ids == ()
            assert loop.is_paused

    def test_it_is_nested_and_shared(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        """Several holders, also one after the other without a gap: it goes on when the last one has left."""
        engine.gated = False
        leave, entered = threading.Event(), threading.Barrier(3)

        def hold() -> None:
            with loop.pause(WAIT):
                entered.wait(WAIT)
                leave.wait(WAIT)

        with ThreadPoolExecutor(2) as pool:
            with loop.pause(WAIT):
                with loop.pause(WAIT):
                    assert loop.is_paused
                holders = [pool.submit(hold) for _ in range(2)]
                entered.wait(WAIT)
                loop.add(request("a"))
            assert loop.is_paused
            with pytest.raises(TimeoutError):
                loop.result("a", 0.05)
            assert engine.steps == 0
            leave.set()
            for holder in holders:
                holder.result(WAIT)
        assert loop.result("a", WAIT).token_ids == (1, 2, 3)
        assert not loop.is_paused
        assert engine.settled == 1

    def test_many_pauses_and_many_requests(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.gated = False
        inside = []

        def pause_often() -> None:
            for _ in range(50):
                with loop.pause(WAIT):
                    before = engine.steps
                    inside.append(engine.steps - before)

        with ThreadPoolExecutor(4) as pool:
            pauses = [pool.submit(pause_often) for _ in range(3)]
            names = loop.add_requests(request(name, 40) for name in range(100))
            for pause in pauses:
                pause.result(WAIT)
        assert [len(loop.result(name, WAIT).token_ids) for name in names] == [40] * 100
        assert inside == [0] * 150

    def test_the_time_to_wait_for_the_step_is_limited(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a"))
        engine.await_step()
        with pytest.raises(TimeoutError, match="for a pause"), loop.pause(0.01):
            pass
        engine.allow(10)
        assert loop.result("a", WAIT).token_ids == (1, 2, 3), "the pause that was given up holds nothing"

    def test_a_loop_that_dies_before_it_stands_still(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.fail_at = 1
        loop.add(request("a"), lambda output: None)
        engine.await_step()
        with ThreadPoolExecutor(1) as pool:
            pausing = pool.submit(loop.pause(WAIT).__enter__)
            eventually(lambda: loop._inbox.holders, "the pause was asked for")
            engine.allow()
            error = pausing.exception(WAIT)
        assert isinstance(error, EngineStopped)
        assert error.__cause__ is engine.failure
        with pytest.raises(EngineStopped, match="the device is full"), loop.pause():
            pass

    def test_a_stopped_loop_cannot_be_paused(self, loop: EngineLoop) -> None:
        loop.stop(WAIT)
        with pytest.raises(EngineStopped, match="was stopped"), loop.pause():
            pass

    def test_from_a_handler_it_is_refused_and_the_loop_goes_on(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        errors = queue.Queue[Exception]()

        def pause(output: EngineOutput) -> None:
            try:
                with loop.pause():
                    pass
            except RuntimeError as error:
                errors.put(error)

        engine.gated = False
        loop.add(request("a"), pause)
        assert "a handler runs in the engine's thread" in str(errors.get(timeout=WAIT))
        loop.add(request("b"))
        assert loop.result("b", WAIT).token_ids == (1, 2, 3)

    def test_a_stop_during_a_pause(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.gated = False
        with loop.pause(WAIT):
            loop.add(request("a", 9))
            with pytest.raises(RuntimeError, match="leave it before this stop"):
                loop.stop(unfinished="finish")
            assert loop.is_running
            assert loop.stop(WAIT, unfinished="cancel")
            assert not loop.is_paused
        assert loop.result("a").finish_reason is FinishReason.CANCELLED
        assert engine.steps == 0

    def test_the_loop_shows_that_it_lives_while_it_stands(self, loop: EngineLoop) -> None:
        """Whoever watches ``ticked_at`` does not take a pause for an engine that hangs."""
        with loop.pause(WAIT):
            ticked_at = loop.stats().ticked_at
            eventually(lambda: loop.stats().ticked_at > ticked_at, "the loop ticks during a pause")


class TestProgress:
    def tokens(self, loop: EngineLoop, timeout: float = WAIT) -> dict[Hashable, list[tuple[int, ...]]]:
        return {name: [part.token_ids for part in parts] for name, parts in loop.progress(timeout).items()}

    def test_it_is_taken_between_two_steps(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        """By the loop's thread, of what is collected by then."""
        loop.add_requests([request("a", 9), request("b", 9, n=2)])
        engine.await_step()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self.tokens, loop) for _ in range(4)]
            eventually(lambda: len(loop._inbox._looks) == 4, "all have asked")
            assert not any(look.done() for look in asked), "a step is in progress"
            engine.allow()
            assert [look.result(WAIT) for look in asked] == [{}] * 4, "the step's tokens are not known yet"
            engine.await_step()
            engine.allow()
            assert self.tokens(loop) == {"a": [(1,)], "b": [(1,), (1,)]}
        assert threading.get_ident() not in engine.threads
        assert len(engine.threads) == 1

    def test_within_a_pause_it_has_every_token(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        """What a worker does before it gives its work away: pause, look, stop. Nothing is made after the look."""
        finished = Outcomes()
        loop.add(request("short", 2), finished.put)
        loop.add(request("long", 9))
        engine.allow(2)
        engine.await_step()
        loop.add(request("unbegun"))
        with ThreadPoolExecutor(1) as pool:
            allowing = pool.submit(lambda: (eventually(lambda: loop._inbox.holders, "a pause"), engine.allow()))
            with loop.pause(WAIT):
                allowing.result(WAIT)
                assert self.tokens(loop) == {"long": [(1, 2, 3)]}
                with loop.pause(WAIT):
                    assert self.tokens(loop) == {"long": [(1, 2, 3)]}
                assert finished.get(timeout=WAIT).token_ids == (1, 2)
                assert loop.stop(WAIT, unfinished="drop")
        assert engine.steps == 3

    def test_the_time_to_wait_for_the_step_is_limited(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 9))
        engine.await_step()
        with pytest.raises(TimeoutError, match=r"0\.01 s for the progress"):
            loop.progress(0.01)
        engine.allow(2)
        engine.await_step()
        engine.allow()
        assert self.tokens(loop)["a"] in ([(1,)], [(1, 2)])

    def test_a_stopped_loop_has_none(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        with pytest.raises(EngineStopped, match="is not running"):
            EngineLoop(engine).progress()  # type: ignore[arg-type]
        loop.add(request("a", 9))
        engine.await_step()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(loop.progress, WAIT)
            eventually(lambda: loop._inbox._looks, "somebody asks")
            assert not loop.stop(0)
            engine.allow()
            assert isinstance(asked.exception(WAIT), EngineStopped)
        assert loop.join(WAIT)
        with pytest.raises(EngineStopped, match="was stopped"):
            loop.progress()

    def test_a_loop_that_dies_leaves_nobody_waiting(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.fail_at = 1
        loop.add(request("a"))
        engine.await_step()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(loop.progress)
            eventually(lambda: loop._inbox._looks, "somebody asks")
            engine.allow()
            error = asked.exception(WAIT)
        assert isinstance(error, EngineStopped)
        assert isinstance(error.__cause__, MemoryError)

    def test_from_a_handler_it_is_refused_and_the_loop_goes_on(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        errors = queue.Queue[Exception]()

        def look(output: EngineOutput) -> None:
            try:
                loop.progress()
            except RuntimeError as error:
                errors.put(error)

        engine.gated = False
        loop.add(request("a"), look)
        assert "a handler runs in the engine's thread" in str(errors.get(timeout=WAIT))
        loop.add(request("b"))
        assert loop.result("b", WAIT).token_ids == (1, 2, 3)

    def test_another_loop_goes_on_behind_it(self, real: EngineLoop, folder: Path) -> None:
        """Nothing is lost and nothing twice between a look and a stop."""
        asked = real_request("it", 200)
        real.add(asked)
        eventually(lambda: real.progress(WAIT), "it has a token")
        with real.pause(WAIT):
            (begun,) = real.progress(WAIT).values()
            real.stop(WAIT)
        with EngineLoop(real.engine) as alone:
            alone.add(asked)
        expected = alone.result("it")
        with EngineLoop(Engine(str(folder), EngineConfig(device="cpu", num_blocks=500))) as second:
            second.add(replace(asked, begun=begun))
        output = second.result("it")
        assert (output.token_ids, output.started_at) == (expected.token_ids, begun[0].started_at)
        assert second.stats().generated_tokens == 200 - len(begun[0].token_ids) < 200


class TestLimit:
    @pytest.fixture
    def engine(self) -> ScriptedEngine:
        return ScriptedEngine(config=ScriptedConfig(max_queue_size=2), gated=True, max_running=1)

    def test_a_full_queue_refuses(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        """Requests wait in the loop or in the engine; what runs does not count."""
        loop.add(request("a", 2))
        engine.await_step()
        engine.allow()
        engine.await_step()
        loop.add_requests([request("b"), request("c")])
        with pytest.raises(EngineFull, match="2 requests wait already"):
            loop.add(request("d"))
        engine.allow(4)
        engine.await_step()  # "a" is done, "b" runs
        loop.add(request("d"))
        with pytest.raises(EngineFull):
            loop.add(request("e"), wait=0.01)

    def test_a_caller_can_wait_for_room(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.gated = False
        names = loop.add_requests((request(name) for name in range(200)), wait=None)
        assert [loop.result(name, WAIT).token_ids for name in names] == [(1, 2, 3)] * 200

    def test_one_who_waits_for_room_learns_of_a_stop(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        with loop.pause(WAIT), ThreadPoolExecutor(1) as pool:
            loop.add_requests([request("a"), request("b")])
            adding = pool.submit(loop.add, request("c"), wait=None)
            loop.stop(0)
            assert isinstance(adding.exception(WAIT), EngineStopped)

    def test_a_cancelled_one_makes_room_during_a_pause(self, loop: EngineLoop) -> None:
        with loop.pause(WAIT):
            loop.add_requests([request("a"), request("b")])
            loop.cancel("b")
            loop.add(request("c"), wait=WAIT)

    def test_a_handler_never_waits_for_room(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        refused = queue.Queue[Exception]()

        def add_more(output: EngineOutput) -> None:
            try:
                for name in "xyz":
                    loop.add(request(name), wait=None)
            except EngineFull as error:
                refused.put(error)

        engine.gated = False
        loop.add(request("a"), add_more)
        assert "max_queue_size" in str(refused.get(timeout=WAIT))


class TestDeath:
    def test_everybody_learns_at_once_and_why(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.fail_at = 3
        outcomes, lost = Outcomes(), queue.Queue[EngineStopped]()
        with ThreadPoolExecutor(8) as pool:
            loop.add(request("short", 1))
            loop.add_requests([request("b", 9), request("s", 9, stream=True)])
            loop.add(request("handled", 9), outcomes.put, lost.put)
            loop.add(request("listened", 9))
            loop.register_result_handler("listened", outcomes.put, lost.put)
            pending = [
                pool.submit(loop.result, "b", WAIT),
                pool.submit(lambda: [output.request_id for output in loop.results(WAIT)]),
                pool.submit(lambda: list(loop.stream("s", WAIT))),
            ]
            engine.allow(3)
            for each in pending:
                error = each.exception(WAIT)
                assert isinstance(error, EngineStopped)
                assert error.__cause__ is engine.failure
                assert str(error) == "the engine died: MemoryError: the device is full"
        told = [lost.get(timeout=WAIT) for _ in range(2)]
        assert [error.__cause__ for error in told] == [engine.failure] * 2
        assert outcomes.empty(), "no handler hears of an outcome that is none"
        assert loop.failure is engine.failure
        assert not loop.is_running
        with pytest.raises(EngineStopped) as stopped:
            loop.add(request("late"))
        assert stopped.value.__cause__ is engine.failure
        with pytest.raises(EngineStopped, match="the device is full"):
            loop.register_result_handler("b", outcomes.put)

    def test_what_was_finished_before_can_still_be_taken(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.fail_at = 3
        loop.add_requests([request("short", 1), request("long", 9)])
        engine.allow(3)
        assert loop.join(WAIT)
        assert loop.result("short").token_ids == (1,)
        with pytest.raises(EngineStopped):
            loop.result("long")

    def test_a_handler_that_raises_concerns_itself_only(
        self, engine: ScriptedEngine, loop: EngineLoop, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.gated = False
        outcomes = Outcomes()
        with caplog.at_level(logging.ERROR, "batchjobs.engine"):
            loop.add(request("bad"), lambda output: 1 / 0)  # type: ignore[arg-type, return-value]
            loop.add(request("good"), outcomes.put)
            assert outcomes.get(timeout=WAIT).request_id == "good"
        (record,) = caplog.records
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError
        assert loop.is_running

    def test_a_failure_while_ending_is_kept_too(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        def fail() -> list[EngineOutput]:
            raise OSError("the device is gone")

        loop.add(request("a", 9))
        engine.await_step()
        engine.settle = fail  # type: ignore[method-assign]
        engine.allow()
        assert loop.stop(WAIT, unfinished="cancel")
        assert isinstance(loop.failure, OSError)
        with pytest.raises(EngineStopped, match="the device is gone"):
            loop.result("a")
