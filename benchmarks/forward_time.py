"""Where the native forward's time goes, by kind of operation, and what the host adds to each step.

    python benchmarks/forward_time.py [--model M] [--dtype D] [--threads N] [--cached TOKENS]

Steps of 1, 16 and 64 decode rows and of a prefill. Times are of the calling thread's processor, the least of several
runs: with one thread they hold on a busy machine too; with more, waiting for other threads counts.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import numpy as np
import torch

from batchjobs.models import resolve_model
from workers.engine import Engine, EngineConfig
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.runner import Runner

RUNS = 8


def batch(sequences: int, count: int, cached: int, page_size: int) -> PackedBatch:
    """``count`` rows of each sequence behind ``cached`` ones; the logits of the last row of each are wanted."""
    width = -(-(cached + count) // page_size)
    tables = 1 + np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    starts = np.arange(0, sequences * count + 1, count, dtype=np.int32)
    rows = PackedRows(starts, np.full(sequences, cached, np.int32), tables, page_size)
    ids = np.random.default_rng(0).integers(3, 90, sequences * count)
    none, last = np.zeros(0, np.int64), starts[1:].astype(np.int64) - 1
    positions = np.tile(np.arange(cached, cached + count), sequences)
    return PackedBatch(ids, positions, none, none, last, last, none, none, [rows])


@torch.inference_mode()
def measure(runner: Runner, step: PackedBatch) -> tuple[Counter[str], float]:
    """Milliseconds by kind of operation, and those of the whole step besides."""
    forward = runner.native
    assert forward is not None
    least, whole = np.full(len(forward.kinds), np.inf), np.inf
    for _ in range(RUNS):
        seconds = np.zeros(len(forward.kinds))
        runner.backends[0].begin(step.rows[0])
        forward(torch.from_numpy(step.input_ids), step.positions, step.sampled_rows, seconds)
        least = np.minimum(least, seconds)
        began = time.thread_time()
        runner.forward(step, ())
        whole = min(whole, time.thread_time() - began)
    by_kind: Counter[str] = Counter()
    for kind, seconds_of_one in zip(forward.kinds, least, strict=True):
        by_kind[kind] += seconds_of_one * 1e3
    return by_kind, whole * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cached", type=int, default=150)
    options = parser.parse_args()
    config = EngineConfig(dtype=options.dtype, device="cpu", num_blocks=2000, threads=options.threads)
    runner = Engine(resolve_model(options.model), config).runner
    if runner.forward_kind != "native" or len(runner.groups) > 1:
        raise SystemExit("this model has no native forward, or windows of different length")
    for tensor in runner.cache.tensors:
        tensor.normal_()  # untouched pages of memory are all the same one, and always in the processor's cache
    for sequences, count, cached in (
        (1, 1, options.cached),
        (16, 1, options.cached),
        (64, 1, options.cached),
        (4, 60, 0),
    ):
        by_kind, whole = measure(runner, batch(sequences, count, cached, runner.page_size))
        print(f"{sequences} x {count} rows behind {cached}: {whole:.1f} ms", end="")
        print(", of these", ", ".join(f"{kind} {took:.2f}" for kind, took in by_kind.most_common() if took >= 0.005))


if __name__ == "__main__":
    main()
