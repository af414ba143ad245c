"""Runs an engine in which sequences have to give way again and again, however large its cache is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from workers.engine import Engine, EngineOutput, EngineRequest, SamplingParams

STEPS_BETWEEN = 3


def run_giving_way(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[EngineOutput]:
    """``generate``, with the youngest sequence sent back every third step, half of them without their pages."""
    host = engine.scheduler.host
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(number, tuple(prompt), sampling))
    outputs: dict[Hashable, EngineOutput] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = output
        steps += 1
        assert steps < 5000, "no end in sight"
        if steps % STEPS_BETWEEN == 0 and len(engine.scheduler.running) > 1:
            kept = host.take(host.free) if steps % (2 * STEPS_BETWEEN) else []  # no room in CPU memory this time
            engine.scheduler._preempt(engine.scheduler.running[-1])
            host.give_back(kept)
    return [outputs[number] for number in range(len(prompts))]
