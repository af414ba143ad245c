"""The host's share of a step, without a model: plan, pack, prepare the sampling, take the tokens.

    python benchmarks/host_time.py [--running 64] [--steps 400] [--rounds 5]

Prints microseconds a step for queues of different length. The work of a step depends on what runs, so the figures of a
short and a long queue are the same within noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from batchjobs.types import SamplingParams
from workers.engine.batch import pack
from workers.engine.pages import PagePool
from workers.engine.requests import EngineRequest
from workers.engine.sampling_rows import sampling_rows
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

VOCAB_SIZE = 50_000


def scheduler_with(waiting: int, *, running: int, policy: str) -> Scheduler:
    rng = random.Random(0)
    pool = PagePool(running * 64, 16)
    scheduler = Scheduler(pool, max_batch_tokens=2048, max_requests_per_batch=running, policy=policy)
    sampling = SamplingParams(temperature=1.0, max_tokens=200)
    for number in range(waiting + running):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(16, 200)))
        request = EngineRequest(number, prompt, sampling)
        scheduler.add(Sequence(request, limit=sampling.max_tokens, seed=number, stop_ids=frozenset({1})))
    return scheduler


def step(scheduler: Scheduler) -> None:
    """What the host does in a step; the tokens are those that a device would have given."""
    plan = scheduler.schedule()
    pack(plan, scheduler.tables, scheduler.pool.page_size)
    sampling = [part.sequence for part in plan if part.samples]
    sampling_rows(sampling, VOCAB_SIZE)
    now = time.monotonic()
    for number, sequence in enumerate(sampling):
        sequence.in_flight -= 1
        sequence.accept(2 + number, -1.0, None, now)
        if sequence.is_finished:
            scheduler.finish(sequence)


def microseconds_a_step(waiting: int, *, running: int, steps: int, policy: str) -> float:
    scheduler = scheduler_with(waiting, running=running, policy=policy)
    for _ in range(50):  # everything that fits is running
        step(scheduler)
    started = time.perf_counter()
    for _ in range(steps):
        step(scheduler)
    return (time.perf_counter() - started) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 100_000])
    arguments = parser.parse_args()
    for policy in ("fifo", "prefix", "longest_first"):
        for waiting in arguments.waiting:
            times = [
                microseconds_a_step(waiting, running=arguments.running, steps=arguments.steps, policy=policy)
                for _ in range(arguments.rounds)
            ]
            low, median, high = min(times), statistics.median(times), max(times)
            print(f"{policy:>13}  {waiting:>7,} waiting: {median:6.0f} µs a step ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
