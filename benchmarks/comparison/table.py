"""The figures of a comparison, and how they are told: ratios by round, because the systems took turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.comparison.peer_process import PeerProcess


def summary(peer: PeerProcess, runs: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> dict[str, Any]:
    """``slower`` is how much longer it took than this engine in the same round: median, least and most."""
    times, ours = runs[peer.name], runs["batchjobs"]
    slower = [theirs / mine for mine, theirs in zip(ours, times, strict=True)]
    return {
        "name": peer.name,
        "title": names[peer.name],
        "seconds": list(times),
        "slower": statistics.median(slower),
        "slower_min": min(slower),
        "slower_max": max(slower),
        "start_seconds": peer.start_seconds,
        "versions": peer.versions,
        "settings": peer.settings,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """A table, with machine, versions and settings below it."""
    machine, tokens = found["machine"], found["output_tokens"]
    lines = [
        f"`{found['workload']}`, {found['dtype']}: {found['requests']} requests, {found['input_tokens']:,} prompt and "
        f"{tokens:,} output tokens, {found['model']}; {found['threads']} threads on {machine['processor']} "
        f"({machine['instructions']}), {machine['date']}, {found['rounds']} rounds in turns.",
        "",
        "| system | output tokens/s, median (min to max) | batchjobs is faster by (min to max) | start-up |",
        "| --- | --- | --- | --- |",
    ]
    for system in found["systems"]:
        rates = sorted(tokens / seconds for seconds in system["seconds"])
        rate = f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"
        ratio = f"{system['slower']:.2f} × ({system['slower_min']:.2f} to {system['slower_max']:.2f})"
        ratio = "" if system["name"] == "batchjobs" else ratio
        lines.append(f"| {system['title']} | {rate} | {ratio} | {system['start_seconds']:.0f} s |")
    lines.append("")
    lines += [f"- {system['title']}: {_told(system)}" for system in found["systems"]]
    return "\n".join(lines) + "\n"


def put_between_markers(file: Path, name: str, table: str) -> None:
    """Replaces what stands between ``<!-- compare: NAME -->`` and ``<!-- /compare -->``.

    Raises:
        UsageError: The file has no such section.
    """
    text = file.read_text()
    head, begin, rest = text.partition(f"<!-- compare: {name} -->\n")
    _, end, tail = rest.partition("<!-- /compare -->")
    if not begin or not end:
        raise UsageError(f"{file} has no section <!-- compare: {name} --> with its end <!-- /compare -->")
    file.write_text(head + begin + table + end + tail)


def _told(system: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in system["versions"].items())
    settings = ", ".join(f"{name} {value}" for name, value in system["settings"].items())
    return f"{versions}; {settings}"
