"""A worker's metrics, read as Prometheus reads them, and compared with what the engine is known to have done."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.waiting import eventually
from workers.engine import EngineLoop, EngineObserver, EngineOutput, EngineRequest, SamplingParams
from workers.engine.requests import EngineStats
from workers.metrics import Distribution, Observers, WorkerMetrics

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"

# As Prometheus' parser names them: counters without _total.
FAMILIES = {
    "batchjobs_num_requests_running": "gauge",
    "batchjobs_num_requests_waiting": "gauge",
    "batchjobs_num_requests_suspended": "gauge",
    "batchjobs_kv_cache_usage_ratio": "gauge",
    "batchjobs_kv_pages_offloaded": "gauge",
    "batchjobs_worker_paused": "gauge",
    "batchjobs_model_info": "gauge",
    "batchjobs_prompt_tokens": "counter",
    "batchjobs_generation_tokens": "counter",
    "batchjobs_num_preemptions": "counter",
    "batchjobs_engine_steps": "counter",
    "batchjobs_prefix_cache_queries": "counter",
    "batchjobs_prefix_cache_hits": "counter",
    "batchjobs_requests_finished": "counter",
    "batchjobs_model_updates": "counter",
    "batchjobs_step_tokens": "histogram",
    "batchjobs_time_to_first_token_seconds": "histogram",
    "batchjobs_inter_token_latency_seconds": "histogram",
    "batchjobs_e2e_request_latency_seconds": "histogram",
}


def scrape(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, (sample, labels, found)
    return found[0]


class StubLoop:
    """Its engine's figures are what a test says."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = dict.fromkeys(
            ("running", "waiting", "prompt_tokens", "generated_tokens", "preemptions", "steps"), 0
        )
        self.is_paused = False
        self.engine = self
        self.model_name, self.model_version, self.dtype, self.device = "tiny", "sha256:1", "float32", "cpu"

    def stats(self) -> EngineStats:
        return EngineStats(**{"kv_usage_ratio": 0.0, **self.figures})


def output(*times: float, reason: FinishReason = FinishReason.STOP, **values: Any) -> EngineOutput:
    count = len(times)
    now = datetime(2026, 3, 1, tzinfo=UTC)
    given: dict[str, Any] = {
        "request_id": "r",
        "text": "",
        "finish_reason": reason,
        "token_ids": tuple(range(count)),
        "tokens": ("x",) * count,
        "logprobs": (0.0,) * count,
        "token_times": times,
        "top_logprobs": None,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "started_at": now,
        "first_token_at": now,
        "finished_at": now,
        "model_version": "v",
    }
    return EngineOutput(**(given | values))


@pytest.fixture
def loop() -> StubLoop:
    return StubLoop()


@pytest.fixture
def metrics(loop: StubLoop) -> Iterator[WorkerMetrics]:
    metrics = WorkerMetrics(loop)  # type: ignore[arg-type]
    yield metrics
    metrics.close()


def look(metrics: WorkerMetrics) -> dict[str, Metric]:
    """The same without the way over HTTP."""
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


