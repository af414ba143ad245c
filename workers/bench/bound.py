"""How fast this machine could do a workload at best: its arithmetic at the measured matrix peak, or its bytes at the
measured bandwidth, whichever takes longer.

Both are measured on the spot, because machines differ and drift. The bound is no promise: the two never overlap wholly,
matrices of few rows do not reach the peak, and whatever else a step does is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.workloads import Work

PEAK_SIZE, PEAK_ROUNDS = 2048, 5
READ_BYTES, READ_ROUNDS = 2**29, 5


@dataclass(frozen=True, slots=True)
class Machine:
    """``flops`` is the faster of float32 and the model's dtype, because an engine may compute in either."""

    flops: float  # a second
    read_bytes: float  # a second


@dataclass(frozen=True, slots=True)
class Need:
    """What a workload takes at least: operations (a multiplication and an addition count two) and bytes of memory."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        return max(self.flops / machine.flops, self.bytes / machine.read_bytes)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of a few short turns each."""
    kinds = {torch.float32, dtype}
    if device.type == "cpu":
        kinds.discard(torch.float16)  # whose products are so slow there that measuring them takes minutes
    return Machine(max(_matrix_peak(device, kind) for kind in kinds), _bandwidth(device))


def need(engine: Engine, work: Sequence[Work], *, shares: bool = True) -> Need | None:
    """What this model has to do for this work; None where it cannot be told (models with experts).

    Every token but an answer's last one passes through all layers once; tokens of a beginning that is shared count
    once. The head is computed for the tokens that are sampled. All weights are read once in each of the fewest steps
    that could do, and keys and values once for each token of an answer, and once more for each prompt.
    """
    model, runner = engine.runner.model, engine.runner
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        return None
    head = model.get_output_embeddings().weight
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} | {id(head)}
    linear = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    windows = [group.window for group in runner.groups for _ in group.layers]
    known = _shared_tokens([item.prompt_ids for item in work]) if shares else [0] * len(work)
    rows = seen = read = 0
    for item, shared in zip(work, known, strict=True):
        prompt, end = len(item.prompt_ids), len(item.prompt_ids) + item.output_tokens - 1
        rows += end - shared
        seen += sum(_seen(end, window) - _seen(shared, window) for window in windows)
        read += sum(_seen(end, window) - _seen(prompt, window) + prompt for window in windows)
    output = sum(item.output_tokens for item in work)
    together = engine.config.max_requests_per_batch
    steps = max(-(-output // together), *(item.output_tokens for item in work))
    per_layer = runner.cache.page_bytes * len(runner.groups) / runner.page_size / len(windows)  # bytes a token
    return Need(
        flops=2 * rows * linear + 2 * output * head.numel() + 4 * width * seen,
        bytes=steps * (linear + head.numel()) * head.element_size() + read * per_layer,
    )


def _seen(tokens: int, window: int | None) -> int:
    """Keys that the first ``tokens`` rows of a sequence see altogether."""
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * (window or 0)


def _shared_tokens(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each prompt, how many leading tokens another one computes as well and before it; the last token never."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])
    shared = [0] * len(prompts)
    for before, index in pairwise(order):
        pairs = zip(prompts[before], prompts[index], strict=False)
        common = next((place for place, (one, other) in enumerate(pairs) if one != other), len(prompts[before]))
        shared[index] = min(common, len(prompts[index]) - 1)
    return shared


@torch.inference_mode()
def _matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=device).to(dtype) for _ in range(2))
    return 2 * PEAK_SIZE**3 / _fastest(lambda: torch.mm(a, b), device, PEAK_ROUNDS)


@torch.inference_mode()
def _bandwidth(device: torch.device) -> float:
    numbers = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / _fastest(numbers.sum, device, READ_ROUNDS)


def _fastest(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one warms up
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
