"""How near the engine comes to what the device can do: prefill against the matrix peak, decode against the memory's
bandwidth, and how long the device has nothing to do.

What a span of steps needs is the difference of what two amounts of work need, as ``workers/bench/bound.py`` counts it:
in decode steps all weights once, and keys and values of all tokens before each new one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from batchjobs.types import SamplingParams
from ops.gpu import kinds, shapes
from ops.gpu.busy import busy_seconds
from ops.gpu.notes import Found, Notes
from ops.gpu.setup import Setup
from workers.bench.bound import Need, need
from workers.bench.system import OurEngine
from workers.engine.config import EngineConfig
from workers.engine.requests import EngineRequest
from workers.workloads import Work

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.pipeline import Step
    from workers.engine.results import StepResult

PREFILL_TURNS = 3
SETTLING_STEPS = 6  # decode steps that are not counted


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured. ``most`` is the largest number of sequences at a time."""

    context: int = 1024  # tokens of a prompt
    prompts: int = 64  # of a prefill turn
    sequences: tuple[int, ...] = (64, 256, 128)  # the ends first
    steps: int = 64
    profiled_steps: int = 24
    max_model_len: int = 2048

    @property
    def most(self) -> int:
        return max(self.sequences)


TINY = Amounts(context=20, prompts=3, sequences=(2, 4), steps=5, profiled_steps=3, max_model_len=128)


def section(notes: Notes, setup: Setup, shape: shapes.Shape) -> None:
    amounts = TINY if setup.tiny else Amounts()

    def start() -> tuple[OurEngine, Found]:
        begin = time.monotonic()
        config = shapes.small() if setup.tiny else shape.config()
        model = shapes.build(config, setup.device, torch.float32 if setup.tiny else torch.bfloat16)
        built = time.monotonic()
        engine_config = EngineConfig(max_requests_per_batch=amounts.most, max_model_len=amounts.max_model_len)
        ours = OurEngine(shapes.loaded(model, shape.name), engine_config)
        seconds = {"build_seconds": built - begin, "start_seconds": time.monotonic() - built}
        return ours, seconds | about(ours.engine)

    if (ours := notes.make("start", start, seconds=15)) is None:
        return
    notes.run("prefill", lambda: prefill(ours, amounts, setup.peak("flops")), seconds=10)
    for count in amounts.sequences:
        needed = 10 + count / 16
        notes.run(f"decode {count}", partial(decode, ours.engine, count, amounts, setup), seconds=needed)


def about(engine: Engine) -> Found:
    runner = engine.runner
    return {
        "dtype": engine.dtype,
        "attention": ", ".join(dict.fromkeys(backend.name for backend in runner.backends)),
        "recorded": kinds.is_recorded(engine),
        "page_size": runner.page_size,
        "pages": runner.num_pages,
        "max_batch_tokens": engine.scheduler.max_batch_tokens,
        "parameters": sum(parameter.numel() for parameter in runner.model.parameters()),
    }


