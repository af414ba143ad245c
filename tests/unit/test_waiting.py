"""The order in which waiting sequences come up, for each policy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, SamplingParams
from tests.support.models import VOCAB_SIZE
from workers.engine import Engine, EngineConfig, EngineRequest
from workers.engine.sequence import Sequence
from workers.engine.waiting import WaitingQueue

PAGE = 4


def sequence(name: str, prompt: list[int], limit: int = 8) -> Sequence:
    request = EngineRequest(name, tuple(prompt), SamplingParams(max_tokens=limit))
    return Sequence(request, limit=limit, seed=0, stop_ids=frozenset(), stop_matcher=None)


def drain(queue: WaitingQueue) -> list[object]:
    names = []
    while (found := queue.next()) is not None:
        names.append(found.request.request_id)
    return names


def test_fifo_keeps_the_order_and_who_gave_way_comes_first() -> None:
    queue = WaitingQueue("fifo", PAGE)
    a, b, c = (sequence(name, [1, 2]) for name in "abc")
    for each in (a, b, c):
        queue.add(each)
    assert queue.next() is a
    queue.put_back(a)
    b.finish_reason = FinishReason.CANCELLED
    assert drain(queue) == ["a", "c"]


def test_longest_first_counts_prompt_and_limit_and_keeps_arrival_among_equals() -> None:
    queue = WaitingQueue("longest_first", PAGE)
    for name, prompt, limit in [("short", [1], 2), ("long", [1] * 5, 20), ("first", [1], 9), ("second", [1], 9)]:
        queue.add(sequence(name, prompt, limit))
    assert drain(queue) == ["long", "first", "second", "short"]


def test_prefix_lets_one_lead_its_group_while_other_groups_start() -> None:
    queue = WaitingQueue("prefix", PAGE)
    one, two = [1, 2, 3, 4], [5, 6, 7, 8]
    made = {n: sequence(n, p) for n, p in [("a1", [*one, 9]), ("b1", [*two, 9]), ("a2", [*one, 8]), ("b2", [*two, 8])]}
    for each in made.values():
        queue.add(each)
    assert drain(queue) == ["a1", "b1"]  # both lead; nobody may follow yet
    made["b1"].computed = 5
    assert drain(queue) == ["b2"]
    made["a1"].finish_reason = FinishReason.CANCELLED  # it will never compute the rest
    assert drain(queue) == ["a2"]


def test_a_beginning_is_computed_once_also_for_those_that_come_while_its_leader_computes_it() -> None:
    queue = WaitingQueue("prefix", PAGE)
    first, late = sequence("a1", [1, 2, 3, 4, 9]), sequence("a2", [1, 2, 3, 4, 8])
    queue.add(first)
    assert queue.next() is first
    assert queue.next() is None
    queue.add(late)
    assert queue.next() is None  # it waits for what the first one is computing
    first.computed = 5
    assert queue.next() is late
    late.computed = 5
    assert queue.next() is None
    assert queue._order._groups == {}  # type: ignore[attr-defined]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="fifo, prefix, longest_first"):
        EngineConfig(scheduler_type="random")


@pytest.mark.parametrize("policy", ["fifo", "prefix", "longest_first"])
@pytest.mark.parametrize("num_blocks", [26, 200])
def test_no_policy_changes_an_answer_or_forgets_a_request(llama: Path, policy: str, num_blocks: int) -> None:
    rng = random.Random(3)
    beginnings = [[rng.randrange(3, VOCAB_SIZE) for _ in range(18)] for _ in range(3)]
    prompts = [[*rng.choice(beginnings), *(rng.randrange(3, VOCAB_SIZE) for _ in range(4))] for _ in range(18)]
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    plain = Engine(str(llama), EngineConfig(device="cpu", page_size=PAGE, allow_block_sharing=False))
    config = EngineConfig(
        device="cpu", page_size=PAGE, num_blocks=num_blocks, max_requests_per_batch=6, scheduler_type=policy
    )
    engine = Engine(str(llama), config)
    outputs = engine.generate(prompts, sampling)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, sampling)]
    assert engine.pool.free == engine.pool.capacity
    if policy == "prefix" and num_blocks == 200:
        # One leader a group; each follower finds the 4 whole pages that it shares with its leader.
        assert sorted(o.cached_tokens for o in outputs) == [0] * 3 + [16] * 15
