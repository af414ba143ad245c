"""The figures of a measurement: as JSON with the keys of vLLM's benchmarks, and as a table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from workers.bench.bound import Machine, Need
    from workers.workloads import Work

OURS = "batchjobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was run, and what came of it. ``runs`` has the seconds of each system's turns, ours first."""

    workload: str
    model: str
    dtype: str
    device: str
    work: Sequence[Work]
    runs: Mapping[str, Sequence[float]]
    tokens: Mapping[str, int]
    """Output tokens that each system made in a turn."""
    load_seconds: float
    forward: str
    attention: str
    figures: Mapping[str, Any]
    """Step times and latencies of this engine, of its median turn."""
    machine: Machine
    need: Need | None
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More about a system, by name."""


def report(measured: Measured) -> dict[str, Any]:
    """This engine's figures on the outermost level, and all systems' in ``systems``."""
    systems = [_system(measured, name) for name in measured.runs]
    ours = {name: value for name, value in systems[0].items() if name != "name" and not name.startswith("slower")}
    return {
        "workload": measured.workload,
        "model": measured.model,
        "dtype": measured.dtype,
        "rounds": len(measured.runs[OURS]),
        "total_input_tokens": _input_tokens(measured),
        "total_output_tokens": measured.tokens[OURS],
        **ours,
        **measured.figures,
        **_bound(measured),
        "load_seconds": measured.load_seconds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": measured.device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "forward": measured.forward,
        "attention": measured.attention,
        "systems": systems,
    }


def _input_tokens(measured: Measured) -> int:
    return sum(len(item.prompt_ids) for item in measured.work)


def _system(measured: Measured, name: str) -> dict[str, Any]:
    times, ours = measured.runs[name], measured.runs[OURS]
    prompt, output, requests = _input_tokens(measured), measured.tokens[name], len(measured.work)
    seconds = statistics.median(times)
    # By round, because the systems took turns: what slowed one slowed the other.
    slower = [theirs / mine * measured.tokens[OURS] / output for mine, theirs in zip(ours, times, strict=True)]
    return {
        "name": name,
        "elapsed_time": seconds,
        "duration": seconds,
        "num_requests": requests,
        "completed": requests,
        "total_num_tokens": prompt + output,
        "requests_per_second": requests / seconds,
        "request_throughput": requests / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "output_throughput": output / seconds,
        "output_throughput_min": output / max(times),
        "output_throughput_max": output / min(times),
        "slower_than_batchjobs": statistics.median(slower),
        "slower_than_batchjobs_min": min(slower),
        "slower_than_batchjobs_max": max(slower),
        "share_of_batchjobs": statistics.median([1 / ratio for ratio in slower]),
        **measured.details.get(name, {}),
    }


def _bound(measured: Measured) -> dict[str, Any]:
    machine, need = measured.machine, measured.need
    found: dict[str, Any] = {
        "matrix_peak_gflops": machine.flops / 1e9,
        "memory_read_gb_per_second": machine.read_bytes / 1e9,
        "bound_output_throughput": None,
        "bound_share": None,
    }
    if need is not None:
        best = need.seconds(machine)
        found |= {
            "needed_gflop": need.flops / 1e9,
            "needed_gb": need.bytes / 1e9,
            "bound_output_throughput": measured.tokens[OURS] / best,
            "bound_share": best / statistics.median(measured.runs[OURS]),
        }
    return found


# -------------------------------------------------------------------------------------------------------- for people


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{found['workload']}: {found['num_requests']} requests, "
        f"{found['total_input_tokens']} prompt and {found['total_output_tokens']} output tokens; "
        f"{found['dtype']}, {found['machine']}, forward: {found['forward']}, attention: {found['attention']}",
        f"{'system':<36}{'seconds':>9}{'output tokens/s':>17}{'(min to max)':>18}{'batchjobs is faster by':>24}",
    ]
    for system in found["systems"]:
        spread = f"{system['output_throughput_min']:.0f} to {system['output_throughput_max']:.0f}"
        ratio = system["slower_than_batchjobs"]
        faster = "" if system["name"] == OURS else f"{ratio:.{3 if ratio < 1.2 else 2}f} x"
        lines.append(
            f"{system['name']:<36}{system['elapsed_time']:>9.1f}{system['output_throughput']:>17.0f}"
            f"{spread:>18}{faster:>24}"
        )
    lines += [_steps_line(found), _latency_line(found), _bound_line(found)]
    lines.append(f"loading the model took {found['load_seconds']:.1f} s and is not in these figures")
    lines += [
        f"end to end: {system['share_of_batchjobs']:.1%} of the engine alone; "
        + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in system["seconds_of"].items())
        for system in found["systems"]
        if "seconds_of" in system
    ]
    return "\n".join(lines) + "\n"


def _steps_line(found: Mapping[str, Any]) -> str:
    told = (
        f"{found['num_steps']} steps: mean {found['mean_step_ms']:.1f} ms, median {found['median_step_ms']:.1f}, "
        f"p99 {found['p99_step_ms']:.1f}"
    )
    if found["host_share"] is None:
        return told
    return f"{told}; outside the forward {found['host_share']:.1%}, of which sampling {found['sampling_share']:.1%}"


def _latency_line(found: Mapping[str, Any]) -> str:
    names = {"ttft": "first token", "itl": "between tokens", "e2el": "whole answer"}
    told = [
        f"{words} {found[f'median_{name}_ms']:.0f} ms (p99 {found[f'p99_{name}_ms']:.0f})"
        for name, words in names.items()
    ]
    return "median latency: " + ", ".join(told)


def _bound_line(found: Mapping[str, Any]) -> str:
    machine = (
        f"measured here: matrix peak {found['matrix_peak_gflops']:.0f} GFLOP/s, memory "
        f"{found['memory_read_gb_per_second']:.1f} GB/s"
    )
    if found["bound_share"] is None:
        return f"{machine}; no bound is known for this kind of model"
    best, share = found["bound_output_throughput"], found["bound_share"]
    return f"{machine}: at best {best:.0f} tokens/s; this is {share:.0%} of it"