class TestRealEngine:
    def test_known_work_gives_known_figures(self, llama: Path) -> None:
        prompts = engines.prompts(6, longest=20)
        prompts[0] = list(range(10, 20))
        prompts.append([*prompts[0], 7, 8, 9])
        budgets = [3, 7, 1, 5, 9, 4, 6]
        engine = engines.make(llama)
        loop = EngineLoop(engine)
        metrics = WorkerMetrics(loop)
        engine.observer = metrics.observer
        outputs: list[EngineOutput] = []

        def finished(done: EngineOutput) -> None:
            metrics.finished(done.choices)
            outputs.append(done)

        port = metrics.serve(HOST, 0)
        try:
            with loop:
                for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
                    chosen = SamplingParams(temperature=0, max_tokens=budget, ignore_eos=True)
                    loop.add(EngineRequest(number, tuple(prompt), chosen), finished)
                    eventually(lambda: outputs, "the first prompt is in the cache")
            seen = scrape(port)
        finally:
            metrics.close()
        stats, generated = engine.stats(), sum(budgets)
        assert len(outputs) == len(prompts)
        assert value(seen, "batchjobs_generation_tokens_total") == generated
        assert value(seen, "batchjobs_requests_finished_total", finish_reason="length") == len(prompts)
        assert value(seen, "batchjobs_time_to_first_token_seconds_count") == len(prompts)
        assert value(seen, "batchjobs_e2e_request_latency_seconds_count") == len(prompts)
        assert value(seen, "batchjobs_inter_token_latency_seconds_count") == generated - len(prompts)
        asked, found = sum(map(len, prompts)), sum(each.cached_tokens for each in outputs)
        assert found >= 8  # the last prompt begins like the first one
        assert value(seen, "batchjobs_prefix_cache_queries_total") == asked
        assert value(seen, "batchjobs_prefix_cache_hits_total") == found
        assert value(seen, "batchjobs_prompt_tokens_total") == asked - found
        # Each token that is drawn was one row of a step before, or the last row of the prompt.
        decoded = generated - len(prompts)
        assert value(seen, "batchjobs_step_tokens_sum") == asked - found + decoded + stats.recomputed_tokens
        assert value(seen, "batchjobs_step_tokens_count") == stats.steps
        assert value(seen, "batchjobs_engine_steps_total") == stats.steps
        for gauge in ("running", "waiting", "suspended"):
            assert value(seen, f"batchjobs_num_requests_{gauge}") == 0
        times = [each.token_times for each in outputs]
        total = value(seen, "batchjobs_time_to_first_token_seconds_sum")
        assert total == pytest.approx(sum(of_one[0] for of_one in times))
        total = value(seen, "batchjobs_e2e_request_latency_seconds_sum")
        assert total == pytest.approx(sum(of_one[-1] for of_one in times))
        gaps = sum(of_one[-1] - of_one[0] for of_one in times)
        assert value(seen, "batchjobs_inter_token_latency_seconds_sum") == pytest.approx(gaps)
        model = {"model": llama.name, "version": engine.model_version, "dtype": "float32", "device": "cpu"}
        assert value(seen, "batchjobs_model_info", **model) == 1

    def test_gauges_show_what_the_engine_holds(self, llama: Path) -> None:
        class Gate(EngineObserver):
            reached, open = threading.Event(), threading.Event()

            def planned(self, step: int, plan: Any, started: float, ended: float) -> None:
                if step == 3:
                    self.reached.set()
                    assert self.open.wait(60)

        engine = engines.make(llama, max_requests_per_batch=2)
        loop, gate = EngineLoop(engine), Gate()
        metrics = WorkerMetrics(loop, chained=gate)
        engine.observer = metrics.observer
        loop.start()
        try:
            with loop.pause(60):
                for number, prompt in enumerate(engines.prompts(3)):
                    chosen = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                    loop.add(EngineRequest(number, tuple(prompt), chosen))
                assert value(look(metrics), "batchjobs_worker_paused") == 1
            assert gate.reached.wait(60)
            seen = look(metrics)
            assert value(seen, "batchjobs_worker_paused") == 0
            assert value(seen, "batchjobs_num_requests_running") == 2
            assert value(seen, "batchjobs_num_requests_waiting") == 1
            assert 0 < value(seen, "batchjobs_kv_cache_usage_ratio") <= 1
            assert value(seen, "batchjobs_engine_steps_total") == 2
        finally:
            gate.open.set()
            assert loop.stop(60)


class TestNames:
    def test_all_promised_names_and_types_are_there(self, metrics: WorkerMetrics) -> None:
        seen = scrape(metrics.serve(HOST, 0))
        ours = {name: family.type for name, family in seen.items() if name.startswith("batchjobs_")}
        assert ours == FAMILIES

    def test_the_process_and_python_are_there_too(self, metrics: WorkerMetrics) -> None:
        assert value(look(metrics), "process_resident_memory_bytes") > 0
        assert "python_info" in look(metrics)

    def test_labels_with_few_values_show_all_of_them_from_the_beginning(self, metrics: WorkerMetrics) -> None:
        seen = look(metrics)
        for reason in FinishReason:
            assert value(seen, "batchjobs_requests_finished_total", finish_reason=reason.value) == 0
        for result in ("done", "refused", "failed"):
            assert value(seen, "batchjobs_model_updates_total", result=result) == 0

    def test_no_label_grows_with_the_work(self, metrics: WorkerMetrics) -> None:
        def series() -> set[tuple[str, ...]]:
            samples = [s for f in look(metrics).values() for s in f.samples if s.name.startswith("batchjobs_")]
            return {(sample.name, *map(str, sorted(sample.labels.items()))) for sample in samples}

        before = series()
        for number in range(20):
            metrics.finished([output(0.1, 0.2, request_id=f"custom-{number}")])
        assert series() == before

    def test_each_is_documented_and_nothing_else(self, metrics: WorkerMetrics) -> None:
        documented = set()
        worker = (ROOT / "docs" / "metrics.md").read_text().split("## Of a worker")[1].split("\n## ")[0]
        for line in worker.splitlines():
            if line.startswith("| `batchjobs_"):
                documented.add(line.split("`")[1].partition("{")[0].removesuffix("_total"))
        assert documented == set(FAMILIES)


