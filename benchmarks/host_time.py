"""The host's share of a step, without a model: plan, pack, prepare the sampling, take the tokens.

    python benchmarks/host_time.py [--running 64] [--waiting 100 1000000] [--steps 400] [--step-ms 45]

Prints microseconds of processor time a step for queues of different length, and what share they are of a step whose
forward takes so long. The work of a step depends on what runs, so the figures of a short and a long queue are the same
within noise. A million waiting requests take about two GB.
"""

from __future__ import annotations

import argparse
import gc
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
PROMPTS = 1000  # different ones


def scheduler_with(waiting: int, *, running: int, policy: str) -> Scheduler:
    rng = random.Random(0)
    pool = PagePool(running * 64, 16)
    scheduler = Scheduler(pool, max_batch_tokens=2048, max_requests_per_batch=running, policy=policy)
    sampling = SamplingParams(temperature=1.0, max_tokens=200)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(16, 200))) for _ in range(PROMPTS)]
    for number in range(waiting + running):
        request = EngineRequest(number, prompts[number % PROMPTS], sampling)
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


def step_times(waiting: int, *, running: int, steps: int, policy: str) -> list[float]:
    """Microseconds of this thread in each step: what others do on the machine is not in them."""
    scheduler = scheduler_with(waiting, running=running, policy=policy)
    gc.freeze()  # what only waits here would be walked through again and again
    for _ in range(50):  # everything that fits is running
        step(scheduler)
    times = []
    for _ in range(steps):
        started = time.thread_time()
        step(scheduler)
        times.append((time.thread_time() - started) * 1e6)
    gc.unfreeze()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1_000_000])
    parser.add_argument("--policies", nargs="+", default=["fifo", "prefix", "longest_first"])
    parser.add_argument("--step-ms", type=float, default=45.0, help="milliseconds of a forward to compare with")
    arguments = parser.parse_args()
    for policy in arguments.policies:
        for waiting in arguments.waiting:
            times = step_times(waiting, running=arguments.running, steps=arguments.steps, policy=policy)
            low, *_, high = statistics.quantiles(times, n=10)
            median = statistics.median(times)
            share = median / (median + arguments.step_ms * 1000)
            print(
                f"{policy:>13}  {waiting:>9,} waiting: {median:5.0f} µs a step ({low:.0f} to {high:.0f} for four in "
                f"five), {share:.1%} of a step with a forward of {arguments.step_ms:g} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
