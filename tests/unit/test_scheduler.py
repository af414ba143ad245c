"""What a step consists of, who may start, and who gives way; without a model."""

from __future__ import annotations

import random
import time

import pytest

from batchjobs.types import FinishReason, SamplingParams
from workers.engine.batch import pack
from workers.engine.offload import HostPool
from workers.engine.pages import PagePool
from workers.engine.requests import EngineRequest
from workers.engine.scheduler import Scheduled, Scheduler
from workers.engine.sequence import Sequence


def make(num_pages: int = 100, *, page_size: int = 4, host: int = 0, share: float = 0.0, **limits: float) -> Scheduler:
    chosen = {"max_batch_tokens": 16, "max_requests_per_batch": 4} | limits
    scheduler = Scheduler(PagePool(num_pages, page_size, sharing=False), host=HostPool(host), **chosen)  # type: ignore
    scheduler.expected_answer_share = share
    return scheduler


def add(scheduler: Scheduler, name: str, prompt: int, limit: int = 8, policy: str = "fifo") -> Sequence:
    request = EngineRequest(name, tuple(range(3, 3 + prompt)), SamplingParams(max_tokens=limit))
    sequence = Sequence(request, limit=limit, seed=0, stop_ids=frozenset())
    scheduler.add(sequence)
    return sequence


def planned(plan: list[Scheduled]) -> list[tuple[object, int, int, bool]]:
    return [(p.sequence.request.request_id, p.first, p.count, p.samples) for p in plan]


def collect(scheduler: Scheduler, plan: list[Scheduled]) -> None:
    for part in plan:
        if part.samples:
            part.sequence.in_flight -= 1
            part.sequence.accept(5, -1.0, None, time.monotonic())
            if part.sequence.is_finished:
                scheduler.finish(part.sequence)


def test_decode_rows_come_before_chunks_of_prompts() -> None:
    scheduler = make()
    add(scheduler, "a", 10)
    add(scheduler, "b", 30)
    plan = scheduler.schedule()
    assert planned(plan) == [("a", 0, 10, True), ("b", 0, 6, False)]
    collect(scheduler, plan)
    plan = scheduler.schedule()
    assert planned(plan) == [("a", 10, 1, True), ("b", 6, 15, False)]
    collect(scheduler, plan)
    assert planned(scheduler.schedule()) == [("a", 11, 1, True), ("b", 21, 9, True)]


def test_a_margin_of_pages_stays_free_for_those_that_run() -> None:
    names = []
    for margin in (0.0, 0.25, 1.0):
        scheduler = make(21, safety_margin=margin)  # 20 pages of four tokens; each prompt and a token take four
        for name in "abcd":
            add(scheduler, name, 12)
        scheduler.schedule()
        names.append("".join(str(sequence.request.request_id) for sequence in scheduler.running))
    assert names == ["abcd", "abc", "a"], "one alone always runs"


def test_a_step_can_be_planned_before_the_tokens_of_the_last_are_known() -> None:
    scheduler = make()
    sequence = add(scheduler, "a", 5, limit=3)
    assert planned(scheduler.schedule()) == [("a", 0, 5, True)]
    plan = scheduler.schedule()
    assert planned(plan) == [("a", 5, 1, True)]
    batch = pack(plan, scheduler.tables, 4)
    assert (batch.fed_rows.tolist(), batch.fed_slots.tolist()) == ([0], [sequence.slot])
    assert batch.positions.tolist() == [5]
    sequence.in_flight -= 1
    sequence.accept(5, -1.0, None, time.monotonic())
    batch = pack(plan, scheduler.tables, 4)
    assert (batch.fed_rows.tolist(), batch.input_ids.tolist()) == ([], [5])


def test_the_last_token_of_an_answer_is_never_computed() -> None:
    scheduler = make()
    add(scheduler, "a", 5, limit=2)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.schedule() == []  # both tokens are in flight


def test_a_slot_is_free_for_the_next_one_as_soon_as_a_sequence_ends() -> None:
    scheduler = make(max_requests_per_batch=1)
    first, second = add(scheduler, "a", 3, limit=1), add(scheduler, "b", 3, limit=1)
    plan = scheduler.schedule()
    assert [s.slot for s in (first, second)] == [0, -1]
    collect(scheduler, plan)
    assert first.finish_reason is FinishReason.LENGTH
    assert planned(scheduler.schedule()) == [("b", 0, 3, True)]
    assert second.slot == 0


def test_a_sequence_starts_when_its_prompt_and_its_expected_answer_have_room() -> None:
    scheduler = make(9, share=1.0)  # 8 pages of 4 tokens
    add(scheduler, "a", 8, limit=8)
    add(scheduler, "b", 8, limit=8)
    add(scheduler, "c", 4, limit=4)
    assert [name for name, *_ in planned(scheduler.schedule())] == ["a", "b"]
    assert scheduler.num_waiting == 1
    hopeful = make(9, share=0.0)
    for name in "abc":
        add(hopeful, name, 8, limit=8)
    assert len(planned(hopeful.schedule())) == 2  # 16 rows a step


