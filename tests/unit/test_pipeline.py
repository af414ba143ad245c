"""Depth 1 and depth 2 give the same: a step is planned, and even launched, before the tokens of the last are known."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.engines import prompts
from tests.support.models import save_chat_model
from workers.engine import Engine, EngineRequest, SamplingParams


def make(folder: Path, **settings: object) -> Engine:
    return engines.make(folder, **({"max_requests_per_batch": 4} | settings))


MIXED = [
    SamplingParams(temperature=0, max_tokens=15),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=4, max_tokens=17, min_tokens=6, top_k=20, stop_token_ids=(7, 8, 9)),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=9, n=2, top_logprobs=3),
]


def test_depth_one_and_two_give_the_same(llama: Path) -> None:
    """Penalties and bans of early ends look at every token before, so they must not lag by the one in flight."""
    asked = prompts(12)
    one = make(llama, use_async_batching=False).generate(asked, MIXED * 2)
    two = make(llama, use_async_batching=True).generate(asked, MIXED * 2)
    for first, second in zip(one, two, strict=True):
        for a, b in zip(first.choices, second.choices, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_stop_strings_end_an_answer_at_the_same_token(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    asked = ["once upon", "a time", "there was"]
    free = SamplingParams(temperature=1.0, seed=2, max_tokens=40)
    texts = [o.text for o in make(folder).generate(asked, free)]
    ends = [next(c for c in text[3:] if c.isascii()) for text in texts]
    stops = [SamplingParams(temperature=1.0, seed=2, max_tokens=40, stop=(end,)) for end in ends]
    one = make(folder, use_async_batching=False).generate(asked, stops)
    two = make(folder, use_async_batching=True).generate(asked, stops)
    assert [(o.text, o.token_ids) for o in one] == [(o.text, o.token_ids) for o in two]
    assert all(o.finish_reason is FinishReason.STOP for o in one)


def test_the_next_step_runs_before_the_tokens_of_the_last_are_known(llama: Path) -> None:
    """The device gets its next forward while the host has not collected the sampling before it."""
    engine = make(llama, use_async_batching=True)
    engine.add(EngineRequest("r", tuple(prompts(1)[0]), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    engine.step()
    (sequence,) = engine._requests["r"]
    assert (sequence.in_flight, sequence.generated) == (1, 0)
    engine.step()
    assert (sequence.in_flight, sequence.generated) == (1, 1)
    assert sequence.computed == sequence.length - 1
    engine.settle()
    assert (sequence.in_flight, sequence.generated) == (0, 2)


def test_rows_for_a_sequence_that_had_ended_are_dropped(llama: Path) -> None:
    prompt = prompts(1)[0]
    whole = make(llama).generate([prompt], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
    stop = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=(whole.token_ids[3],))
    engine = make(llama, use_async_batching=True)
    output = engine.generate([prompt], stop)[0]
    end = whole.token_ids.index(whole.token_ids[3]) + 1
    assert output.token_ids == whole.token_ids[:end]
    assert engine.stats().generated_tokens == end
    assert engine.stats().steps == end + 1  # the last one only for the row that is dropped
    assert engine.settle() == []
    assert engine.pool.free == engine.pool.capacity


def test_a_length_stop_is_known_in_advance_and_costs_no_row(llama: Path) -> None:
    engine = make(llama, use_async_batching=True)
    engine.generate([prompts(1)[0]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert engine.stats().steps == 9


def test_a_cancelled_sequences_slot_serves_another_at_once(llama: Path) -> None:
    first, second = prompts(2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = make(llama).generate([second], params)[0]
    engine = make(llama, use_async_batching=True, max_requests_per_batch=1)
    for at in range(1, 8):
        engine.add(EngineRequest("first", tuple(first), params))
        engine.add(EngineRequest("second", tuple(second), params))
        for _ in range(at):
            engine.step()
        cancelled = engine.cancel("first")
        assert cancelled is not None
        assert len(cancelled.token_ids) == at - 1  # the one in flight is not taken
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [o.token_ids for o in outputs] == [alone.token_ids]


def test_the_host_plans_while_the_device_works(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(llama, use_async_batching=True)
    forward, threads = engine.runner.forward, set()

    def watched(*step: object) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return forward(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "forward", watched)
    engine.generate(prompts(2), SamplingParams(temperature=0, max_tokens=4))
    assert threads == {"device_0"}
    engine.close()
    assert "device_0" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("async_batching", [False, True])
def test_an_error_on_the_device_is_raised_where_the_step_is_collected(
    llama: Path, monkeypatch: pytest.MonkeyPatch, async_batching: bool
) -> None:
    engine = make(llama, use_async_batching=async_batching)
    engine.add(EngineRequest("r", (5, 6), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    engine.step()

    def broken(*_: object) -> torch.Tensor:
        raise MemoryError("no memory on the device")

    monkeypatch.setattr(engine.runner, "forward", broken)
    if async_batching:
        engine.step()  # launches the broken one and collects the one before
    with pytest.raises(MemoryError, match="no memory on the device"):
        engine.step()


def test_warming_up_makes_no_token_and_holds_no_page(llama: Path) -> None:
    for async_batching in (False, True):
        engine = make(llama, use_async_batching=async_batching)
        engine.warmup()
        assert (engine.stats().steps, engine.stats().generated_tokens, engine.has_work) == (0, 0, False)
        assert engine.pool.free == engine.pool.capacity
        assert (
            engine.generate(prompts(1), MIXED[:1])[0].token_ids
            == make(llama).generate(prompts(1), MIXED[:1])[0].token_ids
        )


def test_streamed_requests_tell_of_each_token_once(llama: Path) -> None:
    engine = make(llama, use_async_batching=True)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=7, n=2, ignore_eos=True)
    engine.add(EngineRequest("loud", tuple(prompts(1)[0]), params, stream=True))
    engine.add(EngineRequest("quiet", tuple(prompts(1)[0]), params))
    deltas, outputs = [], {}
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step()}
        deltas += engine.take_deltas()
    assert {d.request_id for d in deltas} == {"loud"}
    for choice in outputs["loud"].choices:
        mine = [d for d in deltas if d.choice == choice.choice]
        assert tuple(d.token_id for d in mine) == choice.token_ids
        assert tuple(d.logprob for d in mine) == choice.logprobs
        assert tuple(d.token_time for d in mine) == choice.token_times
    assert engine.take_deltas() == []
