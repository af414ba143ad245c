"""A whole job as a user sees it, by the clock: from a cold command to finished results, here and with vLLM.

    python -m benchmarks.whole_job FILE.jsonl --dtype bfloat16 --vllm-python ENV/bin/python --rounds 3

FILE is an OpenAI Batch file. ``batchjobs run`` starts in an empty home each time; ``vllm run-batch`` reads the same
requests, with the model's own name put in. They take turns. Both must answer every request; their answers are not
compared, because both sample as the file says. What stays between two runs: the model's files in the page cache, this
engine's compiled kernels, and whatever vLLM keeps in its cache folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import orjson

from batchjobs.errors import BatchjobsError
from benchmarks.comparison.machine import described, usable_cores

TIMEOUT_SECONDS = 3600


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", help="Folder or .gguf file; default: the bundled small model.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of each system; default: all cores.")
@click.option("--vllm-python", help="Of an environment with vLLM; without one it is left out.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON to write.")
def main(
    file: Path,
    model: str | None,
    dtype: str,
    rounds: int,
    threads: int | None,
    vllm_python: str | None,
    output: Path | None,
) -> None:
    """Run FILE cold in both, in turns, and print seconds and their ratio."""
    from benchmarks.compare import folder_of

    folder = folder_of(model)
    count = threads or usable_cores()
    seconds: dict[str, list[float]] = {"batchjobs run": []}
    tokens: dict[str, list[int]] = {"batchjobs run": []}
    if vllm_python is None or not Path(vllm_python).exists():
        click.echo("vLLM is skipped: its environment was not named, or is not there", err=True)
        vllm_python = None
    else:
        seconds["vllm run-batch"], tokens["vllm run-batch"] = [], []
    for number in range(1, rounds + 1):
        for name in seconds:
            with tempfile.TemporaryDirectory(prefix="whole-job-") as place:
                if name == "batchjobs run":
                    took, made = ours(file, folder, dtype, count, Path(place))
                else:
                    took, made = theirs(str(vllm_python), file, folder, dtype, count, Path(place))
            seconds[name].append(took)
            tokens[name].append(made)
            click.echo(f"round {number}/{rounds}: {name}: {took:.1f} s, {made:,} tokens", err=True)
    found = {
        "file": file.name,
        "dtype": dtype,
        "threads": count,
        "machine": described(),
        "seconds": seconds,
        "tokens": tokens,
    }
    if output is not None:
        output.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    click.echo(table(seconds, tokens))


def ours(file: Path, model: str, dtype: str, threads: int, place: Path) -> tuple[float, int]:
    """Seconds by the clock, and the tokens of all answers."""
    target = place / "results.jsonl"
    command = [sys.executable, "-m", "batchjobs", "run", str(file), "--model", model, "--dtype", dtype]
    environment = {**os.environ, "BATCHJOBS_HOME": str(place / "home"), "OMP_NUM_THREADS": str(threads)}
    took = _timed([*command, "--format", "openai", "-o", str(target)], environment)
    return took, tokens_of(target, file)


def theirs(python: str, file: Path, model: str, dtype: str, threads: int, place: Path) -> tuple[float, int]:
    """As :func:`ours`."""
    requests, target = place / "requests.jsonl", place / "results.jsonl"
    with requests.open("w") as out:
        for request in _objects(file):
            request["body"]["model"] = model
            out.write(json.dumps(request) + "\n")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}"),
    }
    # The module behind `vllm run-batch`: that command itself looks for a package called vllm, and vllm-cpu is not.
    command = [python, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(requests), "-o", str(target)]
    more = ["--model", model, "--dtype", dtype, "--max-num-seqs", "64", "--max-model-len", "2048"]
    return _timed([*command, *more], environment), tokens_of(target, file)


def _timed(command: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        raise BatchjobsError(f"{command[0]} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return took


def tokens_of(results: Path, file: Path) -> int:
    """Completion tokens of the results. Raises BatchjobsError where a request has no answer."""
    lines = _objects(results)
    wanted = {request["custom_id"] for request in _objects(file)}
    answered = {line["custom_id"] for line in lines if line["response"] and line["response"]["status_code"] == 200}
    if wanted - answered:
        raise BatchjobsError(f"{len(wanted - answered)} of {len(wanted)} requests have no answer in {results.name}")
    return sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)


def _objects(file: Path) -> list[dict[str, Any]]:
    """One a line. Only a line feed ends a line: a JSON string may hold whatever else Unicode calls the end of one."""
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line.strip()]


def table(seconds: dict[str, list[float]], tokens: dict[str, list[int]]) -> str:
    ours_took = seconds["batchjobs run"]
    lines = ["| command | seconds, median (min to max) | tokens | times as long |", "| --- | --- | --- | --- |"]
    for name, times in seconds.items():
        ratios = [theirs / mine for mine, theirs in zip(ours_took, times, strict=True)]
        spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        made = f"{statistics.median(tokens[name]):,.0f}"
        lines.append(f"| `{name}` | {spread} | {made} | {'' if name == 'batchjobs run' else ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