def prompts(count: int, tokens: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Different from their first token on, so that nothing is shared."""
    rng = random.Random(5)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(tokens)) for _ in range(count)]


# ---------------------------------------------------------------------------------------------------------- prefill


def prefill(ours: OurEngine, amounts: Amounts, peak: float | None) -> Found:
    """Prompts of which one token each is made."""
    work = [Work(ids, 1) for ids in prompts(amounts.prompts, amounts.context, ours.engine.vocab_size)]
    ours.run(work[: max(1, len(work) // 8)])
    seconds = statistics.median(ours.run(work).seconds for _ in range(PREFILL_TURNS))
    needed = need(ours.engine, work, shares=False)
    tokens = amounts.prompts * amounts.context
    found: Found = {"tokens_per_second": tokens / seconds, "seconds": seconds, "prompts": amounts.prompts}
    if needed is not None:
        found |= {"flops": needed.flops / seconds, "share_of_peak": share(needed.flops, seconds, peak)}
    return found


def share(needed: float, seconds: float, rate: float | None) -> float | None:
    """Of what ``rate`` a second would have done in that time; None where the rate is not known."""
    return None if rate is None else needed / rate / seconds


# ----------------------------------------------------------------------------------------------------------- decode


def decode(engine: Engine, count: int, amounts: Amounts, setup: Setup) -> Found:
    """Steps in which every one of ``count`` sequences makes a token, timed from one result to another."""
    engine.pool.forget()
    each = prompts(count, amounts.context, engine.vocab_size)
    most = min(amounts.max_model_len - amounts.context, _tokens(engine, count, amounts))
    from_decode = _start(engine, each, most, amounts)
    try:
        waited = _Waiting(engine)
        lengths = _generated(engine, count)
        begin = time.perf_counter()
        for _ in range(amounts.steps):
            engine.step()
        seconds = time.perf_counter() - begin
        made = sum(_generated(engine, count)) - sum(lengths)
        if made != count * amounts.steps:
            raise RuntimeError(f"{made} tokens in {amounts.steps} steps of {count} sequences: not all were decoding")
        span = span_need(engine, each, lengths, amounts.steps)
        found: Found = {
            "output_tokens_per_second": made / seconds,
            "step_ms": seconds / amounts.steps * 1e3,
            "host_busy_ms": (seconds - waited.stop()) / amounts.steps * 1e3,
            "mean_context": amounts.context + statistics.mean(lengths) + amounts.steps / 2,
            "steps_until_decode": from_decode,
        }
        if span is not None:
            found |= {
                "gigabytes_a_step": span.bytes / amounts.steps / 1e9,
                "bytes_per_second": span.bytes / seconds,
                "share_of_bandwidth": share(span.bytes, seconds, setup.peak("bytes_per_second")),
            }
        if setup.on_gpu:
            found |= idle(engine, amounts.profiled_steps, seconds / amounts.steps)
        return found
    finally:
        _end(engine, count)


def _tokens(engine: Engine, count: int, amounts: Amounts) -> int:
    """Enough for the steps that are measured, and for those in which others still compute their prompts."""
    filling = -(-count * amounts.context // engine.scheduler.max_batch_tokens)
    return 2 * filling + 2 * SETTLING_STEPS + amounts.steps + amounts.profiled_steps


def span_need(engine: Engine, each: Sequence[tuple[int, ...]], generated: Sequence[int], steps: int) -> Need | None:
    """What so many decode steps need behind these numbers of tokens."""
    after = need(engine, [Work(p, g + steps) for p, g in zip(each, generated, strict=True)], shares=False)
    before = need(engine, [Work(p, g) for p, g in zip(each, generated, strict=True)], shares=False)
    if after is None or before is None:
        return None
    return Need(flops=after.flops - before.flops, bytes=after.bytes - before.bytes)


def _start(engine: Engine, each: Sequence[tuple[int, ...]], most: int, amounts: Amounts) -> int:
    """Have every prompt computed. Returns the steps that it took."""
    sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    for index, ids in enumerate(each):
        engine.add(EngineRequest(index, ids, sampling))
    limit = 4 * (len(each) * (1 + amounts.context // engine.scheduler.max_batch_tokens) + 8)
    steps = 0
    while not _all_decode(engine, len(each)):
        engine.step()
        steps += 1
        if steps > limit:
            running = len(engine.scheduler.running)
            raise RuntimeError(f"only {running} of {len(each)} sequences have a place in the cache")
    for _ in range(SETTLING_STEPS):
        engine.step()
    return steps


def _all_decode(engine: Engine, count: int) -> bool:
    running = engine.scheduler.running
    return len(running) == count and all(sequence.generated for sequence in running)


def _generated(engine: Engine, count: int) -> list[int]:
    """Tokens of each request so far, in their order."""
    made = {sequence.request.request_id: sequence.generated for sequence in engine.scheduler.running}
    return [made[index] for index in range(count)]


def _end(engine: Engine, count: int) -> None:
    engine.settle()
    for index in range(count):
        engine.cancel(index)


class _Waiting:
    """How long the host waits for the device's results, from now on."""

    def __init__(self, engine: Engine) -> None:
        self._pipeline = engine._pipeline
        self._collect = self._pipeline.collect
        self._seconds = 0.0
        vars(self._pipeline)["collect"] = self._timed

    def stop(self) -> float:
        """Seconds."""
        del vars(self._pipeline)["collect"]
        return self._seconds

    def _timed(self, step: Step) -> StepResult:
        begin = time.perf_counter()
        try:
            return self._collect(step)
        finally:
            self._seconds += time.perf_counter() - begin


def idle(engine: Engine, steps: int, step_seconds: float) -> Found:
    """Which share of a step the device has nothing to do.

    The profiler tells how long it works in a step; how long a step takes was timed without it, because the profiler
    slows the host down.
    """
    try:
        busy = busy_seconds(lambda: [engine.step() for _ in range(steps)]) / steps
    except Exception as error:  # noqa: BLE001 - a machine without the profiler's library still has the other figures
        return {"idle_share": None, "idle_not_measured": f"{type(error).__name__}: {error}"[:200]}
    if not busy:
        return {"idle_share": None, "idle_not_measured": "the profiler saw no work of the device"}
    return {"busy_ms": busy * 1e3, "idle_share": max(0.0, 1 - busy / step_seconds)}
