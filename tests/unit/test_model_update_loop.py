"""Another model, and suspensions, for an engine in its own thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, SamplingParams
from tests.support.engines import make, prompts
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_engine import request as scripted
from tests.support.updates import fresh, greedy, is_empty, new, old, other_family, request
from tests.support.waiting import eventually
from workers.engine import Engine, EngineLoop, EngineOutput, EngineStopped, UpdateRefused
from workers.engine.runner import Runner

__all__ = ["new", "old", "other_family"]

PROMPT = prompts(1, seed=5)[0]
LENGTH = 24


class Gate:
    """Lets an engine's steps through one by one."""

    def __init__(self, engine: Engine) -> None:
        self.steps = 0
        self._allowed = threading.Semaphore(0)
        self._step, engine.step = engine.step, self.step  # type: ignore[method-assign]
        self.is_open = self.is_awaited = False

    def step(self) -> list[EngineOutput]:
        if not self.is_open:
            self.is_awaited = True
            self._allowed.acquire()
            self.is_awaited = False
        outputs = self._step()
        self.steps += 1
        return outputs

    def allow(self, steps: int) -> None:
        """Returns when they are done."""
        wanted = self.steps + steps
        self._allowed.release(steps)
        eventually(lambda: self.steps >= wanted, "the steps are done")

    def open(self) -> None:
        self.is_open = True
        self._allowed.release()


