"""An answer whose worker was killed half-way is finished by another one, to the same tokens as undisturbed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchjobs.store import Store
from tests.support.batches import select
from tests.support.machine import Machine
from tests.support.models import save_chat_model
from tests.support.waiting import eventually

TOKENS, HALF, REQUESTS = 400, 200, 4
PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def machine(home: Path, model: Path, database_url: str, redis_url: str) -> Iterator[Machine]:
    machine = Machine(
        home,
        model,
        BATCHJOBS_DATABASE_URL=database_url,
        BATCHJOBS_REDIS_URL=redis_url,
        BATCHJOBS_CHECKPOINT_SECONDS="0.1",
    )
    yield machine
    machine.end()


def prompts(folder: Path) -> str:
    """Seeded, with what an answer's later tokens depend on: penalties, alternatives, several choices."""
    more: list[dict[str, Any]] = [{}, {"top_logprobs": 3, "logprobs": True}, {"frequency_penalty": 0.7}, {"n": 2}]
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(REQUESTS):
            asked = {"prompt": f"tale {number}", "seed": number, "temperature": 0.9, "max_tokens": TOKENS}
            line = asked | {"ignore_eos": True} | more[number % len(more)]
            if line.pop("logprobs", None):
                line["logprobs"] = line.pop("top_logprobs")
            file.write(json.dumps(line) + "\n")
    return str(path)


def checkpoints(store: Store, batch: str) -> dict[tuple[int, int], dict[str, list[Any]]]:
    """By request and choice."""
    found = select(
        store, f"SELECT \"index\", choice, token_ids, logprobs, token_times FROM checkpoints WHERE batch_id = '{batch}'"
    )
    names = ("token_ids", "logprobs", "token_times")
    return {
        (row[0], row[1]): {
            name: json.loads(value) if isinstance(value, str) else value
            for name, value in zip(names, row[2:], strict=True)
        }
        for row in found
    }


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_the_same_tokens_as_undisturbed(machine: Machine, home: Path) -> None:
    path = prompts(home)
    undisturbed = machine.call("submit", path).strip()
    machine.work("calm")
    disturbed = machine.call("submit", path).strip()
    doomed = machine.start("worker", "--name", "doomed")
    with closing(machine.store()) as store:

        def half() -> bool:
            kept = checkpoints(store, disturbed)
            return len(kept) == REQUESTS + REQUESTS // 4 and min(len(k["token_ids"]) for k in kept.values()) >= HALF

        eventually(half, "half of every answer is stored", PATIENCE)
        doomed.kill()
        doomed.wait()
        kept = checkpoints(store, disturbed)
        machine.work("heir")
        expected = {r.request.index: r for r in store.results(undisturbed)}
        assert kept
        for result in store.results(disturbed):
            for choice, calm in zip(result.choices, expected[result.request.index].choices, strict=True):
                begun = kept[result.request.index, choice.choice]
                count = len(begun["token_ids"])
                assert HALF <= count < TOKENS
                assert choice.token_ids == calm.token_ids
                assert choice.text == calm.text
                assert choice.completion_tokens == TOKENS
                assert choice.logprobs == pytest.approx(calm.logprobs, abs=1e-4)
                assert list(choice.logprobs[:count]) == begun["logprobs"]
                assert list(choice.token_times[:count]) == begun["token_times"]
                assert list(choice.token_times) == sorted(choice.token_times)
                assert (choice.worker, choice.attempt) == ("heir", 2)
                assert (choice.top_logprobs is None) == (calm.top_logprobs is None)
        generated = {worker.name: worker.generated_tokens for worker in store.workers()}
        all_tokens = TOKENS * (REQUESTS + REQUESTS // 4)
        assert generated["heir"] == all_tokens - sum(len(k["token_ids"]) for k in kept.values()), "nothing else again"
        assert not checkpoints(store, disturbed)
