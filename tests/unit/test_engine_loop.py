"""The engine in the background: adds and cancels from any thread, one outcome each, and a death that says why."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchjobs.types import FinishReason
from tests.support.models import save_model
from workers.engine import Engine, EngineConfig, EngineLoop, EngineOutput, EngineRequest, EngineStopped, SamplingParams

WAIT = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def loop(folder: Path) -> Iterator[EngineLoop]:
    loop = EngineLoop(Engine(str(folder), EngineConfig(device="cpu", num_blocks=500, max_requests_per_batch=8)))
    loop.start()
    yield loop
    loop.stop(WAIT)


def request(name: object, tokens: int = 10) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, (5, 6, 7), sampling)  # type: ignore[arg-type]


def test_every_request_of_every_thread_gets_one_outcome(loop: EngineLoop) -> None:
    outcomes: queue.Queue[EngineOutput] = queue.Queue()

    def add(thread: int) -> None:
        for number in range(10):
            loop.add(request((thread, number)), outcomes.put)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    found = {outcomes.get(timeout=WAIT).request_id for _ in range(40)}
    assert found == {(thread, number) for thread in range(4) for number in range(10)}
    assert outcomes.empty()
    assert loop.stats().generated_tokens == 400
    assert loop.stats().ticked_at > 0


def test_cancel_gives_the_tokens_so_far(loop: EngineLoop) -> None:
    outcomes: queue.Queue[EngineOutput] = queue.Queue()
    loop.add(request("long", 200), outcomes.put)
    loop.cancel("long")
    output = outcomes.get(timeout=WAIT)
    assert (output.finish_reason, output.error) == (FinishReason.CANCELLED, None)
    assert len(output.token_ids) < 200
    loop.cancel("long")  # too late: nothing happens
    loop.add(request("next"), outcomes.put)
    assert outcomes.get(timeout=WAIT).request_id == "next"


def test_the_same_id_twice_is_refused(loop: EngineLoop) -> None:
    outcomes: queue.Queue[EngineOutput] = queue.Queue()
    loop.add(request("same", 100), outcomes.put)
    with pytest.raises(ValueError, match="already"):
        loop.add(request("same"), outcomes.put)
    outcomes.get(timeout=WAIT)


def test_a_dead_loop_says_why_and_accepts_nothing_more(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("the device is full")

    monkeypatch.setattr(loop.engine.runner, "forward", fail)
    loop.add(request("doomed"), lambda output: None)
    assert loop._thread is not None
    loop._thread.join(WAIT)
    assert not loop.is_running
    assert isinstance(loop.failure, MemoryError)
    with pytest.raises(EngineStopped) as stopped:
        loop.add(request("late"), lambda output: None)
    assert stopped.value.__cause__ is loop.failure


def test_a_stopped_loop_accepts_nothing(loop: EngineLoop) -> None:
    loop.stop(WAIT)
    assert not loop.is_running
    with pytest.raises(EngineStopped):
        loop.add(request("late"), lambda output: None)
