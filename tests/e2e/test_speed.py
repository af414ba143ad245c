"""A guard against slipping back: this engine beside static batches in one process, by processor time.

It fails on gross loss alone. What it compares does not depend on who else uses the machine:

- Processor time of this process, not time by the clock: waiting for a core costs nothing. Neither of the two waits for
  anything else, and both do their arithmetic in the same process with one thread, so nobody spins beside it.
- A ratio: a slower or hotter processor slows both. They take turns, and of each the best turn counts, so a turn in
  which a neighbour emptied the caches is left out.
- A wide floor: static batches make a third of their tokens for nobody here, and pad every prompt; the ratio is three to
  five, and the floor is 2. What falls below that is no noise.

Without its kernels the engine would still be faster than static batches, so that they are in use is asked first.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.support.models import save_random
from workers.bench.baselines import StaticBatches
from workers.bench.system import OurEngine, System
from workers.engine.config import EngineConfig
from workers.engine.native.logits import logits_kernel
from workers.workloads import Work

FLOOR = 2.0
TURNS = 2
SHAPE = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mixed(requests: int) -> list[Work]:
    rng = random.Random(4)
    lengths = [(rng.randint(8, 48), rng.randint(4, 32)) for _ in range(requests)]
    return [Work(tuple(rng.randint(10, 4000) for _ in range(prompt)), answer) for prompt, answer in lengths]


def cpu_seconds(system: System, work: list[Work]) -> float:
    begin = time.process_time()
    done = system.run(work)
    spent = time.process_time() - begin
    assert done.made == [item.output_tokens for item in work]
    return spent


@pytest.mark.usefixtures("one_thread")
def test_the_engine_is_faster_than_static_batches(tmp_path: Path) -> None:
    save_random(SHAPE, tmp_path)
    ours = OurEngine(str(tmp_path), EngineConfig(dtype="float32", device="cpu"))
    assert (ours.forward_kind, ours.engine.runner.backends[0].name) == ("native", "cpu")
    assert logits_kernel() is not None
    static = StaticBatches(str(tmp_path), "float32", 16)
    work = mixed(32)
    for system in (ours, static):
        system.run(work[:4])
    turns = [(cpu_seconds(ours, work), cpu_seconds(static, work)) for _ in range(TURNS)]
    best_ours, best_static = (min(times) for times in zip(*turns, strict=True))
    ratio = best_static / best_ours
    print(f"the engine takes {best_ours:.2f} s of processor time, static batches {best_static:.2f}: {ratio:.2f} x")
    assert ratio > FLOOR, f"the engine is only {ratio:.2f} times as fast as static batches of 16"
