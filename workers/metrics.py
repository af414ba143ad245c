"""A worker's metrics for Prometheus: gauges and counters read from the engine when they are scraped, histograms filled
as things happen.

Kept true here:
- Counters never go down while the process lives, also where the engine's own totals begin anew.
- No label has a value for each batch, request or prompt.
- What the engine's thread has to do is small: one entry a step, and one a token when its request has ended.

docs/metrics.md says what each metric means.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from batchjobs.metrics_server import MetricsServer
from batchjobs.types import FinishReason
from workers.engine.observer import EngineObserver

if TYPE_CHECKING:
    from workers.engine.loop import EngineLoop
    from workers.engine.requests import EngineOutput, EngineStats
    from workers.engine.scheduler import Scheduled
    from workers.engine.sequence import Sequence

log = logging.getLogger("batchjobs.worker")

UpdateResult: TypeAlias = Literal["done", "refused", "failed"]
UPDATE_RESULTS: tuple[UpdateResult, ...] = get_args(UpdateResult)

# From a GPU's small steps to a big model on a CPU that reads a long prompt.
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 30)
E2E_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)

_COUNTERS = {
    "prompt_tokens": ("batchjobs_prompt_tokens_total", "Prompt tokens computed, again after preemption too"),
    "generated_tokens": ("batchjobs_generation_tokens_total", "Tokens generated"),
    "preemptions": ("batchjobs_num_preemptions_total", "Sequences that gave way for want of memory"),
    "steps": ("batchjobs_engine_steps_total", "Steps of the engine"),
}
_GAUGES = {
    "running": ("batchjobs_num_requests_running", "Choices of requests that get tokens now"),
    "waiting": ("batchjobs_num_requests_waiting", "Choices of requests that the engine holds and does not run"),
    "suspended": ("batchjobs_num_requests_suspended", "Choices of requests that stand still with their batch's pause"),
    "kv_usage_ratio": ("batchjobs_kv_cache_usage_ratio", "Share of the pages of the KV cache in use, 0 to 1"),
    "offloaded_pages": ("batchjobs_kv_pages_offloaded", "Pages of the KV cache that lie in CPU memory now"),
}
_WORST_LAST = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.CANCELLED)


class Distribution:
    """Values counted by size. By bisection, because one value comes for each token: in an eighth of the time that the
    histogram of prometheus_client takes. Not thread-safe."""

    def __init__(self, name: str, about: str, bounds: SequenceOf[float]) -> None:
        self._name, self._about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def family(self) -> Metric:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class Totals:
    """The engine's totals, summed up over engines: where one is lower than before, it has begun anew."""

    def __init__(self) -> None:
        self._before = dict.fromkeys(_COUNTERS, 0)  # of engines that are gone
        self._last = dict.fromkeys(_COUNTERS, 0)

    def note(self, stats: EngineStats) -> None:
        for name in _COUNTERS:
            now = getattr(stats, name)
            if now < self._last[name]:
                self._before[name] += self._last[name]
            self._last[name] = now

    def __getitem__(self, name: str) -> int:
        return self._before[name] + self._last[name]


class Observers(EngineObserver):
    """Tells several observers of everything, in turn."""

    def __init__(self, *observers: EngineObserver) -> None:
        self._observers = observers

    def admitted(self, sequence: Sequence) -> None:
        for observer in self._observers:
            observer.admitted(sequence)

    def preempted(self, sequence: Sequence, *, offloaded: bool) -> None:
        for observer in self._observers:
            observer.preempted(sequence, offloaded=offloaded)

    def left(self, sequence: Sequence) -> None:
        for observer in self._observers:
            observer.left(sequence)

    def planned(self, step: int, plan: SequenceOf[Scheduled], started: float, ended: float) -> None:
        for observer in self._observers:
            observer.planned(step, plan, started, ended)

    def computed(self, step: int, started: float, ended: float) -> None:
        for observer in self._observers:
            observer.computed(step, started, ended)

    def sampled(self, step: int, sequence: Sequence, token: int) -> None:
        for observer in self._observers:
            observer.sampled(step, sequence, token)


class StepTokens(EngineObserver):
    """Counts the rows of each step."""

    def __init__(self, figures: WorkerFigures) -> None:
        self._figures = figures

    def planned(self, step: int, plan: SequenceOf[Scheduled], started: float, ended: float) -> None:
        self._figures.step(sum(part.count for part in plan))


