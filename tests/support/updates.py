"""Engines whose model changes, and what a fresh engine says. A test module imports the fixtures by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from batchjobs.types import SamplingParams
from tests.support.engines import make
from tests.support.models import FAMILIES, save_model, save_random
from workers.engine import Engine, EngineOutput, EngineRequest
from workers.engine.comparison import weights


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape."""
    return save_model("llama", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def other_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gemma2", tmp_path_factory.mktemp("other"), seed=2)


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def request(name: Hashable, prompt: Sequence[int], sampling: SamplingParams, **options: object) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, **options)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[Hashable, EngineOutput]:
    """To the end of all that is not suspended."""
    outputs: dict[Hashable, EngineOutput] = {}
    steps = 0
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
        assert steps < 5000, "no end in sight"
    return outputs


def step_until(engine: Engine, is_so: Callable[[], bool]) -> None:
    """Steps in which nothing ends."""
    for _ in range(2000):
        if is_so():
            return
        assert engine.step() == []
    raise AssertionError("it never was so")


def made(engine: Engine, name: Hashable, choice: int = 0) -> int:
    """How many tokens a choice has."""
    return engine._requests[name][choice].generated


def fresh(folder: Path, prompt: Sequence[int], count: int) -> EngineOutput:
    """The greedy answer of an engine that never had another model, and remembers nothing of other prompts."""
    return _answer(folder, tuple(prompt), count)


@cache
def _answer(folder: Path, prompt: tuple[int, ...], count: int) -> EngineOutput:
    return _reference(folder).generate([prompt], greedy(count))[0]


@lru_cache(maxsize=8)
def _reference(folder: Path) -> Engine:
    return make(folder, allow_block_sharing=False, num_blocks=400)


def save_long(folder: Path, *, seed: int) -> Path:
    """A tiny Llama with a context of 1,024 tokens."""
    config = LlamaConfig(**{**FAMILIES["llama"].to_dict(), "max_position_embeddings": 1024})
    save_random(config, folder, seed=seed)
    return folder


def bits(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of all that its model's checkpoint says."""
    return {name: tensor.detach().clone() for name, tensor in weights(engine.runner.model).items()}


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def is_empty(engine: Engine) -> bool:
    """Nothing is held by anybody."""
    stats = engine.stats()
    live = (stats.running, stats.waiting, stats.suspended, stats.unbegun, stats.offloaded_pages)
    return live == (0, 0, 0, 0, 0) and engine.pool.free == engine.pool.capacity and not engine._requests
