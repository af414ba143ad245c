"""What is measured: something that runs a workload. This engine alone, with the logprob of each token kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from batchjobs.types import SamplingParams
from workers.bench.steps import StepClock
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.requests import EngineOutput, EngineRequest
from workers.workloads import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.engine.models import LoadedModel

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 4


@dataclass(frozen=True, slots=True)
class Run:
    """One turn of a system: the seconds it took, and the tokens made for each request."""

    seconds: float
    made: list[int]


class System(Protocol):
    name: str

    def run(self, work: Sequence[Work]) -> Run: ...


def warm_up(system: System, work: Sequence[Work]) -> None:
    """A few short answers: whatever is prepared on first use is ready then."""
    system.run([Work(item.prompt_ids, WARM_UP_TOKENS) for item in work[:WARM_UP_REQUESTS]])


def sampling_of(item: Work, *, respects_eos: bool) -> SamplingParams:
    """Greedy."""
    return SamplingParams(
        temperature=0,
        max_tokens=item.output_tokens,
        ignore_eos=not respects_eos,
        top_logprobs=item.top_logprobs,
    )


class OurEngine:
    """This engine, driven in this thread: every request is there when the clock starts.

    Each run begins with an empty prefix cache, so no round profits from the one before it.
    """

    name = "batchjobs"

    def __init__(self, model: str | LoadedModel, config: EngineConfig, *, respects_eos: bool = False) -> None:
        begin = time.perf_counter()
        self.engine = Engine(model, config)
        self.engine.warmup()
        self.load_seconds = time.perf_counter() - begin
        self.respects_eos = respects_eos
        self.steps = StepClock(self.engine)
        self.begun_at = 0.0  # wall clock of the last run's begin
        self.outputs: list[EngineOutput] = []

    @property
    def forward_kind(self) -> str:
        """``native`` where the model's forward runs in the engine's own kernels."""
        return str(getattr(self.engine.runner, "forward_kind", "transformers"))

    def run(self, work: Sequence[Work]) -> Run:
        self.engine.pool.forget()
        self.steps.clear()
        self.begun_at, begin = time.time(), time.perf_counter()
        for index, item in enumerate(work):
            sampling = sampling_of(item, respects_eos=self.respects_eos)
            self.engine.add(EngineRequest(index, item.prompt_ids, sampling))
        outputs = []
        while self.engine.has_work:
            outputs += self.steps.step()
        seconds = time.perf_counter() - begin
        self.outputs = sorted(outputs, key=lambda output: int(str(output.request_id)))
        return Run(seconds, [len(output.token_ids) for output in self.outputs])


class WithoutSharing:
    """The same engine, which computes every prompt from its beginning."""

    name = "batchjobs, nothing shared"

    def __init__(self, ours: OurEngine) -> None:
        self._ours = ours

    def run(self, work: Sequence[Work]) -> Run:
        pool = self._ours.engine.pool
        before, pool.sharing = pool.sharing, False
        try:
            return self._ours.run(work)
        finally:
            pool.sharing = before
