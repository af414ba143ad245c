"""Workloads for measuring: prompts of token ids with the exact number of tokens to generate for each.

The named ones are drawn from fixed seeds, so that every system, machine and run has the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_ID, LAST_ID = 1000, 20000  # of drawn prompts: ids that any vocabulary of a real model has
PREFIX_TOKENS, PREFIX_OUTPUT_TOKENS = 512, 32
RANDOM_PROMPT_TOKENS, RANDOM_OUTPUT_TOKENS = 1024, 128
REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a workload: end-of-sequence tokens are ignored, so that every system makes the same tokens."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    top_logprobs: int = 0


def mixed_64(requests: int = REQUESTS) -> list[Work]:
    """Prompts of 16 to 200 tokens, answers of 8 to 256, uniform. 64 have 7,019 prompt and 8,703 output tokens."""
    rng = random.Random(0)
    work = []
    for _ in range(requests):
        prompt, output = rng.randint(16, 200), rng.randint(8, 256)
        work.append(Work(_drawn(rng, prompt), output))
    return work


def shared_prefix(requests: int = REQUESTS) -> list[Work]:
    """One beginning of 512 tokens for all, 16 to 64 tokens of their own, and 32 tokens of answer."""
    rng = random.Random(1)
    prefix = _drawn(rng, PREFIX_TOKENS)
    return [Work(prefix + _drawn(rng, rng.randint(16, 64)), PREFIX_OUTPUT_TOKENS) for _ in range(requests)]


def long_tail(requests: int = REQUESTS) -> list[Work]:
    """Every sixteenth answer has 768 tokens, the others 8 to 64: waiting for the longest is dear."""
    rng = random.Random(2)
    work = []
    for number in range(requests):
        prompt, output = rng.randint(16, 128), rng.randint(8, 64)
        work.append(Work(_drawn(rng, prompt), 768 if number % 16 == 7 else output))
    return work


def random_1024_128(requests: int = REQUESTS) -> list[Work]:
    """Prompts of 1,024 tokens, answers of 128."""
    rng = random.Random(3)
    return [Work(_drawn(rng, RANDOM_PROMPT_TOKENS), RANDOM_OUTPUT_TOKENS) for _ in range(requests)]


WORKLOADS: dict[str, Callable[[int], list[Work]]] = {
    "mixed-64": mixed_64,
    "prefix": shared_prefix,
    "long-tail": long_tail,
    "random-1024-128": random_1024_128,
}


def workload(name: str, requests: int | None = None) -> list[Work]:
    """The named workload, of so many requests (64 if not given). Raises UsageError for a name that is none."""
    if name not in WORKLOADS:
        raise UsageError(f"no such workload: {name!r}; there are: {', '.join(WORKLOADS)}; or name a file of requests")
    return WORKLOADS[name](requests or REQUESTS)


def _drawn(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(count))
