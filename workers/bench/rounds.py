"""A measurement from begin to end: load, warm up, let every system take its turn in each round, tell."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import torch

from batchjobs.errors import BatchjobsError, UsageError
from batchjobs.models import resolve_model
from batchjobs.settings import load_settings
from workers import workloads
from workers.bench.baselines import BASELINES
from workers.bench.bound import measure_machine, need
from workers.bench.delivery import EndToEnd, measured_settings
from workers.bench.latency import latencies
from workers.bench.own_file import work_of
from workers.bench.report import Measured, report, table
from workers.bench.system import OurEngine, Run, System, WithoutSharing, warm_up
from workers.engine.config import EngineConfig
from workers.workloads import Work

if TYPE_CHECKING:
    from batchjobs.settings import Settings
    from batchjobs.types import Request
    from workers.engine.engine import Engine


def bench(
    *,
    workload: str = "mixed-64",
    requests: Sequence[Request] | None = None,
    num_requests: int | None = None,
    respects_eos: bool = False,
    model: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    baselines: Sequence[str] = (),
    end_to_end: bool = False,
    settings: Settings | None = None,
    rounds: int = 3,
    threads: int | None = None,
    native_forward: bool | None = None,
    max_requests_per_batch: int = 64,
    as_json: bool = False,
) -> None:
    """Run the workload and print the figures: a table, or JSON with the keys of vLLM's benchmarks.

    Args:
        workload: Its name, or what the ``requests`` are called.
        requests: A workload of one's own.
        num_requests: Of a named workload; of ``requests`` the first ones.
        respects_eos: Answers may end by themselves.
        native_forward: As in :class:`EngineConfig`.
        end_to_end: Measure the way through queue and database too, in a private folder, or where ``settings`` say.

    Raises:
        UsageError: A name is unknown, or the options do not go together.
        BatchjobsError: A system did not do the whole work.
    """
    _check(baselines, respects_eos)
    if threads is not None:
        torch.set_num_threads(threads)
    source = resolve_model(model)
    known = None if requests is not None else workloads.workload(workload, num_requests)
    config = EngineConfig(
        dtype=dtype,
        device=device,
        max_requests_per_batch=max_requests_per_batch,
        threads=threads,
        native_forward=native_forward,
    )
    with ExitStack() as stack:
        ours = OurEngine(source, config, respects_eos=respects_eos)
        work = work_of(ours.engine, requests[:num_requests]) if known is None and requests is not None else known
        assert work is not None
        check_fit(ours.engine, work)
        systems: list[System] = [ours]
        if workload == "prefix":
            systems.append(WithoutSharing(ours))
        if end_to_end:
            plain = (settings or load_settings()).model_copy(update={"model": source})
            systems.append(EndToEnd(ours, stack.enter_context(measured_settings(plain, private=settings is None))))
        beside = ours.engine.dtype, max_requests_per_batch, ours.engine.device
        systems += [BASELINES[name](source, *beside) for name in dict.fromkeys(baselines)]
        rounds_run = _Rounds(ours, systems, work)
        rounds_run.run(rounds)
    measured = Measured(
        workload=workload,
        model=source,
        dtype=ours.engine.dtype,
        device=ours.engine.device,
        work=work,
        runs=rounds_run.seconds,
        tokens=rounds_run.tokens,
        load_seconds=ours.load_seconds,
        forward=ours.forward_kind,
        attention=ours.engine.runner.backends[0].name,
        figures=rounds_run.median_figures(),
        machine=measure_machine(ours.engine.runner.device, ours.engine.runner.model.dtype),
        need=need(ours.engine, rounds_run.done),
        details=rounds_run.details(),
    )
    found = report(measured)
    sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n" if as_json else table(found))


def _check(baselines: Sequence[str], respects_eos: bool) -> None:
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise UsageError(f"no such baseline: {unknown[0]!r}; there are: {', '.join(BASELINES)}")
    if respects_eos and baselines:
        raise UsageError("answers that end by themselves differ in length; leave --respect-eos or --baseline out")


def check_fit(engine: Engine, work: Sequence[Work]) -> None:
    """Raises UsageError where the model cannot take the workload."""
    highest = max(max(item.prompt_ids) for item in work)
    if highest >= engine.vocab_size:
        raise UsageError(
            f"the workload has token ids up to {highest}, and this model knows {engine.vocab_size} tokens: measure it "
            "with a file of its own (--workload FILE)"
        )
    longest = max(len(item.prompt_ids) + item.output_tokens for item in work)
    if longest > engine.max_model_len:
        raise UsageError(
            f"the workload has a request of {longest} tokens, prompt and answer, and this model's context is "
            f"{engine.max_model_len}: choose a shorter workload or a file of your own"
        )


class _Rounds:
    """``seconds`` of every turn and ``tokens`` of a turn, by system. ``done`` is the work with the lengths that the
    answers of our last turn had."""

    def __init__(self, ours: OurEngine, systems: Sequence[System], work: Sequence[Work]) -> None:
        self._ours, self._systems, self._work = ours, systems, work
        self.seconds: dict[str, list[float]] = {system.name: [] for system in systems}
        self.tokens: dict[str, int] = {}
        self.done: list[Work] = []
        self._figures: list[dict[str, Any]] = []  # of our turns
        self._parts: list[dict[str, float]] = []  # of the turns end to end

    def run(self, rounds: int) -> None:
        print(f"the model is loaded after {self._ours.load_seconds:.1f} s; warming up", file=sys.stderr, flush=True)
        for system in self._systems:
            warm_up(system, self._work)
        for number in range(1, rounds + 1):
            for system in self._systems:
                done = system.run(self._work)
                self._keep(system, done)
                print(f"round {number}/{rounds}: {system.name}: {done.seconds:.1f} s", file=sys.stderr, flush=True)

    def _keep(self, system: System, done: Run) -> None:
        wanted = [item.output_tokens for item in self._work]
        if done.made != wanted and not (self._ours.respects_eos and _is_within(done.made, wanted)):
            raise BatchjobsError(f"{system.name} did not make the asked number of tokens for every request")
        self.seconds[system.name].append(done.seconds)
        self.tokens[system.name] = sum(done.made)
        if system is self._ours:
            self.done = [replace(item, output_tokens=made) for item, made in zip(self._work, done.made, strict=True)]
            steps = self._ours.steps.figures()
            self._figures.append(steps | latencies(self._ours.outputs, self._ours.begun_at))
        elif isinstance(system, EndToEnd):
            self._parts.append(system.parts)

    def median_figures(self) -> dict[str, Any]:
        """Those of the turn whose time is the median one."""
        times = self.seconds[self._ours.name]
        return self._figures[times.index(statistics.median_low(times))]

    def details(self) -> dict[str, dict[str, Any]]:
        if not self._parts:
            return {}
        parts = {name: statistics.median(part[name] for part in self._parts) for name in self._parts[0]}
        return {EndToEnd.name: {"seconds_of": parts}}


def _is_within(made: Sequence[int], limits: Sequence[int]) -> bool:
    return len(made) == len(limits) and all(0 < count <= limit for count, limit in zip(made, limits, strict=True))
