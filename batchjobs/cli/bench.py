"""``batchjobs bench``: the measuring itself is in ``workers.bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchjobs.cli.options import settings_of
from batchjobs.cli.worker import chosen_model

if TYPE_CHECKING:
    from batchjobs.types import Request

NAMED = ("mixed-64", "prefix", "long-tail", "random-1024-128")


@click.command("bench")
@click.option(
    "--workload",
    default="mixed-64",
    help="mixed-64 (default), prefix, long-tail, random-1024-128, or a file of requests.",
)
@click.option("--num-requests", type=click.IntRange(1), help="Requests of the workload; default: 64, or all of a file.")
@click.option("--respect-eos", "respects_eos", is_flag=True, help="Let answers end before their last token.")
@click.option("--model", "-m", help="Folder, hub id or .gguf file.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="float32",
    help="Of the weights; default: float32.",
)
@click.option("--device", default="cpu", help="cpu (default), cuda, cuda:N or auto.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=click.Choice(["transformers", "static"]),
    help="Measure this beside it: transformers or static; may be repeated.",
)
@click.option("--end-to-end", is_flag=True, help="Measure submit, queue, worker and SQL rows beside the engine alone.")
@click.option(
    "--configured", is_flag=True, help="End to end in the database and Redis of the settings, not in a private folder."
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="How often each system takes its turn; default: 3.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: torch's choice.")
@click.option(
    "--native-forward/--no-native-forward",
    default=None,
    help="Run the model in C++ on a CPU; default: where that is faster.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@click.pass_context
def bench_command(
    ctx: click.Context,
    workload: str,
    num_requests: int | None,
    respects_eos: bool,
    model: str | None,
    dtype: str,
    device: str,
    baselines: tuple[str, ...],
    end_to_end: bool,
    configured: bool,
    rounds: int,
    threads: int | None,
    native_forward: bool | None,
    as_json: bool,
) -> None:
    """Measure throughput on this machine: of the engine alone, and of the whole way from submit to SQL rows.

    Every answer has the exact number of tokens, whatever the model would say. The figures of each system are those of
    its turns, which alternate.
    """
    if configured and not end_to_end:
        raise click.UsageError("--configured belongs to --end-to-end: the engine alone needs no database")
    settings = settings_of(ctx, model=model)
    requests = _requests_of(workload)
    name = chosen_model(settings.model)
    try:
        from workers.bench import bench
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"measuring needs the Python package {error.name}; install it with `pip install 'batchjobs[worker]'`"
        ) from None
    bench(
        workload=workload if requests is None else Path(workload).name,
        requests=requests,
        num_requests=num_requests,
        respects_eos=respects_eos,
        model=name,
        dtype=dtype,
        device=device,
        baselines=baselines,
        end_to_end=end_to_end,
        settings=settings if configured else None,
        rounds=rounds,
        threads=threads,
        native_forward=native_forward,
        as_json=as_json,
    )


def _requests_of(workload: str) -> list[Request] | None:
    """The requests of a file; None for a name, which goes before a file of that name: ``./prefix`` is the file."""
    if workload in NAMED:
        return None
    from batchjobs.cli.trace import read_requests
    from batchjobs.sampling_fields import NO_DEFAULTS

    return read_requests(workload, NO_DEFAULTS) if Path(workload).is_file() else None
