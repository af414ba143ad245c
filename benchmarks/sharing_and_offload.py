"""What prefix sharing and CPU offload save, on a real model: the same work with and without each.

    python benchmarks/sharing_and_offload.py [--model M] [--rounds 1]

Prints a line for each run. Both answers are compared token by token; the exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from batchjobs.models import resolve_model
from workers.engine import Engine, EngineConfig, EngineOutput, SamplingParams

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, REQUESTS = 4, 256, 16, 64


def prompts_with_shared_beginnings() -> list[list[int]]:
    rng = random.Random(0)
    beginnings = [[rng.randint(1000, 20000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    own = [[rng.randint(1000, 20000) for _ in range(OWN_TOKENS)] for _ in range(REQUESTS)]
    return [[*rng.choice(beginnings), *mine] for mine in own]


def run(engine: Engine, prompts: list[list[int]], answer: int, label: str) -> list[EngineOutput]:
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    s = engine.stats()
    print(
        f"{label:<28} {seconds:6.1f} s  {s.prompt_tokens:6,} prompt tokens computed, {s.cached_tokens:6,} cached, "
        f"{s.preemptions:3} gave way ({s.offloaded_sequences} offloaded), {s.recomputed_tokens:5,} tokens again",
        flush=True,
    )
    return outputs


def prefix_sharing(model: str) -> bool:
    prompts = prompts_with_shared_beginnings()
    answers = []
    for label, options in (
        ("no sharing", {"allow_block_sharing": False}),
        ("fifo, sharing", {}),
        ("prefix policy, sharing", {"scheduler_type": "prefix"}),
    ):
        engine = Engine(model, EngineConfig(device="cpu", **options))  # type: ignore[arg-type]
        answers.append([o.token_ids for o in run(engine, prompts, 16, label)])
    return answers[0] == answers[1] == answers[2]


def offload(model: str) -> bool:
    """32 sequences that need 32 * 12 pages in a cache of a quarter; all start at once, so they have to give way."""
    rng = random.Random(1)
    prompts = [[rng.randint(1000, 20000) for _ in range(96)] for _ in range(32)]
    answers = []
    for label, pages, space in (("ample cache", 32 * 12, 0.0), ("a quarter, offload off", 96, 0.0), ("on", 96, 2.0)):
        engine = Engine(model, EngineConfig(device="cpu", num_blocks=pages + 1, cpu_offload_space=space))
        engine.scheduler.expected_answer_share = 0.0  # else sequences would wait for room instead of giving way
        answers.append([o.token_ids for o in run(engine, prompts, 96, label)])
    return answers[0] == answers[1] == answers[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the bundled SmolLM2")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    same = all(prefix_sharing(model) and offload(model) for _ in range(arguments.rounds))
    print("all answers are the same" if same else "ANSWERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
