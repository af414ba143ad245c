"""What certainty costs: the same work with checkpoints, leases and heartbeats as they are by default, and without.

    python -m benchmarks.delivery_cost --model DIR_OR_GGUF --requests 128 --max-tokens 256 --rounds 3

Whole workers on a fresh SQLite file and a private Redis, in turns, so that a machine that gets slower slows both. The
clock runs from the first claim to the last stored answer; loading the model does not count.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import click

from batchjobs.client import Client
from batchjobs.models import resolve_model
from batchjobs.settings import Settings, load_settings
from workers.daemon import run_worker
from workers.engine import Engine, EngineConfig, EngineLoop

WITHOUT = {"checkpoint_seconds": 0.0, "lease_seconds": 36_000.0, "heartbeat_seconds": 3_600.0}


def measure(engine: Engine, folder: Path, requests: int, max_tokens: int, changes: dict[str, float]) -> float:
    """Tokens generated a second."""
    settings: Settings = load_settings(home=folder, **changes)
    lines = ({"prompt": f"tale {n}", "max_tokens": max_tokens, "seed": n, "ignore_eos": True} for n in range(requests))
    with Client(settings) as client:
        client.submit(lines, temperature=0.8)
        begun = time.monotonic()
        run_worker(settings, EngineLoop(engine), burst=True, name="measured")
        seconds = time.monotonic() - begun
        (batch,) = client.batches()
        assert batch.counts.completed == requests
    return batch.tokens.completion / seconds


@click.command()
@click.option("--model")
@click.option("--requests", default=128, show_default=True)
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(model: str | None, requests: int, max_tokens: int, rounds: int) -> None:
    engine = Engine(resolve_model(model), EngineConfig(dtype="float32"))
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds + 1):  # the first one warms up
        for name, changes in (("without", WITHOUT), ("with", {})):
            with tempfile.TemporaryDirectory(prefix="bj-cost-") as folder:
                speed = measure(engine, Path(folder), requests, max_tokens, changes)
            if number:
                speeds[name].append(speed)
                click.echo(json.dumps({"round": number, "certainty": name, "tokens_per_second": round(speed, 1)}))
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    cost = 1 - medians["with"] / medians["without"]
    shown = {name: round(value, 1) for name, value in medians.items()}
    click.echo(json.dumps({"median": shown, "cost": f"{cost:.1%}"}))


if __name__ == "__main__":
    main()
