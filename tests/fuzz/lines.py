"""A million changed input lines: each is understood or refused in one short sentence, and never more than that.

python -m tests.fuzz.lines --inputs 1000000 --seed 1
python -m tests.fuzz.lines --seconds 600
python -m tests.fuzz.lines --input 7b2270726f6d7074223a2261227d
python -m tests.fuzz.lines --file FAILED
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batchjobs.errors import UsageError
from batchjobs.jsonl import MAX_LINE_BYTES, read_lines_of
from tests.fuzz.line_checks import Broken, check_line, demand, shape
from tests.fuzz.line_mutators import SEEDS, mutated, written

INPUTS = 1_000_000
PART = 25_000
"""Lines that one process looks at before their verdicts are added up."""
CORPUS = 2000
"""Lines that are changed further, of the good and of the bad ones: those that broke new ground."""
LONGEST_KEPT = 2000
_SHARE_OF_GOOD = 0.75
STREAM_LINES = 20
_LINE_ENDS = (b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\n \t\r\n")
MOST_FAILURES = 20
SHOWN_HEX = 1500


@dataclass
class Failure:
    raw: bytes
    problem: str

    def __str__(self) -> str:
        if len(self.raw) <= SHOWN_HEX:
            return f"{self.problem}\n    to repeat: python -m tests.fuzz.lines --input {self.raw.hex()}"
        with tempfile.NamedTemporaryFile(prefix="line-", suffix=".bin", delete=False) as file:
            file.write(self.raw)
        return f"{self.problem}\n    to repeat: python -m tests.fuzz.lines --file {file.name}"


@dataclass
class Hunt:
    """Changes lines and checks them; the same seed gives the same lines as long as the code says the same."""

    seed: int
    failures: list[Failure] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    streams: int = 0

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self._good = [written(self._rng, line) for line in SEEDS]
        self._bad: list[bytes] = list(self._good)
        self.shapes: set[str] = set()
        self._recent: list[bytes] = []

    @property
    def inputs(self) -> int:
        return self.verdicts.total()

    def step(self) -> None:
        """One line; and once in a while the last ones as a file."""
        raw = mutated(self._rng, self._good if self._rng.random() < _SHARE_OF_GOOD else self._bad)
        self.look_at(raw)
        self._recent.append(raw)
        if len(self._recent) == STREAM_LINES:
            self._look_at_stream()
            self._recent.clear()

    def look_at(self, raw: bytes) -> str:
        try:
            verdict, said = check_line(raw)
        except Broken as broken:
            self.failures.append(Failure(raw, str(broken)))
            verdict, said = "broken", str(broken)
        self.verdicts[verdict] += 1
        new = shape(said)
        if new not in self.shapes:
            self.shapes.add(new)
            kept = self._good if verdict == "accepted" else self._bad
            if len(raw) <= LONGEST_KEPT and len(kept) < CORPUS:
                kept.append(raw)
        return verdict

    def _look_at_stream(self) -> None:
        ends = self._rng.choices(_LINE_ENDS, k=STREAM_LINES)
        content = b"".join(raw + end for raw, end in zip(self._recent, ends, strict=True))
        self.streams += 1
        try:
            check_stream(content, self._rng)
        except Broken as broken:
            self.failures.append(Failure(content, f"as a file: {broken}"))


def check_stream(content: bytes, rng: Random) -> None:
    """The lines of a file are what lies between line feeds, plain or packed; damage is a UsageError."""
    expected = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        kept = raw.removesuffix(b"\r").removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")
        if kept.strip():
            expected.append((number, kept[: MAX_LINE_BYTES + 2]))
    if content.startswith(b"\x1f\x8b"):
        _read(content)
        return
    demand(_read(content) == expected, "other lines than between the line feeds")
    packed = gzip.compress(content, 1)
    demand(_read(packed) == expected, "other lines from the same file packed")
    at = rng.randrange(len(packed))
    _read(packed[:at] + bytes([rng.randrange(256)]) + packed[at + rng.randrange(3) :])


def _read(content: bytes) -> list[tuple[int, bytes]] | None:
    try:
        return list(read_lines_of(io.BytesIO(content), "in.jsonl"))
    except UsageError as error:
        demand(len(str(error)) < 300, "a long message about the file")
        return None
    except Exception as error:
        raise Broken(f"read_lines_of raised {type(error).__name__}: {str(error)[:300]}") from error


@dataclass
class Found:
    """What the processes found, together."""

    verdicts: Counter[str] = field(default_factory=Counter)
    shapes: set[str] = field(default_factory=set)
    streams: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, hunt: Hunt) -> None:
        self.verdicts += hunt.verdicts
        self.shapes |= hunt.shapes
        self.streams += hunt.streams
        self.failures += hunt.failures

    def __str__(self) -> str:
        verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in self.verdicts.most_common())
        rest = f"{len(self.shapes):,} different verdicts, {self.streams:,} files, {len(self.failures)} failures"
        return f"{self.verdicts.total():,} lines: {verdicts}\n{rest}"


def hunt(seed: int, inputs: int | None, seconds: float = float("inf")) -> Hunt:
    """Runs until one of the limits is reached, or something has failed too often."""
    running, began = Hunt(seed), time.monotonic()
    while (inputs is None or running.inputs < inputs) and len(running.failures) < MOST_FAILURES:
        running.step()
        if running.inputs % 1000 == 0 and time.monotonic() - began > seconds:
            break
    return running


def hunt_together(seed: int, inputs: int | None, seconds: float, processes: int) -> Found:
    """Parts of it in several processes, each part with a seed of its own, so that their number changes nothing."""
    found, began = Found(), time.monotonic()
    left, part = inputs if inputs is not None else sys.maxsize, 0
    running: set[Future[Hunt]] = set()
    with ProcessPoolExecutor(processes) as pool:
        while True:
            while left > 0 and len(running) < processes and (rest := seconds - (time.monotonic() - began)) > 0:
                running.add(pool.submit(hunt, seed * 100_000 + part, min(left, PART), rest))
                left, part = left - PART, part + 1
            if not running:
                return found
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                found.add(each.result())
                for failure in each.result().failures:
                    print(failure)
            seen = f"{found.verdicts.total():,} lines, {len(found.failures)} failures"
            print(f"[{time.monotonic() - began:.0f} s] {seen}", flush=True)
            if len(found.failures) >= MOST_FAILURES:
                left = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.lines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, help=f"how many (default: as many as --seconds allow, else {INPUTS:,})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no line after this time")
    parser.add_argument("--seed", type=int, default=1, help="what is drawn follows from it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one a core")
    parser.add_argument("--input", help="check this one line, in hexadecimal")
    parser.add_argument("--file", type=Path, help="check the content of this file as one line")
    chosen = parser.parse_args(arguments)
    if chosen.input is not None or chosen.file is not None:
        raw = chosen.file.read_bytes() if chosen.file else bytes.fromhex(chosen.input)
        return _explain(raw)
    inputs = chosen.inputs or (INPUTS if chosen.seconds == float("inf") else None)
    began = time.monotonic()
    found = hunt_together(chosen.seed, inputs, chosen.seconds, chosen.processes)
    print(f"{found}, {time.monotonic() - began:.0f} s (seed {chosen.seed})")
    return int(bool(found.failures))


def _explain(raw: bytes) -> int:
    try:
        print(*check_line(raw), sep=": ")
        check_stream(raw, Random(1))
    except Broken as broken:
        print(f"broken: {broken}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