@pytest.fixture(params=[False, True], ids=["depth 1", "depth 2"])
def engine(old: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make(old, use_async_batching=request.param, max_requests_per_batch=2)
    yield engine
    assert is_empty(engine)
    engine.close()


def test_recompute_between_two_steps(engine: Engine, new: Path) -> None:
    gate = Gate(engine)
    with EngineLoop(engine) as loop, ThreadPoolExecutor() as pool:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        gate.allow(6)
        staged = loop.stage(str(new))
        updating = pool.submit(loop.update_model, staged)
        eventually(lambda: loop.is_updating, "the update is asked for")
        gate.open()
        report = updating.result(30)
        assert not loop.is_updating
        output = loop.result("it", 30)
        loop.add(request("next", PROMPT, greedy(5)))
        assert loop.result("next", 30).token_ids == fresh(new, PROMPT, 5).token_ids
    cut = output.version_spans[1].from_token
    assert (report.recomputed, report.new_version) == (1, engine.model_version)
    assert output.token_ids[cut:] == fresh(new, [*PROMPT, *output.token_ids[:cut]], LENGTH - cut).token_ids


@pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
def test_during_a_pause(engine: Engine, new: Path, policy: str) -> None:
    gate = Gate(engine)
    with EngineLoop(engine) as loop:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        gate.allow(6)
        gate.open()
        with loop.pause(30):
            steps = engine.stats().steps
            loop.update_model(loop.stage(str(new)), policy, 30)
            assert engine.stats().steps == steps
            assert loop.is_paused
        output = loop.result("it", 30)
    assert output.version_spans[-1].version == engine.model_version
    if policy == "restart":
        assert output.token_ids == fresh(new, PROMPT, LENGTH).token_ids


def test_finish_is_refused_during_a_pause(engine: Engine, new: Path, old: Path) -> None:
    with EngineLoop(engine) as loop:
        staged = loop.stage(str(new))
        with loop.pause(30), pytest.raises(UpdateRefused, match="nothing is finished during a pause"):
            loop.update_model(staged, "finish", 30)
        loop.add(request("it", PROMPT, greedy(5)))
        assert loop.result("it", 30).token_ids == fresh(old, PROMPT, 5).token_ids


def test_while_finishing_outcomes_come_and_cancels_are_heard(engine: Engine, old: Path, new: Path) -> None:
    gate, told = Gate(engine), []
    with EngineLoop(engine) as loop, ThreadPoolExecutor() as pool:
        loop.add(request("short", PROMPT, greedy(8)), told.append)
        loop.add(request("long", PROMPT, greedy(200)), told.append)
        gate.allow(3)
        loop.add(request("waiting", PROMPT, greedy(5)))  # two are the most that run
        updating = pool.submit(loop.update_model, loop.stage(str(new)), "finish")
        eventually(lambda: loop.is_updating, "the update is asked for")
        gate.allow(10)
        eventually(lambda: told, "the short one is told of")
        loop.add(request("late", PROMPT, greedy(5)))
        assert not updating.done()
        assert "long" in loop_progress(loop, gate)
        loop.cancel("long")
        gate.open()
        report = updating.result(30)
        outputs = [loop.result(name, 30) for name in ("waiting", "late")]
    assert [(o.request_id, o.finish_reason) for o in told] == [
        ("short", FinishReason.LENGTH),
        ("long", FinishReason.CANCELLED),
    ]
    assert report.finished == 1  # the other one was cancelled
    assert told[0].token_ids == fresh(old, PROMPT, 8).token_ids
    assert {o.token_ids for o in outputs} == {fresh(new, PROMPT, 5).token_ids}


def loop_progress(loop: EngineLoop, gate: Gate) -> dict:
    """It is taken between two steps, so one has to end."""
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(loop.progress, 30)
        eventually(lambda: looking.done() or loop._inbox._looks, "it is asked for")
        gate.allow(1)
        return looking.result(30)


class Stuck:
    """An update with ``finish`` that waits for a suspended answer, beside a request that waits to begin."""

    def __init__(self, engine: Engine, target: Path, timeout: float | None = None) -> None:
        gate, self._is_limited = Gate(engine), timeout is not None
        self.loop, self._pool = EngineLoop(engine), ThreadPoolExecutor()
        self.loop.start()
        self.loop.add(request("it", PROMPT, greedy(LENGTH)))
        gate.allow(3)
        self.updating = self._pool.submit(self.loop.update_model, self.loop.stage(str(target)), "finish", timeout)
        eventually(lambda: self.loop.is_updating, "the update is asked for")
        gate.allow(2)
        self.loop.suspend(["it"])
        self.loop.add(request("waiting", PROMPT, greedy(4)))
        gate.open()
        eventually(lambda: self.loop.stats().suspended, "it is suspended")

    def __enter__(self) -> Stuck:
        self.loop.progress(30)  # since then it was seen that nothing can be done
        assert self._is_limited or not self.updating.done()
        return self

    def __exit__(self, *_: object) -> None:
        stopped = self.loop.stop(30)
        self._pool.shutdown()
        assert stopped


class TestSuspendedMeanwhile:
    """What is waited for is suspended in the middle: whoever did that resumes it, or takes it away."""

    @pytest.mark.parametrize("is_reload", [False, True])
    def test_it_is_taken_away(self, engine: Engine, new: Path, other_family: Path, is_reload: bool) -> None:
        target = other_family if is_reload else new
        with Stuck(engine, target) as stuck:
            if is_reload:
                stuck.loop.cancel("waiting")
            stuck.loop.cancel("it")
            report = stuck.updating.result(30)
            assert stuck.loop.result("it", 30).finish_reason is FinishReason.CANCELLED
            if not is_reload:
                assert stuck.loop.result("waiting", 30).token_ids == fresh(new, PROMPT, 4).token_ids
        assert (report.finished, report.new_version, report.is_reload) == (0, engine.model_version, is_reload)

    def test_it_is_resumed(self, engine: Engine, old: Path, new: Path) -> None:
        with Stuck(engine, new) as stuck:
            stuck.loop.resume(["it"])
            report = stuck.updating.result(30)
            output = stuck.loop.result("it", 30)
            assert stuck.loop.result("waiting", 30).token_ids == fresh(new, PROMPT, 4).token_ids
        assert (report.finished, report.recomputed) == (1, 0)
        assert (output.token_ids, len(output.version_spans)) == (fresh(old, PROMPT, LENGTH).token_ids, 1)

    def test_the_same_name_again_is_another_request(self, engine: Engine, new: Path) -> None:
        with Stuck(engine, new) as stuck:
            again = request("it", PROMPT, greedy(4))
            stuck.loop.register_result_handler("it", lambda _: stuck.loop.add(again))  # before the loop's next turn
            stuck.loop.cancel("it")
            assert stuck.updating.result(30).finished == 0
            assert stuck.loop.result("it", 30).token_ids == fresh(new, PROMPT, 4).token_ids

    def test_nothing_turns_in_circles_meanwhile(self, engine: Engine, new: Path) -> None:
        with Stuck(engine, new) as stuck:
            calls, step = [], engine.step
            engine.step = lambda: calls.append(1) or step()  # type: ignore[method-assign]
            for _ in range(3):
                stuck.loop.progress(30)
            assert calls == []
            stuck.loop.cancel("it")
            stuck.updating.result(30)

    def test_a_time_limit_ends_it(self, engine: Engine, old: Path, new: Path) -> None:
        version = engine.model_version
        with Stuck(engine, new, timeout=1.0) as stuck:
            with pytest.raises(TimeoutError, match=r"waited 1 s for the update"):
                stuck.updating.result(30)
            assert stuck.loop.result("waiting", 30).token_ids == fresh(old, PROMPT, 4).token_ids
            stuck.loop.resume(["it"])
            assert stuck.loop.result("it", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids
        assert engine.model_version == version

    @pytest.mark.parametrize("unfinished", ["drop", "cancel", "finish"])
    def test_a_stop_ends_it(self, engine: Engine, old: Path, new: Path, unfinished: str) -> None:
        version = engine.model_version
        with Stuck(engine, new) as stuck:
            assert stuck.loop.stop(30, unfinished=unfinished)  # type: ignore[arg-type]
            with pytest.raises(EngineStopped, match="the engine loop was stopped"):
                stuck.updating.result(30)
            if unfinished == "finish":
                assert stuck.loop.result("waiting", 0).token_ids == fresh(old, PROMPT, 4).token_ids
        assert engine.model_version == version


def test_what_is_suspended_already_cannot_be_finished(engine: Engine, old: Path, new: Path) -> None:
    gate = Gate(engine)
    with EngineLoop(engine) as loop:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        gate.allow(3)
        loop.suspend(["it"])
        gate.open()
        with pytest.raises(UpdateRefused, match="are suspended"):
            loop.update_model(loop.stage(str(new)), "finish", 30)
        loop.resume(["it"])
        assert loop.result("it", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids


@pytest.mark.parametrize("policy", ["recompute", "keep", "restart", "finish"])
def test_what_ended_is_delivered_before_the_new_weights_are_there(engine: Engine, new: Path, policy: str) -> None:
    """A prompt that is only scored has no span that would say whose weights it was."""
    version, told = engine.model_version, []
    gate = Gate(engine)
    with EngineLoop(engine) as loop, ThreadPoolExecutor() as pool:
        staged = loop.stage(str(new))
        scored = request("it", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
        loop.add(scored, lambda output: told.append((output, engine.model_version)))
        eventually(lambda: gate.is_awaited, "its step is at the gate")
        updating = pool.submit(loop.update_model, staged, policy)
        eventually(lambda: loop.is_updating, "the update is asked for")
        gate.open()  # at depth 2 that step is launched and not collected when the update comes
        new_version = updating.result(30).new_version
        eventually(lambda: told, "it is told of")
    ((output, seen),) = told
    assert (output.version_spans, output.model_version, seen) == ((), version, version)
    assert engine.model_version == new_version != version


@pytest.mark.parametrize("how", ["done", "refused", "smoke", "reloaded", "reload refused", "no such policy"])
def test_no_cycle_keeps_a_staged_model(
    engine: Engine, new: Path, other_family: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its memory is free when the caller lets go of it, and not only when the collector of cycles comes by."""
    is_other = how in ("refused", "reloaded", "reload refused")
    policy = {"no such policy": "hope", "reloaded": "restart", "reload refused": "restart"}.get(how, "recompute")
    is_refused = how not in ("done", "reloaded")

    def update(loop: EngineLoop) -> list[weakref.ref]:
        staged = loop.stage(str(other_family if is_other else new))
        refs = [weakref.ref(each) for each in (staged.loaded.model, *staged.loaded.model.parameters())]
        if how in ("smoke", "reload refused"):
            fail_smoke(monkeypatch)
        if not is_refused:
            loop.update_model(staged, policy, 30)
            return [weakref.ref(staged.loaded.model)]  # the old one, by now
        try:
            loop.update_model(staged, policy, 30)
        except UsageError:
            return refs
        raise AssertionError("it was not refused")

    gc.collect()
    gc.disable()
    try:
        with EngineLoop(engine) as loop:
            refs = update(loop)
            loop.progress(30)  # the loop's thread has done with it
            alive = [type(ref()).__name__ for ref in refs if ref() is not None]
    finally:
        gc.enable()
    assert alive == []


def fail_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old model's smoke prompt is fine, the new one's is not."""
    smoke, calls = Runner.smoke, []

    def broken(runner: Runner, ids: list[int]) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("the device is full")
        return smoke(runner, ids)

    monkeypatch.setattr(Runner, "smoke", broken)


@pytest.mark.parametrize("unfinished", ["drop", "cancel", "finish"])
def test_a_stop_ends_a_waiting_update(engine: Engine, new: Path, old: Path, unfinished: str) -> None:
    gate, version = Gate(engine), engine.model_version
    loop = EngineLoop(engine)
    loop.start()
    with ThreadPoolExecutor() as pool:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        loop.add(request("beside", PROMPT, greedy(LENGTH)))
        gate.allow(3)
        loop.add(request("waiting", PROMPT, greedy(4)))
        updating = pool.submit(loop.update_model, loop.stage(str(new)), "finish")
        eventually(lambda: loop.is_updating, "the update is asked for")
        gate.allow(1)
        stopping = pool.submit(loop.stop, unfinished=unfinished)
        eventually(lambda: loop._inbox.stopping, "the stop is asked for")
        gate.open()
        with pytest.raises(EngineStopped, match="the engine loop was stopped"):
            updating.result(30)
        assert stopping.result(30)
    assert engine.model_version == version
    assert engine.scheduler.admits_unbegun
    if unfinished == "finish":  # those that had not begun too
        assert loop.result("waiting", 0).token_ids == fresh(old, PROMPT, 4).token_ids
    with pytest.raises(EngineStopped):
        loop.update_model(loop.stage(str(new)))


def test_a_time_limit_withdraws_it(engine: Engine, old: Path, new: Path) -> None:
    gate, version = Gate(engine), engine.model_version
    with EngineLoop(engine) as loop, ThreadPoolExecutor() as pool:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        gate.allow(3)
        staged = loop.stage(str(new))
        updating = pool.submit(loop.update_model, staged, "finish", 0.05)
        eventually(lambda: loop._inbox.updates and loop._inbox.updates[0].is_withdrawn, "its time is over")
        gate.open()
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the update"):
            updating.result(30)
        assert not loop.is_updating
        assert loop.result("it", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids
        loop.add(request("later", PROMPT, greedy(4)))
        assert loop.result("later", 30).token_ids == fresh(old, PROMPT, 4).token_ids
    assert engine.model_version == version


def test_a_refusal_leaves_the_loop_running(
    engine: Engine, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_runner: Runner, _ids: list[int]) -> None:
        raise MemoryError("the device is full")

    with EngineLoop(engine) as loop:
        loop.add(request("it", PROMPT, greedy(LENGTH)))
        staged = loop.stage(str(new))
        with monkeypatch.context() as patch:
            smoke, calls = Runner.smoke, []

            def second_fails(runner: Runner, ids: list[int]) -> object:
                calls.append(ids)
                return broken(runner, ids) if len(calls) == 2 else smoke(runner, ids)

            patch.setattr(Runner, "smoke", second_fails)
            with pytest.raises(UpdateRefused, match="the device is full; the old weights are back"):
                loop.update_model(staged, timeout=30)
        assert loop.result("it", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids
        loop.update_model(staged, timeout=30)
        loop.add(request("it", PROMPT, greedy(4)))
        assert loop.result("it", 30).token_ids == fresh(new, PROMPT, 4).token_ids


def test_a_reload_of_an_empty_engine(engine: Engine, other_family: Path) -> None:
    with EngineLoop(engine) as loop:
        loop.add(request("it", PROMPT, greedy(4)))
        staged = loop.stage(str(other_family))
        with pytest.raises(UpdateRefused, match=r"a full reload can \(inflight finish or restart\)"):
            loop.update_model(staged, timeout=30)
        loop.result("it", 30)
        assert loop.update_model(staged, "restart", 30).is_reload
        loop.add(request("it", PROMPT, greedy(8)))
        assert loop.result("it", 30).token_ids == fresh(other_family, PROMPT, 8).token_ids
        stats = loop.stats()
    assert stats.steps >= 12


def test_many_updates_while_many_requests_come(engine: Engine, old: Path, new: Path) -> None:
    with EngineLoop(engine) as loop:
        staged = loop.stage(str(new))
        some = prompts(24, seed=13)
        for index, prompt in enumerate(some):
            loop.add(request(index, prompt, greedy(12)))
            if index % 4 == 3:
                loop.update_model(staged, ("recompute", "keep", "finish", "restart")[index // 4 % 4], 30)
        outputs = [loop.result(index, 60) for index in range(24)]
    versions = {engine.model_version, staged.version}
    for prompt, output in zip(some, outputs, strict=True):
        assert len(output.token_ids) == 12
        assert {span.version for span in output.version_spans} <= versions
        if len(output.version_spans) == 1:
            folder = old if output.version_spans[0].version == engine.model_version else new
            assert output.token_ids == fresh(folder, prompt, 12).token_ids
    assert engine.model_name == old.name  # six times


def test_a_handler_cannot_wait_for_one(engine: Engine, new: Path) -> None:
    caught: list[BaseException] = []
    with EngineLoop(engine) as loop:
        staged = loop.stage(str(new))

        def handler(_: EngineOutput) -> None:
            try:
                loop.update_model(staged)
            except RuntimeError as error:
                caught.append(error)

        loop.add(request("it", PROMPT, greedy(3)), handler)
        eventually(lambda: caught, "the handler was called")
        eventually(lambda: not loop.is_updating, "what it asked for is withdrawn")
    assert "a handler runs in the engine's thread" in str(caught[0])


class TestSuspension:
    def test_suspended_ones_wait_and_go_on(self, engine: Engine, old: Path) -> None:
        gate = Gate(engine)
        with EngineLoop(engine) as loop:
            loop.add(request("it", PROMPT, greedy(LENGTH)))
            loop.add(request("other", PROMPT, greedy(LENGTH)))
            gate.allow(5)
            loop.suspend(["it", "unknown"])
            gate.open()
            assert loop.result("other", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids
            (part,) = loop.progress(30)["it"]
            assert len(part.token_ids) < 8
            loop.resume(["it"])
            assert loop.result("it", 30).token_ids == fresh(old, PROMPT, LENGTH).token_ids

    def test_no_step_is_made_when_everything_is_suspended(self) -> None:
        engine = ScriptedEngine()
        with EngineLoop(engine) as loop:  # type: ignore[arg-type]
            loop.add(scripted("a", 10**6))
            eventually(lambda: engine.steps > 3, "it runs")
            loop.suspend(["a"])
            eventually(lambda: engine.stats().suspended, "it is suspended")
            loop.progress(30)
            steps = engine.steps
            loop.add(scripted("b", 3))
            loop.result("b", 30)
            assert steps < engine.steps <= steps + 6
            assert len(loop.progress(30)["a"][0].token_ids) <= steps
            loop.cancel("a")
            assert loop.result("a", 30).finish_reason is FinishReason.CANCELLED

    def test_a_stop_that_finishes_drops_them(self) -> None:
        """They were not cancelled by anybody: another engine can go on with them."""
        engine, told, lost = ScriptedEngine(), [], []
        with EngineLoop(engine) as loop:  # type: ignore[arg-type]
            loop.add(scripted("a", 10**9), told.append, lost.append)
            loop.suspend(["a"])
            loop.add(scripted("b", 3), told.append)
        assert [output.request_id for output in told] == ["b"]
        assert [type(reason) for reason in lost] == [EngineStopped]
        assert engine.requests == set()

    def test_changes_keep_their_order(self, engine: Engine, old: Path) -> None:
        with EngineLoop(engine) as loop:
            with loop.pause(30):
                loop.add(request("a", PROMPT, greedy(5)))
                loop.suspend(["a"])
                loop.resume(["a"])
                loop.add(request("b", PROMPT, greedy(5)))
                loop.resume(["b"])
                loop.suspend(["b"])
            assert loop.result("a", 30).token_ids == fresh(old, PROMPT, 5).token_ids
            assert loop.stats().suspended == 1
            loop.resume(["b"])
            loop.result("b", 30)
