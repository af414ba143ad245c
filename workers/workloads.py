"""Named workloads for measuring: prompts of token ids with the exact number of tokens to generate for each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a workload: end-of-sequence tokens are ignored, so that every system makes the same tokens."""

    prompt_ids: tuple[int, ...]
    output_tokens: int


def mixed_64() -> list[Work]:
    """64 requests, prompts of 16 to 200 tokens, answers of 8 to 256, uniform: 7,019 prompt and 8,703 output tokens."""
    rng = random.Random(0)
    work = []
    for _ in range(64):
        prompt, output = rng.randint(16, 200), rng.randint(8, 256)
        work.append(Work(tuple(rng.randint(1000, 20000) for _ in range(prompt)), output))
    return work


WORKLOADS: dict[str, Callable[[], list[Work]]] = {"mixed-64": mixed_64}


def workload(name: str) -> list[Work]:
    if name not in WORKLOADS:
        raise UsageError(f"no such workload: {name!r}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()
