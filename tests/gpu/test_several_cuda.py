"""Several GPUs: one model over two of them, and an engine that is not on the first one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engines import prompts
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCAB_SIZE, save_model, save_random
from workers.engine import Engine, EngineConfig, SamplingParams
from workers.fleet import visible_devices

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    gc.collect()


def answers(folder: Path, **settings: object) -> list[tuple[int, ...]]:
    chosen = {"device": "cuda", "dtype": "float32", "num_blocks": 200, "max_batch_tokens": 16} | settings
    engine = Engine(str(folder), EngineConfig(**chosen))  # type: ignore[arg-type]
    try:
        engine.warmup()
        return [output.token_ids for output in engine.generate(prompts(8), GREEDY)]
    finally:
        engine.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_a_model_over_two_gpus_gives_the_whole_models_tokens(family: str, ahead: bool, tmp_path: Path) -> None:
    config = copy.deepcopy((FAMILIES | MORE_FAMILIES)[family])
    config.vocab_size = VOCAB_SIZE + 1  # older transformers split even vocabularies only
    save_random(config, tmp_path)
    split = answers(tmp_path, tensor_parallel_size=2, use_async_batching=ahead)
    assert split == answers(tmp_path, use_async_batching=ahead)


def test_an_engine_on_the_second_gpu_takes_nothing_of_the_first_one(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    before = torch.cuda.memory_reserved(0)
    assert answers(folder, device="cuda:1") == answers(folder, device="cpu")
    assert torch.cuda.memory_reserved(0) == before


def test_a_fleet_has_a_worker_for_each_gpu() -> None:
    assert visible_devices() == [f"cuda:{index}" for index in range(torch.cuda.device_count())]
