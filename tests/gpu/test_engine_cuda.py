"""The engine on a CUDA device gives what ``generate`` gives there. Run by `make test-gpu` where there is one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.models import FAMILIES, MORE_FAMILIES, VOCAB_SIZE, load_reference, save_model
from workers.engine import Engine, EngineConfig, SamplingParams


@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES))
def test_greedy_tokens_equal_the_solo_run(family: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = save_model(family, tmp_path)
    reference = load_reference(folder).to("cuda")
    rng = random.Random(family)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(20)]
    engine = Engine(str(folder), EngineConfig(device="cuda", dtype="float32", max_batch_tokens=16))
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        alone = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert list(output.token_ids) == alone[0, len(prompt) :].tolist()
    assert engine.pool.free == engine.pool.capacity