TOTALS = {
    "prompt_tokens": "batchjobs_prompt_tokens_total",
    "generated_tokens": "batchjobs_generation_tokens_total",
    "preemptions": "batchjobs_num_preemptions_total",
    "steps": "batchjobs_engine_steps_total",
}


class TestCounters:
    @pytest.mark.parametrize("field", TOTALS)
    def test_they_go_on_where_an_engine_begins_anew(self, field: str, metrics: WorkerMetrics, loop: StubLoop) -> None:
        shown = []
        for now in (100, 130, 30, 31, 0, 5):
            loop.figures[field] = now
            shown.append(value(look(metrics), TOTALS[field]))
        assert shown == [100, 130, 160, 161, 161, 166]

    def test_what_was_counted_between_two_scrapes_is_kept(self, metrics: WorkerMetrics, loop: StubLoop) -> None:
        loop.figures["generated_tokens"] = 100
        metrics.finished([output(0.1)])
        loop.figures["generated_tokens"] = 0  # another model, and no scrape meanwhile
        metrics.updated("done")
        loop.figures["generated_tokens"] = 250
        assert value(look(metrics), "batchjobs_generation_tokens_total") == 350
        assert value(look(metrics), "batchjobs_model_updates_total", result="done") == 1

    def test_gauges_go_both_ways(self, metrics: WorkerMetrics, loop: StubLoop) -> None:
        for now in (5, 2):
            loop.figures |= {"running": now, "waiting": now + 1, "offloaded_pages": now + 2, "kv_usage_ratio": now / 8}
            seen = look(metrics)
            assert value(seen, "batchjobs_num_requests_running") == now
            assert value(seen, "batchjobs_num_requests_waiting") == now + 1
            assert value(seen, "batchjobs_kv_pages_offloaded") == now + 2
            assert value(seen, "batchjobs_kv_cache_usage_ratio") == now / 8

    def test_a_model_that_was_swapped_is_named(self, metrics: WorkerMetrics, loop: StubLoop) -> None:
        loop.model_version, loop.model_name = "sha256:2", 'odd "name"\n'
        (sample,) = look(metrics)["batchjobs_model_info"].samples
        assert (sample.labels["version"], sample.labels["model"]) == ("sha256:2", 'odd "name"\n')


