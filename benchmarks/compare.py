"""This engine beside its peers on one machine: the same work, in turns, each in a process and environment of its own.

    python -m benchmarks.compare --workload mixed-64 --dtype float32 --rounds 3 \
        --vllm-python ENV/bin/python --openvino-python ENV/bin/python --openvino-model FOLDER --output FILE.json

In each round every system runs the whole workload once, while all others are stopped (SIGSTOP), because some of them
keep a core busy while they wait. A system whose answers have not exactly the asked number of tokens fails the run.
Start-up is reported apart. A peer whose environment is missing is skipped with a word. See docs/benchmarks.md.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click
import orjson

from batchjobs.errors import BatchjobsError
from batchjobs.models import resolve_model
from benchmarks.comparison.machine import described, usable_cores
from benchmarks.comparison.peer_process import PeerProcess, stopped
from benchmarks.comparison.table import markdown, put_between_markers, summary
from workers.workloads import WORKLOADS, workload

PEERS = Path(__file__).parent / "peers"
NAMES = {
    "batchjobs": "batchjobs",
    "static": "transformers, static batches of 16",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM for CPU",
    "openvino": "OpenVINO GenAI",
    "openvino-default-kv": "OpenVINO GenAI, its own KV cache type",
}
WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 4


@click.command()
@click.option("--workload", "workload_name", type=click.Choice(list(WORKLOADS)), default="mixed-64", show_default=True)
@click.option("--num-requests", type=click.IntRange(1), help="Requests of the workload; default: 64.")
@click.option("--model", help="Folder or .gguf file; default: the bundled small model.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of each system; default: all cores.")
@click.option("--max-requests", type=click.IntRange(1), default=64, show_default=True, help="Sequences at a time.")
@click.option("--python", default=sys.executable, help="For this engine and transformers; default: this one.")
@click.option("--vllm-python", help="Of an environment with vLLM.")
@click.option("--vllm-bind", help="VLLM_CPU_OMP_THREADS_BIND; default: as many cores as there are threads.")
@click.option("--openvino-python", help="Of an environment with openvino-genai.")
@click.option("--openvino-model", type=click.Path(exists=True), help="The same model in OpenVINO's format.")
@click.option("--only", multiple=True, type=click.Choice(list(NAMES)), help="Leave the others out; may be repeated.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON to write.")
@click.option("--docs", type=click.Path(path_type=Path), help="Markdown whose marked section becomes the table.")
def main(workload_name: str, num_requests: int | None, output: Path | None, docs: Path | None, **options: Any) -> None:
    """Compare, print a table of ratios, and write what was asked for."""
    try:
        _compare(workload_name, num_requests, output, docs, options)
    except BatchjobsError as error:
        raise click.ClickException(str(error)) from None


def _compare(
    workload_name: str, num_requests: int | None, output: Path | None, docs: Path | None, options: dict[str, Any]
) -> None:
    section = f"{workload_name} {options['dtype']}"
    _check_targets(output, docs, section)
    options["threads"] = options["threads"] or usable_cores()
    work = [(list(item.prompt_ids), item.output_tokens) for item in workload(workload_name, num_requests)]
    model = folder_of(options["model"])
    options |= {
        "model": model,
        # The same for most workloads, because what a peer compiles it keeps for its next start.
        "max_model_len": max(2048, *(len(ids) + tokens + 1 for ids, tokens in work)),
        # What a workload has in common is only used where that is the point.
        "sharing": workload_name == "prefix",
    }
    with stopped([]) as peers:
        _start(peers, options)
        _warm_up(peers, work)
        runs = _measure(peers, work, options["rounds"])
        found = {
            "workload": workload_name,
            "requests": len(work),
            "input_tokens": sum(len(ids) for ids, _ in work),
            "output_tokens": sum(tokens for _, tokens in work),
            "model": Path(model).name,
            "dtype": options["dtype"],
            "rounds": options["rounds"],
            "threads": options["threads"],
            "machine": described(),
            "systems": [summary(peer, runs, NAMES) for peer in peers],
        }
    table = markdown(found)
    click.echo(table)
    if output is not None:
        output.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    if docs is not None:
        put_between_markers(docs, section, table)


def _check_targets(output: Path | None, docs: Path | None, section: str) -> None:
    """Raises BatchjobsError where the results could not be written, before anything is measured."""
    if output is not None and not output.parent.is_dir():
        raise BatchjobsError(f"{output} cannot be written: there is no folder {output.parent}")
    if docs is not None and (not docs.is_file() or f"<!-- compare: {section} -->" not in docs.read_text()):
        raise BatchjobsError(
            f"{docs} has no place for this table: add the lines <!-- compare: {section} --> and <!-- /compare -->"
        )


def folder_of(model: str | None) -> str:
    """A plain folder, which all systems can read: a .gguf file is converted once, as the worker does it."""
    from workers.engine.models import locate

    source = resolve_model(model)
    place = locate(source)
    return str(place["pretrained_model_name_or_path"])


def _start(peers: list[PeerProcess], options: dict[str, Any]) -> None:
    """Adds those that can run, ours first; of the others it is said why not.

    Raises:
        BatchjobsError: There is nothing to compare with.
    """
    openvino = options["openvino_python"] and options["openvino_model"]
    wanted: dict[str, tuple[str | None, str, dict[str, Any]]] = {
        "batchjobs": (options["python"], "batchjobs_peer.py", {}),
        "static": (options["python"], "transformers_static_peer.py", {}),
        "continuous": (options["python"], "transformers_continuous_peer.py", {}),
        "vllm": (options["vllm_python"], "vllm_peer.py", {"vllm_bind": options["vllm_bind"]}),
        "openvino": (options["openvino_python"] if openvino else None, "openvino_peer.py", {}),
        "openvino-default-kv": (
            options["openvino_python"] if openvino else None,
            "openvino_peer.py",
            {"openvino_kv": "default"},
        ),
    }
    for name, (python, script, more) in wanted.items():
        if options["only"] and name not in options["only"] and name != "batchjobs":
            continue
        found = shutil.which(python) if python else None
        if found is None:
            missing = _missing(name, options)
            if name == "batchjobs":
                raise BatchjobsError(f"this engine cannot start, so there is nothing to compare with: {missing}")
            click.echo(f"{NAMES[name]} is skipped: {missing}", err=True)
            continue
        click.echo(f"starting {NAMES[name]} ...", err=True)
        peer = PeerProcess(name, found, PEERS / script, {**options, **more})
        if peer.error is not None and name == "batchjobs":
            raise BatchjobsError(f"this engine did not start, so there is nothing to compare with: {peer.error}")
        if peer.error is not None:
            click.echo(f"{NAMES[name]} is skipped: it did not start: {peer.error}", err=True)
            continue
        click.echo(f"{NAMES[name]} is ready after {peer.start_seconds:.1f} s", err=True)
        peers.append(peer)


def _missing(name: str, options: dict[str, Any]) -> str:
    if name.startswith("openvino") and options["openvino_python"] and not options["openvino_model"]:
        return "the model in its format was not named (--openvino-model)"
    return "its environment was not named, or has no Python there that can be run"


def _warm_up(peers: list[PeerProcess], work: list[tuple[list[int], int]]) -> None:
    for peer in peers:
        peer.run([(ids, WARM_UP_TOKENS) for ids, _ in work[:WARM_UP_REQUESTS]])


def _measure(peers: list[PeerProcess], work: list[tuple[list[int], int]], rounds: int) -> dict[str, list[float]]:
    """Seconds by system and round. Raises BatchjobsError where a system did not do the work."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    wanted = [tokens for _, tokens in work]
    for number in range(1, rounds + 1):
        for peer in peers:
            took, made = peer.run(work)
            if made != wanted:
                raise BatchjobsError(f"{NAMES[peer.name]} did not make the asked number of tokens for every request")
            seconds[peer.name].append(took)
            click.echo(f"round {number}/{rounds}: {NAMES[peer.name]}: {took:.1f} s", err=True)
    return seconds


if __name__ == "__main__":
    main()