def test_the_share_of_max_tokens_that_answers_use_is_learned() -> None:
    scheduler = make(share=1.0)
    for number in range(200):
        sequence = add(scheduler, str(number), 3, limit=100)
        scheduler.schedule()
        sequence.in_flight = 0
        sequence.tokens += [5] * 10
        sequence.finish_reason = FinishReason.STOP
        scheduler.finish(sequence)
    assert scheduler.expected_answer_share == pytest.approx(0.1, abs=0.01)


def test_requests_count_as_unbegun_until_their_first_choice_starts() -> None:
    scheduler = make(max_requests_per_batch=2)
    sampling = SamplingParams(max_tokens=4, n=3)
    choices = [
        Sequence(EngineRequest("a", (3, 4, 5), sampling), limit=4, seed=0, stop_ids=frozenset(), choice=choice)
        for choice in range(3)
    ]
    choices[0].followers = choices[1:]
    scheduler.add(choices[0])
    second, third = add(scheduler, "b", 3), add(scheduler, "c", 3)
    assert (scheduler.unbegun, scheduler.num_waiting) == (3, 5)
    scheduler.schedule()
    assert (scheduler.unbegun, scheduler.num_waiting) == (1, 3)  # two choices, and one request
    scheduler._preempt(second)
    assert scheduler.unbegun == 1
    third.finish_reason = FinishReason.CANCELLED
    scheduler.finish(third)
    assert scheduler.unbegun == 0


@pytest.mark.parametrize("host", [0, 50])
def test_the_youngest_gives_way_and_comes_back_first(host: int) -> None:
    scheduler = make(7, host=host)  # 6 pages
    old, young = add(scheduler, "old", 8, limit=12), add(scheduler, "young", 8, limit=12)
    add(scheduler, "next", 4, limit=2)
    while young.slot >= 0 or young.started is None:
        collect(scheduler, scheduler.schedule())
    assert old.slot == 0
    assert scheduler.preemptions == 1
    assert (young.offloaded is not None) is (host > 0)
    assert (young.computed, young.pages) == (0, [])
    order = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        order += [name for name, *_ in planned(plan) if name not in order]
        collect(scheduler, plan)
    assert order == ["old", "young", "next"]
    assert (scheduler.pool.free, scheduler.host.used) == (6, 0)


def test_no_live_sequence_is_forgotten_in_a_thousand_random_steps() -> None:
    rng = random.Random(2)
    for host in (0, 6, 100):
        scheduler = make(14, host=host, max_batch_tokens=9)
        added: list[Sequence] = []
        for number in range(1000):
            if rng.random() < 0.2:
                added.append(add(scheduler, str(number), rng.randint(1, 20), limit=rng.randint(1, 20)))
            plan = scheduler.schedule()
            assert sum(part.count for part in plan) <= 9
            held = [page for s in scheduler.running for group in s.pages for page in group]
            assert len(held) == len(set(held)) == scheduler.pool.capacity - scheduler.pool.free
            for sequence in scheduler.running:
                table = scheduler.tables.array[0, sequence.slot]
                assert table[: len(sequence.pages[0])].tolist() == sequence.pages[0]
                assert not table[len(sequence.pages[0]) :].any()
            collect(scheduler, plan)
        while scheduler.has_work:
            collect(scheduler, scheduler.schedule())
        assert all(s.is_finished and s.generated == s.limit for s in added)
        assert (scheduler.pool.free, scheduler.host.used, scheduler.num_waiting) == (13, 0, 0)


@pytest.mark.parametrize("policy", ["fifo", "prefix", "longest_first"])
def test_the_work_of_a_step_does_not_depend_on_the_length_of_the_queue(policy: str) -> None:
    """Two hundred times the queue: anything that looks at all of it would be many times slower."""

    def waiting(count: int) -> Scheduler:
        scheduler = Scheduler(PagePool(400, 16), max_batch_tokens=64, max_requests_per_batch=8, policy=policy)
        for number in range(count):
            request = EngineRequest(number, (3, number, 5, 6), SamplingParams(max_tokens=4))
            scheduler.add(Sequence(request, limit=4, seed=0, stop_ids=frozenset()))
        return scheduler

    def seconds(scheduler: Scheduler) -> float:
        started = time.perf_counter()
        for _ in range(60):
            collect(scheduler, scheduler.schedule())
        return time.perf_counter() - started

    long = waiting(30_000)  # of which a round takes a hundred
    assert min(seconds(long) for _ in range(3)) < 4 * min(seconds(waiting(150)) for _ in range(3))
