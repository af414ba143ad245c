"""Throughput of the engine on a named workload, side by side with other systems in the same process.

The systems take turns, round by round, so that a machine whose speed drifts slows them alike. Each must make the asked
number of tokens for every request, greedy and with end-of-sequence tokens ignored, or the run fails.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from batchjobs.errors import BatchjobsError, UsageError
from batchjobs.models import resolve_model
from batchjobs.types import SamplingParams
from workers import workloads
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.models import TORCH_DTYPES, locate, quiet_transformers
from workers.engine.requests import EngineOutput, EngineRequest
from workers.engine.static import generate_in_static_batches
from workers.workloads import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 4
PEER_SEQUENCES = 16  # at which transformers' continuous batching is fastest on a CPU


class System(Protocol):
    """Something that can run a workload. ``run`` returns the seconds it took and the tokens made for each request."""

    name: str

    def run(self, work: Sequence[Work]) -> tuple[float, list[int]]: ...


class OurEngine:
    """This engine, logprob of each token kept."""

    name = "batchjobs"

    def __init__(self, model: str, dtype: str, max_requests: int) -> None:
        self.engine = Engine(model, EngineConfig(dtype=dtype, device="cpu", max_requests_per_batch=max_requests))
        self.outputs: list[EngineOutput] = []

    def run(self, work: Sequence[Work]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        for index, item in enumerate(work):
            sampling = SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True)
            self.engine.add(EngineRequest(index, item.prompt_ids, sampling))
        outputs = []
        while self.engine.has_work:
            outputs += self.engine.step()
        seconds = time.perf_counter() - begin
        self.outputs = sorted(outputs, key=lambda o: o.request_id)  # type: ignore[arg-type,return-value]
        return seconds, [len(o.token_ids) for o in self.outputs]


class TransformersContinuousBatching:
    """transformers' own continuous batching, at the number of sequences at which it is fastest on a CPU."""

    name = "transformers continuous batching"

    def __init__(self, model: str, dtype: str, max_requests: int) -> None:
        self.model = _load(model, dtype)
        self.max_requests = min(PEER_SEQUENCES, max_requests)

    def settings(self, work: Sequence[Work]) -> ContinuousBatchingConfig:
        """With as many pages as these requests can ever fill: by itself it takes, and fills, most of the memory."""
        page_size = ContinuousBatchingConfig().page_size
        longest = max(len(item.prompt_ids) + item.output_tokens for item in work)
        pages = self.max_requests * -(-longest // page_size)
        return ContinuousBatchingConfig(max_requests_per_batch=self.max_requests, num_blocks=pages)

    def run(self, work: Sequence[Work]) -> tuple[float, list[int]]:
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=8)
        settings = self.settings(work)
        begin = time.perf_counter()
        with (
            quiet_transformers(),
            torch.no_grad(),
            self.model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings
            ) as manager,
        ):
            for index, item in enumerate(work):
                manager.add_request(
                    list(item.prompt_ids), request_id=str(index), max_new_tokens=item.output_tokens, eos_token_id=-1
                )
            made: dict[str, int] = {}
            while len(made) < len(work):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise BatchjobsError(f"{self.name} stopped after {len(made)} of {len(work)} requests")
            seconds = time.perf_counter() - begin
        return seconds, [made[str(index)] for index in range(len(work))]


