"""What the rows of a batch look like after a model update in the middle of it, for each policy, by a real engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from batchjobs import Client
from batchjobs.queue import JobQueue
from batchjobs.settings import Settings
from batchjobs.store import Store
from batchjobs.types import Completion, Inflight
from tests.support.batches import request
from tests.support.models import save_model, save_random
from tests.support.running import completions, enqueue, is_complete, open_batch, queue, settings, sqlite, start
from tests.support.waiting import eventually
from tests.support.workers import ThreadWorker
from workers.engine import Engine, EngineConfig, EngineLoop, SamplingParams
from workers.engine.observer import EngineObserver

__all__ = ["queue", "settings", "start"]

pytestmark = sqlite

AT_ONCE, REQUESTS, TOKENS, BEGUN = 4, 8, 140, 20
STEP_SECONDS = 0.004
PATIENCE = 60.0


class Slow(EngineObserver):
    """Tiny models are too fast to be met in the middle of an answer."""

    def planned(self, *_: Any) -> None:
        time.sleep(STEP_SECONDS)


@pytest.fixture(scope="module")
def old(llama: Path) -> Path:
    return llama


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another size."""
    folder = tmp_path_factory.mktemp("wider")
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6}
    ids = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    save_random(LlamaConfig(**shape, **ids, num_key_value_heads=2, max_position_embeddings=256), folder, seed=2)
    return folder


def engine(model: Path) -> Engine:
    return Engine(str(model), EngineConfig(device="cpu", num_blocks=200, max_requests_per_batch=AT_ONCE))


def prompt(index: int) -> list[int]:
    return [10 + index, 20, 30 + index, 40, 50]


@pytest.fixture
def updated(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, settings: Settings, old: Path
) -> Callable[[Path, Inflight], tuple[list[Completion], dict[str, Any]]]:
    """Runs a batch, updates its worker's model while the first requests are in the middle, and waits for its end."""

    def run(model: Path, policy: Inflight) -> tuple[list[Completion], dict[str, Any]]:
        loop = EngineLoop(engine(old))
        loop.engine.observer = Slow()
        few = settings.model_copy(update={"max_requests_per_batch": AT_ONCE})
        start("w1", loop=loop, settings=few)
        asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        batch = open_batch(store, *(request(i, prompt=prompt(i), **asked) for i in range(REQUESTS)))
        enqueue(store, queue)
        eventually(lambda: loop.stats().generated_tokens >= AT_ONCE * BEGUN, "the first are in the middle", PATIENCE)
        with Client(settings) as client:
            [command] = client.update_model(str(model), inflight=policy)
        assert command.error is None
        assert command.result is not None
        eventually(lambda: is_complete(store, batch), "the batch has ended", PATIENCE)
        return completions(store, batch), dict(command.result)

    return run


def answers(model: Path, begun: list[list[int]]) -> list[tuple[int, ...]]:
    """How a fresh engine with that model goes on behind these tokens, up to the last one of an answer."""
    asked = [
        SamplingParams(temperature=0, max_tokens=len(prompt(0)) + TOKENS - len(ids), ignore_eos=True) for ids in begun
    ]
    return [output.token_ids for output in engine(model).generate(begun, asked)]


def versions(row: Completion) -> list[str]:
    return [span.version for span in row.version_spans]


def check_whole(rows: list[Completion], model: Path) -> None:
    assert [row.token_ids for row in rows] == answers(model, [prompt(row.index) for row in rows])


@pytest.mark.parametrize("policy", [Inflight.RECOMPUTE, Inflight.KEEP])
def test_what_runs_goes_on_and_says_so(updated: Any, old: Path, new: Path, policy: Inflight) -> None:
    rows, result = updated(new, policy)
    before, after = result["old_version"], result["new_version"]
    mixed, fresh = rows[:AT_ONCE], rows[AT_ONCE:]
    assert [versions(row) for row in mixed] == [[before, after]] * AT_ONCE
    assert result["recomputed" if policy is Inflight.RECOMPUTE else "kept"] == AT_ONCE
    starts = [row.version_spans[1].from_token for row in mixed]
    assert all(BEGUN <= begun < TOKENS for begun in starts)
    firsts = [row.token_ids[:begun] for row, begun in zip(mixed, starts, strict=True)]
    whole = answers(old, [prompt(row.index) for row in mixed])
    assert firsts == [tokens[:begun] for tokens, begun in zip(whole, starts, strict=True)]
    behind = answers(new, [[*prompt(row.index), *first] for row, first in zip(mixed, firsts, strict=True)])
    if policy is Inflight.RECOMPUTE:
        assert [row.token_ids[begun:] for row, begun in zip(mixed, starts, strict=True)] == behind
    else:
        assert [row.token_ids for row in mixed] != whole, "the new weights have drawn the rest"
    assert [versions(row) for row in fresh] == [[after]] * AT_ONCE
    check_whole(fresh, new)


def test_finished_it_is_all_of_the_old(updated: Any, old: Path, new: Path) -> None:
    rows, result = updated(new, Inflight.FINISH)
    assert [versions(row) for row in rows[:AT_ONCE]] == [[result["old_version"]]] * AT_ONCE
    assert [versions(row) for row in rows[AT_ONCE:]] == [[result["new_version"]]] * AT_ONCE
    assert result["finished"] == AT_ONCE
    check_whole(rows[:AT_ONCE], old)
    check_whole(rows[AT_ONCE:], new)


def test_restarted_it_is_all_of_the_new(updated: Any, new: Path) -> None:
    rows, result = updated(new, Inflight.RESTART)
    assert [versions(row) for row in rows] == [[result["new_version"]]] * REQUESTS
    assert result["restarted"] == AT_ONCE
    check_whole(rows, new)


@pytest.mark.parametrize("policy", [Inflight.FINISH, Inflight.RESTART])
def test_another_size(updated: Any, store: Store, old: Path, wider: Path, policy: Inflight) -> None:
    rows, result = updated(wider, policy)
    assert result["is_reload"]
    finished = AT_ONCE if policy is Inflight.FINISH else 0
    assert [versions(row) for row in rows[:finished]] == [[result["old_version"]]] * finished
    assert [versions(row) for row in rows[finished:]] == [[result["new_version"]]] * (REQUESTS - finished)
    if finished:
        check_whole(rows[:finished], old)
    check_whole(rows[finished:], wider)
    [worker] = store.workers()
    assert set(worker.serves) == {wider.name, str(wider)}
