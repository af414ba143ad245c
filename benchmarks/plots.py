"""Pictures of comparisons: PNG and SVG from the JSON files that ``compare.py`` wrote.

    ENV/bin/python benchmarks/plots.py float32.json bfloat16.json --folder docs/benchmarks

It needs matplotlib and nothing else, and is run now and then by hand, so matplotlib stays out of the project's own
requirements: ``python -m venv ENV && ENV/bin/pip install matplotlib``. Each workload becomes one picture, with a panel
for each dtype: a bar is the median of the rounds, the line through its end goes from the slowest to the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "batchjobs"  # the same figures give the same file
mpl.rcParams["svg.fonttype"] = "none"

import matplotlib.pyplot as plt  # noqa: E402

OURS, THEIRS, INK, LINE = "#1f6f54", "#b9c4cc", "#222222", "#d9d9d9"
ROW_INCHES, PANEL_INCHES = 0.42, 5.2
ROOM = 1.35  # of the axis, for the numbers behind the bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of compare.py; the same workload in several dtypes")
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    comparisons = [json.loads(file.read_text()) for file in arguments.files]
    for workload in dict.fromkeys(found["workload"] for found in comparisons):
        panels = [found for found in comparisons if found["workload"] == workload]
        figure = drawn(panels)
        for form in ("png", "svg"):
            target = arguments.folder / f"{workload}.{form}"
            figure.savefig(target, dpi=144, metadata={"Date": None} if form == "svg" else None)
            print(f"wrote {target}")
        plt.close(figure)


def drawn(panels: Sequence[dict[str, Any]]) -> plt.Figure:
    """One workload, a panel for each dtype, all of them on one scale."""
    rows = max(len(found["systems"]) for found in panels)
    size = (PANEL_INCHES * len(panels) + 1.5, ROW_INCHES * rows + 1.5)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharex=True, layout="constrained")
    for axis, found in zip(axes[0], panels, strict=True):
        panel(axis, found)
    fastest = max(found["output_tokens"] / min(s["seconds"]) for found in panels for s in found["systems"])
    axes[0][0].set_xlim(0, ROOM * fastest)
    first, machine = panels[0], panels[0]["machine"]
    where = f"{first['threads']} threads of {machine['processor']}, {machine['date']}"
    figure.suptitle(
        f"{first['workload']}: output tokens a second on {where};\nin brackets how many times as fast batchjobs is",
        fontsize=9,
        color=INK,
    )
    return figure


def panel(axis: plt.Axes, found: dict[str, Any]) -> None:
    """Fastest on top; the number behind each bar is its median, and how much faster this project is."""
    tokens = found["output_tokens"]
    rates = {system["title"]: sorted(tokens / seconds for seconds in system["seconds"]) for system in found["systems"]}
    ratios = {system["title"]: system["slower"] for system in found["systems"]}
    order = sorted(rates, key=lambda title: statistics.median(rates[title]))
    medians = [statistics.median(rates[title]) for title in order]
    spread = [
        [median - rates[title][0] for title, median in zip(order, medians, strict=True)],
        [rates[title][-1] - median for title, median in zip(order, medians, strict=True)],
    ]
    colours = [OURS if title == "batchjobs" else THEIRS for title in order]
    axis.barh(order, medians, color=colours, xerr=spread, ecolor=INK, error_kw={"linewidth": 1, "capsize": 2})
    for place, (title, median) in enumerate(zip(order, medians, strict=True)):
        told = f"{median:.0f}" if title == "batchjobs" else f"{median:.0f}   ({ratios[title]:.1f} ×)"
        axis.annotate(
            told,
            (rates[title][-1], place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_title(found["dtype"], fontsize=10, color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color=LINE, linewidth=0.6)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    main()
