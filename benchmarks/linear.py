"""The native matrix product beside torch's own, on the products of SmolLM2-135M: GFLOP/s and GB/s of weights.

Run: python benchmarks/linear.py [--rows 1,16,64] [--dtype bfloat16] [--threads 2] [--seconds 1.0]

Both take turns in one process, so that both meet the same machine; the figure is the fastest of many short calls, by
the clock on the wall (`--process-time`: by the processor time of one thread, for busy machines; it needs --threads 1).
Each call meets other weights, more than a cache holds, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import workers.engine.native as native
from workers.engine.attention.compiler import load_kernel
from workers.engine.native.linear import LinearKernel

if TYPE_CHECKING:
    from collections.abc import Callable

# name: inputs, outputs of each weight, gated, residual
PRODUCTS = {
    "q, k, v": (576, (576, 192, 192), False, False),
    "output + residual": (576, (576,), False, True),
    "gate, up": (576, (1536, 1536), True, False),
    "down + residual": (1536, (576,), False, True),
    "lm_head": (576, (49152,), False, False),
}
COLD_BYTES = 150e6  # of weights that take turns


def copies(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Merged weights [sum of outputs, inputs], as many as do not fit a cache."""
    inputs, outputs, _, _ = PRODUCTS[name]
    count = int(COLD_BYTES // (inputs * sum(outputs) * dtype.itemsize)) + 1
    return [torch.randn(sum(outputs), inputs).mul_(inputs**-0.5).to(dtype) for _ in range(count)]


def ways(kernel: LinearKernel, name: str, rows: int, weights: list[torch.Tensor]) -> list[Callable[[], object]]:
    """The same product natively and by torch; torch adds and gates nothing, which is in its favour."""
    inputs, outputs, gated, residual = PRODUCTS[name]
    x, added = torch.randn(rows, inputs), torch.randn(rows, outputs[0])
    narrow = x.to(weights[0].dtype)
    half = len(weights) // 2  # neither meets weights that the other has just brought into the cache
    merged = itertools.cycle(weights[half:] + weights[:half])
    out = [torch.empty(rows, n) for n in (outputs[:1] if gated else outputs)]
    activation, plus = ("silu" if gated else None), (added if residual else None)
    calls = [
        kernel.prepare(x, torch.split(w, list(outputs)), gated=gated, activation=activation, residual=plus, out=out)[0]
        for w in weights
    ]
    turns = itertools.cycle(calls)
    return [lambda: next(turns)(), lambda: torch.nn.functional.linear(narrow, next(merged))]


def fastest(calls: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of the fastest call of each, taking turns."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for i, call in enumerate(calls):
            began = clock()
            call()
            best[i] = min(best[i], clock() - began)
        if turn >= 4 and time.perf_counter() > end:
            return best
    raise AssertionError


def main() -> None:
    """Print a line for each product and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,32,64,128,512")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    parser.add_argument("--process-time", action="store_true")
    asked = parser.parse_args()
    if asked.process_time and asked.threads != 1:
        parser.error("--process-time sees one thread: give --threads 1 too")
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    clock = time.thread_time if asked.process_time else time.perf_counter
    dtype = getattr(torch, asked.dtype)
    kernel = LinearKernel(load_kernel(Path(native.__file__).with_name("linear.cpp")))
    print(f"{asked.dtype}, {asked.threads} threads\n{'':18} {'rows':>5} {'native':>17} {'torch':>17} {'ratio':>6}")
    for name, (inputs, outputs, _, _) in PRODUCTS.items():
        weights = copies(name, dtype)
        numbers = inputs * sum(outputs)
        for rows in map(int, asked.rows.split(",")):
            ours, theirs = fastest(ways(kernel, name, rows, weights), asked.seconds, clock)
            work, size = 2e-9 * rows * numbers, 1e-9 * numbers * dtype.itemsize
            cells = [f"{work / t:5.0f} GF {size / t:5.1f} GB" for t in (ours, theirs)]
            print(f"{name:18} {rows:5} {cells[0]:>17} {cells[1]:>17} {theirs / ours:6.2f}", flush=True)


if __name__ == "__main__":
    main()
