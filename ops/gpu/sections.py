"""The sections in the order of what they are worth, and how they share the time.

Each runs in a process of its own: whatever one of them does to the device or to itself, the others run, and one that
hangs is stopped when its time is over. What it had found by then is in its file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.gpu.notes import Found

Parts = dict[str, Found]
GRACE_SECONDS = 10.0  # beyond its time, in which a section may end by itself
LEAST_SECONDS = 20.0  # what a section gets even where its part is less: with less it is not worth while to start one


@dataclass(frozen=True, slots=True)
class Section:
    """``weight`` is its part of the time that is left, beside those of the sections after it."""

    name: str
    words: str
    weight: float


SECTIONS = (
    Section("machine", "what it is, what is installed, how fast it multiplies and reads", 1),
    Section("correctness", "every way to compute an answer against transformers' own", 3),
    Section("speed llama-8b", "shares of the peak and of the bandwidth, and idle time", 3),
    Section("speed qwen3-0.6b", "shares of the peak and of the bandwidth, and idle time", 2),
    Section("workloads llama-8b", "whole workloads, beside transformers' continuous batching", 4),
    Section("workloads qwen3-0.6b", "whole workloads, beside transformers' continuous batching", 3),
)
NAMES = tuple(section.name for section in SECTIONS)


def chosen(only: Sequence[str], skipped: Sequence[str]) -> list[Section]:
    """In their order. A name may be that of a kind of sections, such as ``speed``.

    Raises:
        ValueError: There is no such section.
    """
    for name in (*only, *skipped):
        if not any(_is_named(section, name) for section in SECTIONS):
            raise ValueError(f"there is no section {name!r}; there are: {', '.join(NAMES)}")
    return [
        section
        for section in SECTIONS
        if (not only or any(_is_named(section, name) for name in only))
        and not any(_is_named(section, name) for name in skipped)
    ]


def _is_named(section: Section, name: str) -> bool:
    return section.name == name or section.name.startswith(f"{name} ")


def seconds_for(section: Section, following: Sequence[Section], left: float) -> float:
    """Its part of the time that is left. Where that is short, the last sections go without."""
    part = left * section.weight / sum(each.weight for each in (section, *following))
    return min(left, max(part, LEAST_SECONDS))


def run_all(
    sections: Sequence[Section], seconds: float, run: Callable[[Section, float, dict[str, Parts]], Parts]
) -> dict[str, Parts]:
    """What every section found; those for which no time is left say so. ``run`` gets a section, its seconds, and what
    the ones before it found."""
    deadline = time.monotonic() + seconds
    found: dict[str, Parts] = {}
    for number, section in enumerate(sections):
        own = seconds_for(section, sections[number + 1 :], deadline - time.monotonic())
        if own < LEAST_SECONDS:
            found[section.name] = {"start": {"left_out": f"{max(own, 0):.0f} s are left for it"}}
            print(f"{section.name}: left out, {max(own, 0):.0f} s are left for it", flush=True)
            continue
        print(f"--- {section.name}: {section.words} (up to {own:.0f} s)", flush=True)
        found[section.name] = run(section, own, found)
    return found


def run_apart(command: Sequence[str], section: Section, seconds: float, before: dict[str, Parts]) -> Parts:
    """Run a section by ``command``, which gets its name, its seconds and its files as further arguments."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file, known = Path(folder, "found.json"), Path(folder, "before.json")
        known.write_text(json.dumps(before))
        arguments = [*command, "--as-child", section.name, str(seconds), str(file), str(known)]
        child = subprocess.Popen(arguments, start_new_session=True)
        ended = _wait(child, seconds + GRACE_SECONDS)
        parts: Parts = json.loads(file.read_text()) if file.exists() else {}
        if ended is not None:
            parts["end"] = {"error": ended}
            print(f"{section.name}: FAILED: {ended}", flush=True)
        return parts


def _wait(child: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Why it did not end well; None if it did. Nothing of it is left running."""
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    else:
        return None if code == 0 else f"ended with {_meaning(code)}"
    finally:
        _kill_group(child)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _meaning(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def this_command(script: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, str(script), *options]


def section_work(name: str) -> Callable[[Any, Any], None]:
    """The function that runs a section, with the modules that it needs."""
    kind, _, model = name.partition(" ")
    if kind == "machine":
        from ops.gpu import machine

        return machine.section
    if kind == "correctness":
        from ops.gpu import correctness

        return correctness.section
    from ops.gpu import shapes, speed, work

    section = speed.section if kind == "speed" else work.section
    return lambda notes, setup: section(notes, setup, shapes.LARGE[model])
