"""Thousands of random cases, or one of them explained.

python -m tests.fuzz.run --cases 5000 --start 0
python -m tests.fuzz.run --seconds 600
python -m tests.fuzz.run --case 12345
"""

from __future__ import annotations

import argparse
import itertools
import os
import pprint
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.drive import Report, run_case
from tests.fuzz.engine_cases import FEATURES, draw_case
from tests.fuzz.models import Models

SHOWN = ("cases", "choices", "tokens", "scores", "steps", "rows", "chunks", "preemptions", "offloads", "prefix hits")
SHOWN += ("cached tokens", "zombies", "cancelled", "refused", "failed", "suspended")
SHOWN += ("updated answers", "forgiven")


class Summary:
    """Adds up what the cases showed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[Report] = []
        self.worst_logprob = 0.0

    def add(self, report: Report) -> None:
        verdict = report.verdict
        self.counts += report.counts
        self.counts.update(
            choices=verdict.choices, tokens=verdict.tokens, scores=verdict.scores, forgiven=verdict.forgiven
        )
        self.worst_logprob = max(self.worst_logprob, verdict.worst_logprob)
        if report.problems:
            self.failures.append(report)

    def __str__(self) -> str:
        figures = ", ".join(f"{self.counts[name]} {name}" for name in SHOWN)
        return f"{figures}, largest error of a logprob {self.worst_logprob:.1e}, {len(self.failures)} cases failed"


def run_cases(seeds: Iterable[int], models: Models, features: Sequence[str] = FEATURES) -> Summary:
    """Run these cases; what failed is in the summary."""
    summary = Summary()
    for seed in seeds:
        summary.add(run_case(draw_case(seed, features), models))
    return summary


def explain(seed: int, models: Models, features: Sequence[str] = FEATURES) -> Report:
    """Show a case, every step of it, and what is wrong."""
    case = draw_case(seed, features)
    pprint.pprint(case, width=120)
    report = run_case(case, models, print)
    print(*(report.problems or ["nothing is wrong"]), sep="\n")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.split("\n")[0])
    parser.add_argument("--case", type=int, help="show this one case, step by step")
    parser.add_argument("--cases", type=int, help="how many (default: as many as --seconds allow, else 3000)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--features", default=",".join(FEATURES), help="those of: %(default)s")
    chosen = parser.parse_args(arguments)
    features = tuple(chosen.features.split(","))
    if unknown := set(features) - set(FEATURES):
        parser.error(f"no such feature: {', '.join(sorted(unknown))}")
    with Models() as models:
        if chosen.case is not None:
            return int(bool(explain(chosen.case, models, features).problems))
        count = chosen.cases or (3000 if chosen.seconds == float("inf") else None)
        return _many(itertools.count(chosen.start), count, chosen.seconds, models, features)


def _many(seeds: Iterable[int], count: int | None, seconds: float, models: Models, features: Sequence[str]) -> int:
    summary, began = Summary(), time.monotonic()
    for seed in itertools.islice(seeds, count):
        if time.monotonic() - began > seconds:
            break
        report = run_case(draw_case(seed, features), models)
        summary.add(report)
        if report.problems:
            print(f"case {seed} failed:", *report.problems[:4], sep="\n    ", flush=True)
        if summary.counts["cases"] % 500 == 0:
            print(f"[{time.monotonic() - began:.0f} s] {summary}", flush=True)
    print(f"{summary}, {time.monotonic() - began:.0f} s")
    for report in summary.failures[:20]:
        print(f"to repeat: python -m tests.fuzz.run --case {report.case.seed}")
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