class StaticBatches:
    """transformers' ``generate`` over padded batches, each of which waits for its longest answer."""

    name = "static batches of 16"

    def __init__(self, model: str, dtype: str, max_requests: int) -> None:
        self.model = _load(model, dtype)
        self.batch_size = min(PEER_SEQUENCES, max_requests)

    def run(self, work: Sequence[Work]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        answers = generate_in_static_batches(
            self.model, [w.prompt_ids for w in work], [w.output_tokens for w in work], batch_size=self.batch_size
        )
        return time.perf_counter() - begin, [len(answer) for answer in answers]


BASELINES: dict[str, Callable[[str, str, int], System]] = {
    "transformers": TransformersContinuousBatching,
    "static": StaticBatches,
}


def bench(
    *,
    workload: str = "mixed-64",
    model: str | None = None,
    dtype: str = "float32",
    baselines: Sequence[str] = (),
    rounds: int = 3,
    threads: int | None = None,
    max_requests_per_batch: int = 64,
    as_json: bool = False,
) -> None:
    """Run the workload and print the figures: a table, or JSON with the keys of vLLM's throughput benchmark."""
    if unknown := [b for b in baselines if b not in BASELINES]:
        raise UsageError(f"no such baseline: {unknown[0]!r}; there are: {', '.join(BASELINES)}")
    if threads is not None:
        torch.set_num_threads(threads)
    work, source = workloads.workload(workload), resolve_model(model)
    systems: list[System] = [OurEngine(source, dtype, max_requests_per_batch)]
    systems += [BASELINES[b](source, dtype, max_requests_per_batch) for b in baselines]
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for system in systems:
        system.run([Work(w.prompt_ids, WARM_UP_TOKENS) for w in work[:WARM_UP_REQUESTS]])
    for number in range(rounds):
        for system in systems:
            took, made = system.run(work)
            if made != [w.output_tokens for w in work]:
                raise BatchjobsError(f"{system.name} did not make the asked number of tokens for every request")
            seconds[system.name].append(took)
            print(f"round {number + 1}/{rounds}: {system.name}: {took:.1f} s", file=sys.stderr, flush=True)
    report = _report(work, seconds, systems[0], workload, source, dtype)
    sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n" if as_json else _table(report))


def _report(
    work: Sequence[Work], seconds: dict[str, list[float]], ours: System, name: str, model: str, dtype: str
) -> dict[str, Any]:
    prompt, output = sum(len(w.prompt_ids) for w in work), sum(w.output_tokens for w in work)
    systems = []
    for system, times in seconds.items():
        rates = [output / t for t in times]
        ratios = [theirs / mine for mine, theirs in zip(seconds[ours.name], times, strict=True)]
        systems.append(
            {
                "name": system,
                "elapsed_time": statistics.median(times),
                "num_requests": len(work),
                "total_num_tokens": prompt + output,
                "requests_per_second": len(work) / statistics.median(times),
                "tokens_per_second": (prompt + output) / statistics.median(times),
                "output_throughput": statistics.median(rates),
                "output_throughput_min": min(rates),
                "output_throughput_max": max(rates),
                "slower_than_batchjobs": statistics.median(ratios),
                "slower_than_batchjobs_min": min(ratios),
                "slower_than_batchjobs_max": max(ratios),
            }
        )
    return {
        "workload": name,
        "model": model,
        "dtype": dtype,
        "rounds": len(seconds[ours.name]),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "attention": ours.engine.runner.backends[0].name if isinstance(ours, OurEngine) else None,
        "systems": systems,
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['workload']}: {report['systems'][0]['num_requests']} requests, "
        f"{report['total_input_tokens']} prompt and {report['total_output_tokens']} output tokens; "
        f"{report['dtype']}, {report['machine']}, attention: {report['attention']}",
        f"{'system':<36}{'seconds':>9}{'output tokens/s':>17}{'(min to max)':>18}{'batchjobs is faster by':>24}",
    ]
    for system in report["systems"]:
        spread = f"{system['output_throughput_min']:.0f} to {system['output_throughput_max']:.0f}"
        faster = "" if system["name"] == "batchjobs" else f"{system['slower_than_batchjobs']:.2f} x"
        lines.append(
            f"{system['name']:<36}{system['elapsed_time']:>9.1f}{system['output_throughput']:>17.0f}{spread:>18}{faster:>24}"
        )
    return "\n".join(lines) + "\n"


def _load(model: str, dtype: str) -> PreTrainedModel:
    with quiet_transformers():
        wanted = TORCH_DTYPES.get(dtype, torch.float32)
        return AutoModelForCausalLM.from_pretrained(**locate(model), dtype=wanted).eval()