class TestFinished:
    def test_a_request_counts_once_by_the_worst_of_its_choices(self, metrics: WorkerMetrics) -> None:
        stop, length, error, cancelled = (
            FinishReason.STOP,
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.CANCELLED,
        )
        for reasons in ([stop], [stop, length], [length, error, stop], [error, cancelled], [cancelled]):
            metrics.finished([output(0.1, reason=reason) for reason in reasons])
        seen = look(metrics)
        counts = {r: value(seen, "batchjobs_requests_finished_total", finish_reason=r.value) for r in FinishReason}
        assert counts == {stop: 1, length: 1, error: 1, cancelled: 2}

    def test_choices_share_their_prompt_and_have_tokens_of_their_own(self, metrics: WorkerMetrics) -> None:
        metrics.finished([output(0.5, 1.0, 2.0), output(0.25, 4.25, choice=1, cached_tokens=10)])
        seen = look(metrics)
        assert value(seen, "batchjobs_prefix_cache_queries_total") == 10
        assert value(seen, "batchjobs_prefix_cache_hits_total") == 4
        assert value(seen, "batchjobs_time_to_first_token_seconds_sum") == 0.25
        assert value(seen, "batchjobs_e2e_request_latency_seconds_sum") == 4.25
        assert value(seen, "batchjobs_inter_token_latency_seconds_count") == 3
        assert value(seen, "batchjobs_inter_token_latency_seconds_sum") == 5.5

    def test_one_without_a_token_has_no_times(self, metrics: WorkerMetrics) -> None:
        metrics.finished([output(reason=FinishReason.CANCELLED)])
        seen = look(metrics)
        assert value(seen, "batchjobs_requests_finished_total", finish_reason="cancelled") == 1
        assert value(seen, "batchjobs_time_to_first_token_seconds_count") == 0
        assert value(seen, "batchjobs_e2e_request_latency_seconds_count") == 0
        assert value(seen, "batchjobs_prefix_cache_queries_total") == 0

    def test_buckets_are_cumulative_and_closed_above(self) -> None:
        distribution = Distribution("d", "about", (1, 2.5))
        distribution.observe([0.5, 1, 1.5, 2.5, 99])
        counts = {s.labels["le"]: s.value for s in distribution.family().samples if s.name == "d_bucket"}
        assert counts == {"1.0": 2, "2.5": 4, "+Inf": 5}


class TestObservers:
    def test_all_are_told_of_everything_in_turn(self, loop: StubLoop) -> None:
        told: list[tuple[str, str]] = []

        def recorder(who: str) -> EngineObserver:
            class Recorder(EngineObserver):
                pass

            for event in events:
                setattr(Recorder, event, lambda *args, name=event, **more: told.append((who, name)))
            return Recorder()

        arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "admitted": ((None,), {}),
            "preempted": ((None,), {"offloaded": True}),
            "left": ((None,), {}),
            "planned": ((1, [], 0.0, 0.1), {}),
            "computed": ((1, 0.0, 0.1), {}),
            "sampled": ((1, None, 7), {}),
        }
        events = [name for name in vars(EngineObserver) if not name.startswith("_")]
        assert set(events) == set(arguments)
        both = Observers(recorder("a"), recorder("b"))
        for event, (positional, named) in arguments.items():
            getattr(both, event)(*positional, **named)
        assert told == [(who, event) for event in arguments for who in "ab"]

    def test_one_that_is_there_already_goes_on_hearing(self, llama: Path) -> None:
        class Steps(EngineObserver):
            rows = 0

            def planned(self, step: int, plan: Any, started: float, ended: float) -> None:
                self.rows += sum(part.count for part in plan)

        engine, steps = engines.make(llama), Steps()
        metrics = WorkerMetrics(EngineLoop(engine), chained=steps)
        engine.observer = metrics.observer
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        seen = look(metrics)
        metrics.close()
        assert steps.rows == value(seen, "batchjobs_step_tokens_sum") == 6


class TestServer:
    def test_a_port_in_use_is_refused_with_a_sentence(self, metrics: WorkerMetrics) -> None:
        with socket.create_server((HOST, 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(UsageError, match=f"metrics cannot be served on {HOST}:{port}: .* choose another port"):
                metrics.serve(HOST, port)
        assert metrics.serve(HOST, port) == port  # it may be tried again

    def test_an_address_of_no_machine_is_refused(self, metrics: WorkerMetrics) -> None:
        with pytest.raises(UsageError, match="metrics cannot be served on"):
            metrics.serve("not an address", 0)

    def test_closing_frees_the_port_and_may_be_repeated(self, metrics: WorkerMetrics) -> None:
        port = metrics.serve(HOST, 0)
        assert metrics.serve(HOST, 0) == port
        metrics.close()
        metrics.close()
        with pytest.raises(OSError):
            scrape(port)
        socket.create_server((HOST, port)).close()

    def test_two_workers_of_one_process_have_registries_of_their_own(self, loop: StubLoop) -> None:
        first, second = WorkerMetrics(loop), WorkerMetrics(loop)  # type: ignore[arg-type]
        first.finished([output(0.1)])
        seen = [value(look(each), "batchjobs_time_to_first_token_seconds_count") for each in (first, second)]
        first.close()
        second.close()
        assert seen == [1, 0]
