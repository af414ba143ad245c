"""Model updates and suspension on a CUDA device. Run by `make test-gpu` where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import save_model
from tests.support.updates import are_same, bits, greedy, made, request, run, step_until
from workers.engine import Engine, EngineConfig, UpdateRefused
from workers.engine.comparison import weights
from workers.engine.runner import Runner

PROMPT = (5, 9, 33, 21, 60, 12)
TOKENS = 40


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def engine(folder: Path) -> Engine:
    return Engine(str(folder), EngineConfig(device="cuda", dtype="float32", num_blocks=200))


def alone(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return engine(folder).generate([prompt], greedy(count))[0].token_ids


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "old", seed=0)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "new", seed=1)


def test_weights_change_and_addresses_stay(old: Path, new: Path) -> None:
    running = engine(old)
    addresses = {name: tensor.data_ptr() for name, tensor in weights(running.runner.model).items()}
    running.add(request("a", PROMPT, greedy(TOKENS)))
    step_until(running, lambda: made(running, "a") >= 10)
    running.update_model(str(new))
    output = run(running)["a"]
    begun = output.version_spans[1].from_token
    assert output.token_ids[:begun] == alone(old, PROMPT, TOKENS)[:begun]
    assert output.token_ids[begun:] == alone(new, PROMPT + output.token_ids[:begun], TOKENS - begun)
    assert {name: tensor.data_ptr() for name, tensor in weights(running.runner.model).items()} == addresses


def test_what_fails_after_the_write_is_taken_back(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(old)
    before, staged = bits(running), running.stage(str(new))
    smoke = Runner.smoke
    monkeypatch.setattr(Runner, "smoke", lambda self, ids: smoke(self, ids) * float("nan"))
    with pytest.raises(UpdateRefused, match="not finite"):
        running.update_model(staged)
    assert are_same(before, bits(running))
    monkeypatch.undo()
    assert running.generate([PROMPT], greedy(TOKENS))[0].token_ids == alone(old, PROMPT, TOKENS)


def test_another_architecture_takes_the_place_of_the_old(old: Path, tmp_path: Path) -> None:
    other = save_model("gemma2", tmp_path / "other", seed=2)
    running = engine(old)
    report = running.update_model(str(other), inflight="restart")
    assert report.is_reload
    assert running.device.startswith("cuda")
    assert running.generate([PROMPT], greedy(TOKENS))[0].token_ids == alone(other, PROMPT, TOKENS)


def test_what_is_suspended_goes_on(old: Path) -> None:
    running = engine(old)
    running.add(request("a", PROMPT, greedy(TOKENS)))
    step_until(running, lambda: made(running, "a") >= 10)
    running.suspend(["a"])
    count = made(running, "a")
    other = running.generate([PROMPT[::-1]], greedy(TOKENS))[0]
    assert other.token_ids == alone(old, PROMPT[::-1], TOKENS)
    assert made(running, "a") - count in (0, 1)  # the step in flight
    running.resume(["a"])
    assert run(running)["a"].token_ids == alone(old, PROMPT, TOKENS)
