"""``batchjobs bench``: the measuring itself is in ``workers.bench``."""

from __future__ import annotations

import click

from batchjobs.cli.options import settings_of
from batchjobs.cli.worker import chosen_model


@click.command("bench")
@click.option("--workload", default="mixed-64", help="Name of the set of requests; default: mixed-64.")
@click.option("--model", "-m", help="Folder, hub id or .gguf file.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="float32",
    help="Of the weights; default: float32.",
)
@click.option(
    "--baseline", "baselines", multiple=True, help="Measure this beside it: transformers or static; may be repeated."
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="How often each system takes its turn; default: 3.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: torch's choice.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
def bench_command(
    ctx: click.Context,
    workload: str,
    model: str | None,
    dtype: str,
    baselines: tuple[str, ...],
    rounds: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure the engine's throughput on this machine, without queue and database."""
    name = chosen_model(settings_of(ctx, model=model).model)
    try:
        from workers.bench import bench
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"measuring needs the Python package {error.name}; install it with `pip install 'batchjobs[worker]'`"
        ) from None
    bench(
        workload=workload,
        model=name,
        dtype=dtype,
        baselines=baselines,
        rounds=rounds,
        threads=threads,
        as_json=as_json,
    )
