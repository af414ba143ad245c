"""Requests that stand still while others go on: they keep what they have while there is room, and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjobs.types import FinishReason, SamplingParams
from tests.support.engines import make, prompts
from tests.support.updates import fresh, greedy, is_empty, made, request, run, step_until
from workers.engine import Engine, EngineOutput

DEPTHS = pytest.mark.parametrize("is_async", [False, True])
POLICIES = pytest.mark.parametrize("scheduler_type", ["fifo", "prefix", "longest_first"])
LENGTH = 16


def add(engine: Engine, some: list[list[int]], length: int = LENGTH, **options: object) -> None:
    for index, prompt in enumerate(some):
        engine.add(request(index, prompt, greedy(length), **options))


def check(outputs: dict, folder: Path, some: list[list[int]], length: int = LENGTH) -> None:
    for index, prompt in enumerate(some):
        assert outputs[index].token_ids == fresh(folder, prompt, length).token_ids, index


@DEPTHS
@POLICIES
def test_without_pressure_nothing_is_computed_again(llama: Path, scheduler_type: str, is_async: bool) -> None:
    engine, some = make(llama, scheduler_type=scheduler_type, use_async_batching=is_async), prompts(4)
    add(engine, some)
    step_until(engine, lambda: made(engine, 1) == 5)
    engine.suspend([0, 1])
    counts = [made(engine, 0), made(engine, 1)]
    held = [list(engine._requests[name][0].pages[0]) for name in (0, 1)]
    assert (engine.stats().running, engine.stats().waiting, engine.stats().suspended) == (2, 0, 2)
    outputs = run(engine)
    assert outputs.keys() == {2, 3}
    assert [made(engine, 0), made(engine, 1)] == counts
    assert [engine._requests[name][0].pages[0] for name in (0, 1)] == held
    assert set(engine.progress()) == {0, 1}
    engine.resume([0, 1, "unknown"])
    engine.resume([0])
    outputs |= run(engine)
    check(outputs, llama, some)
    stats = engine.stats()
    assert (stats.recomputed_tokens, stats.preemptions, stats.offloaded_sequences) == (0, 0, 0)
    assert is_empty(engine)
    engine.close()


@DEPTHS
@POLICIES
@pytest.mark.parametrize("space", [0, 1.0])
@pytest.mark.parametrize(("num_blocks", "slots"), [(26, 8), (200, 2)])
def test_they_give_way_first(
    llama: Path, scheduler_type: str, is_async: bool, space: float, num_blocks: int, slots: int
) -> None:
    """Few pages, or few slots: whoever is not suspended gets them, and nobody waits for ever."""
    engine = make(
        llama,
        num_blocks=num_blocks,
        max_requests_per_batch=slots,
        scheduler_type=scheduler_type,
        use_async_batching=is_async,
        cpu_offload_space=space,
    )
    engine.scheduler.expected_answer_share = 0.0
    some = [prompt[:20] for prompt in prompts(7, seed=8)]
    add(engine, some[:2])
    step_until(engine, lambda: made(engine, 0) > 3 and made(engine, 1) > 3)
    engine.suspend([0, 1])
    for index in range(2, 7):
        engine.add(request(index, some[index], greedy(LENGTH)))
    outputs = run(engine)
    assert outputs.keys() == {2, 3, 4, 5, 6}
    assert engine.stats().suspended == 2
    assert engine.stats().preemptions > 0
    if space:
        assert engine.stats().offloaded_sequences > 0
    engine.resume([1, 0])
    outputs |= run(engine)
    check(outputs, llama, some)
    if space:
        assert engine.stats().recomputed_tokens == 0 or num_blocks < 200
    assert is_empty(engine)
    engine.close()


@DEPTHS
@pytest.mark.parametrize("which", [0, 1])
def test_one_that_grows_gets_the_room(llama: Path, is_async: bool, which: int) -> None:
    """Nobody waits; the pages run out in the middle of an answer."""
    engine, some = make(llama, num_blocks=14, use_async_batching=is_async), [[5, 6, 7], [8, 9, 10]]
    engine.scheduler.expected_answer_share = 0.0
    add(engine, some, 40)
    step_until(engine, lambda: made(engine, 0) == 14)
    engine.suspend([which])
    assert engine._requests[which][0].slot >= 0
    outputs = run(engine)
    assert engine._requests[which][0].slot == -1
    assert engine.stats().preemptions == 1
    engine.resume([which])
    outputs |= run(engine)
    check(outputs, llama, some, 40)
    assert is_empty(engine)
    engine.close()


def test_the_youngest_gives_way_first_and_the_oldest_is_the_first_again(llama: Path) -> None:
    engine, some = make(llama, max_requests_per_batch=3), prompts(5)
    add(engine, some[:3])
    step_until(engine, lambda: made(engine, 2) == 3)
    engine.suspend([0, 1, 2])
    engine.add(request(3, some[3], greedy(LENGTH)))
    engine.step()
    slots = [engine._requests[name][0].slot for name in range(4)]
    assert slots[2] == -1
    assert min(slots[0], slots[1], slots[3]) >= 0
    engine.add(request(4, some[4], greedy(LENGTH)))
    engine.step()
    assert [engine._requests[name][0].slot >= 0 for name in range(5)] == [True, False, False, True, True]
    engine.resume([2, 1, 0])
    engine.add(request("late", some[4], greedy(2)))
    run_order = [s.request.request_id for s in engine.scheduler.running]
    assert run_order == [0, 3, 4]  # in order of admission
    taken = []
    while engine.scheduler.num_waiting:
        before = set(engine.scheduler.running)
        for output in engine.step():
            assert output.request_id in (0, 3, 4, 1, 2, "late")
        taken += [s.request.request_id for s in engine.scheduler.running if s not in before]
    assert taken == [1, 2, "late"]
    run(engine)


@POLICIES
@pytest.mark.parametrize("order", [range(6), range(5, -1, -1)], ids=["resumed in order", "resumed backwards"])
def test_those_that_never_ran_come_back_in_their_order(llama: Path, scheduler_type: str, order: range) -> None:
    engine = make(llama, max_requests_per_batch=1, scheduler_type=scheduler_type)
    add(engine, [[5 + number] * (9 - number) for number in range(6)], 3)  # the longest first
    engine.suspend(range(6))
    engine.generate([[5, 6, 7]], greedy(3))  # their turn comes, and they are passed over
    assert len(engine.scheduler.parked) == 6
    engine.add(request("late", [60] * 30, greedy(3)))
    engine.resume(order)
    assert list(run(engine)) == [*range(6), "late"]
    assert is_empty(engine)


def test_those_that_never_ran_come_behind_those_that_did(llama: Path) -> None:
    engine, some = make(llama, max_requests_per_batch=2), prompts(5)
    add(engine, some[:2], 6)
    step_until(engine, lambda: made(engine, 1) == 3)
    for number in (2, 3):
        engine.add(request(number, some[number], greedy(6)))
    engine.suspend(range(4))
    for _ in range(2):  # two that need both slots
        engine.add(request(f"beside {_}", some[4], greedy(3)))
    run(engine)
    assert len(engine.scheduler.parked) == 4
    engine.resume([3, 1, 2, 0])
    assert list(run(engine)) == [0, 1, 2, 3]
    assert is_empty(engine)


@DEPTHS
def test_one_that_is_added_suspended_does_not_run(llama: Path, is_async: bool) -> None:
    engine, some = make(llama, use_async_batching=is_async), prompts(3)
    engine.add(request("still", some[0], greedy(5), suspended=True))
    stats = engine.stats()
    assert (stats.suspended, stats.waiting, stats.running, stats.unbegun) == (1, 0, 0, 0)
    assert not engine.has_work
    assert engine.step() == []
    assert engine.generate(some[1:], greedy(5))[0].token_ids == fresh(llama, some[1], 5).token_ids
    assert made(engine, "still") == 0
    engine.resume(["still"])
    assert engine.stats().unbegun == 1
    assert run(engine)["still"].token_ids == fresh(llama, some[0], 5).token_ids
    assert is_empty(engine)
    engine.close()


@pytest.mark.parametrize("how", ["running", "parked", "queued"])
def test_a_suspended_request_can_be_cancelled(llama: Path, how: str) -> None:
    engine, some = make(llama, max_requests_per_batch=1), prompts(3)
    engine.add(request("it", some[0], greedy(LENGTH), suspended=how == "queued"))
    if how != "queued":
        step_until(engine, lambda: made(engine, "it") == 4)
        engine.suspend(["it"])
    if how == "parked":
        engine.generate([some[1]], greedy(4))
        assert engine._requests["it"][0].slot == -1
    output = engine.cancel("it")
    assert output is not None
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.CANCELLED, 0 if how == "queued" else 4)
    assert is_empty(engine)
    assert engine.generate([some[2]], greedy(4))[0].token_ids == fresh(llama, some[2], 4).token_ids


@POLICIES
def test_a_suspended_leader_holds_nobody_up(llama: Path, scheduler_type: str) -> None:
    """All begin alike; the one that reads the beginning for all is suspended in the middle of it."""
    engine = make(llama, scheduler_type=scheduler_type, max_batch_tokens=4)
    some = [prompts(1, seed=3, longest=30)[0][:10] + [50 + number] * 12 for number in range(4)]
    add(engine, some, 6)
    engine.step()
    assert 0 < engine._requests[0][0].computed < len(some[0])
    engine.suspend([0])
    outputs = run(engine)
    assert outputs.keys() == {1, 2, 3}
    engine.resume([0])
    outputs |= run(engine)
    check(outputs, llama, some, 6)
    assert is_empty(engine)


@POLICIES
def test_suspended_before_it_could_lead(llama: Path, scheduler_type: str) -> None:
    engine, some = make(llama, scheduler_type=scheduler_type), [[5, 6, 7, 8, 9 + number] for number in range(4)]
    add(engine, some, 6)
    engine.suspend([0, 2])
    outputs = run(engine)
    assert outputs.keys() == {1, 3}
    engine.resume([2])
    outputs |= run(engine)
    assert outputs.keys() == {1, 2, 3}
    engine.resume([0])
    outputs |= run(engine)
    check(outputs, llama, some, 6)
    assert is_empty(engine)


@DEPTHS
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("slots", [2, 8])
def test_all_choices_of_a_request(llama: Path, is_async: bool, steps: int, slots: int) -> None:
    sampled = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=10, ignore_eos=True)
    engine = make(llama, max_batch_tokens=9, max_requests_per_batch=slots, use_async_batching=is_async)
    other = prompts(2)
    wanted: EngineOutput = make(llama).generate([other[0]], sampled)[0]
    engine.add(request("it", other[0], sampled))
    for _ in range(steps):
        engine.step()
    engine.suspend(["it"])
    assert engine.stats().suspended == 4
    counts = [choice.generated for choice in engine._requests["it"]]
    assert engine.generate([other[1]], greedy(8))[0].token_ids == fresh(llama, other[1], 8).token_ids
    assert [choice.generated for choice in engine._requests["it"]] == counts
    engine.resume(["it"])
    output = run(engine)["it"]
    assert [c.token_ids for c in output.choices] == [c.token_ids for c in wanted.choices]
    assert is_empty(engine)
    engine.close()


def test_the_last_token_of_a_step_in_flight_can_end_it(llama: Path) -> None:
    engine, prompt = make(llama, use_async_batching=True), prompts(1)[0]
    engine.add(request("it", prompt, greedy(4)))
    step_until(engine, lambda: made(engine, "it") == 3)
    engine.suspend(["it"])  # collects the step in flight
    assert engine.has_work
    assert engine.stats().suspended == 0
    (output,) = engine.step()
    assert output.token_ids == fresh(llama, prompt, 4).token_ids
    assert is_empty(engine)
    engine.close()


def test_a_scored_prompt(llama: Path) -> None:
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0, n=3)
    engine, prompt = make(llama, max_batch_tokens=5), prompts(1, seed=5)[0]
    wanted = make(llama).generate([prompt], asked)[0].prompt_scores
    engine.add(request("it", prompt, asked))
    engine.step()
    engine.suspend(["it"])
    assert (engine.stats().suspended, engine.has_work) == (1, False)  # it is scored once for all choices
    engine.resume(["it"])
    scores = run(engine)["it"].prompt_scores
    assert wanted is not None
    assert scores is not None
    assert scores.logprobs[1:] == pytest.approx(wanted.logprobs[1:], abs=1e-4)
    assert is_empty(engine)


@DEPTHS
def test_back_and_forth_under_pressure(llama: Path, is_async: bool) -> None:
    """Somebody is suspended or resumed after every step, in a cache in which hardly two fit."""
    engine = make(llama, num_blocks=26, use_async_batching=is_async, cpu_offload_space=1.0, max_requests_per_batch=4)
    engine.scheduler.expected_answer_share = 0.0
    some = [prompt[:16] for prompt in prompts(8, seed=11)]
    add(engine, some, 12)
    outputs, number = {}, 0
    while len(outputs) < 8:
        engine.suspend([number % 8, (number * 3 + 1) % 8])
        engine.resume([(number * 5 + 2) % 8, (number + 4) % 8, (number * 7) % 8])
        outputs |= {output.request_id: output for output in engine.step()}
        number += 1
        assert number < 3000
    check(outputs, llama, some, 12)
    assert is_empty(engine)
    engine.close()
