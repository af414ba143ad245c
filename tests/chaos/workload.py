"""What is asked, and what must come out: batches of lines whose answers are known in advance."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.rounding import Rounding
from tests.support.stub_engine import expected_text

_LENGTHS = 191
"""The stub's answer depends on the length of the prompt; neighbours differ in it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer of an undisturbed run, one choice."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Job:
    """One batch: its lines, the answers by (index, choice), and what was done to it."""

    key: str
    lines: list[dict[str, Any]]
    shard_size: int
    answers: dict[tuple[int, int], Expected] = field(default_factory=dict)
    batch_id: str | None = None
    cancelled: bool = False
    cancelled_requests: set[int] = field(default_factory=set)
    submitted_as: set[str] = field(default_factory=set)
    """The ids that its submissions gave; there may be one only."""
    rounding: Rounding | None = None
    """Of a real model: it may give another answer that is as right."""

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.key}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path


def stub_jobs(requests: int, batches: int, seed: int, tokens: int) -> list[Job]:
    """Batches for the stub, of ``tokens`` tokens a request in the mean; some ask for two choices."""
    lots = random.Random(seed)
    return [_stub_job(f"chaos-{number}", count, lots, tokens) for number, count in enumerate(_parts(requests, batches))]


def _parts(total: int, parts: int) -> list[int]:
    return [total * (number + 1) // parts - total * number // parts for number in range(parts)]


def _stub_job(key: str, count: int, lots: random.Random, tokens: int) -> Job:
    shift = lots.randrange(_LENGTHS)
    job = Job(key, [], shard_size=lots.choice((8, 16, 32)))
    for index in range(count):
        prompt = "p" * (1 + (shift + 37 * index) % _LENGTHS)
        limit = lots.randint(max(1, tokens // 2), tokens + tokens // 2)
        choices = 2 if lots.random() < 0.05 else 1
        fields = {"n": choices} if choices > 1 else {}
        job.lines.append({"prompt": prompt, "max_tokens": limit, **fields})
        for choice in range(choices):
            answer = Expected(expected_text(prompt, limit, choice), tuple(range(limit)))
            job.answers[index, choice] = answer
    return job


def real_jobs(model: Path, requests: int, batches: int, seed: int, tokens: int) -> list[Job]:
    """Batches for a real model, half of them greedy and half sampled, with the answers that it gives undisturbed."""
    lots = random.Random(seed)
    jobs = [_real_job(f"chaos-{number}", count, lots, tokens) for number, count in enumerate(_parts(requests, batches))]
    _answer(model, jobs)
    rounding = Rounding(model)
    for job in jobs:
        job.rounding = rounding
    return jobs


def _real_job(key: str, count: int, lots: random.Random, tokens: int) -> Job:
    job = Job(key, [], shard_size=lots.choice((4, 8)))
    for index in range(count):
        line: dict[str, Any] = {
            "prompt": f"{key} {index} " + "".join(lots.choices("abcdefgh ", k=lots.randint(1, 60))),
            "max_tokens": lots.randint(max(1, tokens // 2), tokens + tokens // 2),
            "temperature": 0.0,
        }
        if lots.random() < 0.5:
            line |= {"temperature": 0.8, "seed": lots.randrange(2**31), "top_p": 0.9}
            if lots.random() < 0.1:
                line["n"] = 2
        job.lines.append(line)
    return job


def _answer(model: Path, jobs: list[Job]) -> None:
    from batchjobs.store.rows import storable
    from batchjobs.types import SamplingParams
    from workers.engine import Engine, EngineConfig

    engine = Engine(str(model), EngineConfig(device="cpu", dtype="float32", num_blocks=600))
    for job in jobs:
        prompts = [line["prompt"] for line in job.lines]
        outputs = engine.generate(prompts, [SamplingParams.from_fields(line) for line in job.lines])
        for index, output in enumerate(outputs):
            for choice in output.choices:
                job.answers[index, choice.choice] = Expected(storable(choice.text), choice.token_ids)
