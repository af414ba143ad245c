"""Small engines on tiny models, and random prompts for them."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.models import VOCAB_SIZE
from workers.engine import Engine, EngineConfig


def make(folder: Path, **settings: object) -> Engine:
    """An engine on the CPU, with pages of four tokens where ``settings`` say nothing else."""
    chosen = {"device": "cpu", "page_size": 4, "num_blocks": 200, "max_requests_per_batch": 8} | settings
    return Engine(str(folder), EngineConfig(**chosen))  # type: ignore[arg-type]


def prompts(count: int, seed: int = 1, *, longest: int = 30) -> list[list[int]]:
    """Token ids, none of them special; 2 to ``longest`` in a prompt."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(2, longest))] for _ in range(count)]