class WorkerFigures(Collector):
    """What is known of one worker's engine, as families of metrics. Thread-safe."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._totals = Totals()
        self._finished = dict.fromkeys(FinishReason, 0)
        self._updates = dict.fromkeys(UPDATE_RESULTS, 0)
        self._looked_up = self._found = 0
        self._step_tokens = Distribution("batchjobs_step_tokens", "Tokens in one packed step", STEP_TOKENS)
        self._first_token = Distribution(
            "batchjobs_time_to_first_token_seconds",
            "From the start of a request in the engine to its first token",
            FIRST_TOKEN_SECONDS,
        )
        self._inter_token = Distribution(
            "batchjobs_inter_token_latency_seconds", "From one token of an answer to the next", INTER_TOKEN_SECONDS
        )
        self._e2e = Distribution(
            "batchjobs_e2e_request_latency_seconds",
            "From the start of a request in the engine to its last token",
            E2E_SECONDS,
        )

    # What happens

    def step(self, tokens: int) -> None:
        with self._lock:
            self._step_tokens.observe((tokens,))

    def finished(self, choices: SequenceOf[EngineOutput]) -> None:
        times = [choice.token_times for choice in choices if choice.token_times]
        with self._lock:
            self._totals.note(self._loop.stats())
            self._finished[max((choice.finish_reason for choice in choices), key=_WORST_LAST.index)] += 1
            if not times:
                return
            self._looked_up += choices[0].prompt_tokens
            self._found += choices[0].cached_tokens
            self._first_token.observe((min(of_choice[0] for of_choice in times),))
            self._e2e.observe((max(of_choice[-1] for of_choice in times),))
            for of_choice in times:
                self._inter_token.observe(after - before for before, after in pairwise(of_choice))

    def updated(self, result: UpdateResult) -> None:
        with self._lock:
            self._totals.note(self._loop.stats())
            self._updates[result] += 1

    # What is scraped

    def collect(self) -> Iterator[Metric]:
        with self._lock:  # the totals too are read within it: older ones must not come after newer ones
            stats = self._loop.stats()
            self._totals.note(stats)
            families = [*self._gauges(stats), *self._counters(), *self._histograms()]
        yield from families

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for field, (name, about) in _GAUGES.items():
            yield GaugeMetricFamily(name, about, getattr(stats, field, 0))
        paused = float(self._loop.is_paused)
        yield GaugeMetricFamily("batchjobs_worker_paused", "1 while the worker's engine stands still", paused)
        engine = self._loop.engine
        model = {"model": engine.model_name, "version": engine.model_version}
        about = "The model that the worker serves; always 1"
        yield InfoMetricFamily("batchjobs_model", about, {**model, "dtype": engine.dtype, "device": engine.device})

    def _counters(self) -> Iterator[Metric]:
        for field, (name, about) in _COUNTERS.items():
            yield CounterMetricFamily(name, about, self._totals[field])
        about = "Prompt tokens of finished requests that were looked up in the prefix cache"
        yield CounterMetricFamily("batchjobs_prefix_cache_queries_total", about, self._looked_up)
        about = "Prompt tokens of finished requests that were found in the prefix cache"
        yield CounterMetricFamily("batchjobs_prefix_cache_hits_total", about, self._found)
        about = "Requests that the engine has finished, by the worst of their choices"
        finished = CounterMetricFamily("batchjobs_requests_finished_total", about, labels=["finish_reason"])
        for reason, count in self._finished.items():
            finished.add_metric([reason.value], count)
        yield finished
        updates = CounterMetricFamily("batchjobs_model_updates_total", "Model updates, by result", labels=["result"])
        for result, count in self._updates.items():
            updates.add_metric([result], count)
        yield updates

    def _histograms(self) -> Iterator[Metric]:
        for distribution in (self._step_tokens, self._first_token, self._inter_token, self._e2e):
            yield distribution.family()


class WorkerMetrics:
    """One worker's metrics, and the server that shows them.

    Args:
        loop: Around the engine. Nothing of it is changed: set ``loop.engine.observer`` to :attr:`observer`.
        chained: Another observer that is to be told of everything too.
    """

    def __init__(self, loop: EngineLoop, *, chained: EngineObserver | None = None) -> None:
        self._figures = WorkerFigures(loop)
        self._server: MetricsServer | None = None
        mine = StepTokens(self._figures)
        self.observer: EngineObserver = mine if chained is None else Observers(chained, mine)
        self.registry = CollectorRegistry()
        self.registry.register(self._figures)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def finished(self, choices: SequenceOf[EngineOutput]) -> None:
        """A request has its outcome: all of its choices. From any thread."""
        self._figures.finished(choices)

    def updated(self, result: UpdateResult) -> None:
        """An update of the model was done, refused, or failed and rolled back."""
        self._figures.updated(result)

    def serve(self, host: str, port: int) -> int:
        """Starts to serve in a thread of its own; the real port, which may be asked for as 0.

        Raises:
            UsageError: The address or the port cannot be had.
        """
        if self._server is None:
            self._server = MetricsServer(self.registry, host, port)
        return self._server.port

    def close(self) -> None:
        """Stops serving. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


@contextmanager
def served_metrics(loop: EngineLoop, host: str, port: int | None) -> Iterator[WorkerMetrics | None]:
    """A worker's metrics, served within the block; None without a port. Raises UsageError where it cannot be had."""
    if port is None:
        yield None
        return
    metrics = WorkerMetrics(loop, chained=loop.engine.observer)
    log.info("metrics are at http://%s:%d/metrics", host, metrics.serve(host, port))
    loop.engine.observer = metrics.observer
    try:
        yield metrics
    finally:
        metrics.close()
