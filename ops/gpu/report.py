"""The report of a run: as JSON, and as a short table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ops.gpu.goals import Sections, goals, verdict_line
from ops.gpu.notes import Found

WORK = "workloads "
PEERS = ("transformers continuous batching", "static batches", "peer is ready")
COLUMNS = ("model", "workload", "requests", "output tokens/s", "transformers CB, tokens/s", "faster by", "of the bound")


def report(sections: Sections, *, asked: Mapping[str, Any], seconds: float, made_at: str) -> Found:
    return {
        "what": "ops/gpu_check.py: models with random weights, in the shapes that are named",
        "made_at": made_at,
        "asked": dict(asked),
        "took_seconds": round(seconds, 1),
        "sections": sections,
        "failed": failures(sections),
        "goals": goals(sections),
    }


def failures(sections: Sections) -> list[str]:
    """Parts that raised something, and comparisons that did not hold; not what peers could not do."""
    bad = ("error", "differs")
    return [
        f"{section}: {part}: {found[kind]}"
        for section, parts in sections.items()
        for part, found in parts.items()
        for kind in bad
        if found.get(kind) and not any(peer in part for peer in PEERS)
    ]


def table(found: Mapping[str, Any]) -> str:
    """For people: speed, workloads, goals, and what failed."""
    sections: Sections = found["sections"]
    lines = [*_head(sections), *_speed(sections), *_workloads(sections)]
    lines += [f"- {verdict_line(goal)}" for goal in found["goals"]]
    lines += [f"- FAILED {failure}" for failure in found["failed"]]
    return "\n".join(lines) + "\n"


def _head(sections: Sections) -> list[str]:
    machine = sections.get("machine", {})
    device, versions = machine.get("device", {}), machine.get("versions", {})
    peaks = machine.get("peaks", {})
    told = [str(device.get("name", "an unknown device"))]
    told += [f"{name} {versions[name]}" for name in ("torch", "transformers", "flash-attn") if versions.get(name)]
    if "flops" in peaks:
        told.append(f"{peaks['flops'] / 1e12:.3g} TFLOP/s in bfloat16, {peaks['bytes_per_second'] / 1e12:.3g} TB/s")
    return [", ".join(told), ""]


def _speed(sections: Sections) -> list[str]:
    rows = [
        (name.removeprefix("speed "), part, _rate(parts[part]), *_shares(parts[part]))
        for name, parts in sections.items()
        if name.startswith("speed ")
        for part in parts
        if part.startswith(("prefill", "decode"))
    ]
    return _rows(("model", "part", "tokens/s", "of the peak", "of the bandwidth", "device idle"), rows)


def _rate(part: Mapping[str, Any]) -> str:
    rate = part.get("tokens_per_second", part.get("output_tokens_per_second"))
    return _why(part) if rate is None else f"{rate:,.0f}"


def _shares(part: Mapping[str, Any]) -> list[str]:
    return [_percent(part.get(name)) for name in ("share_of_peak", "share_of_bandwidth", "idle_share")]


def _workloads(sections: Sections) -> list[str]:
    rows = []
    for name, parts in sections.items():
        for part, found in parts.items() if name.startswith(WORK) else ():
            if "faster_by" in found:
                peer, faster = found["peer_output_tokens_per_second"], found["faster_by"]
                rows.append(
                    (
                        name.removeprefix(WORK),
                        part,
                        str(found["requests"]),
                        f"{found['output_tokens_per_second']:,.0f}",
                        "" if peer is None else f"{peer:,.0f}",
                        "" if faster is None else f"{faster:.2f} ×",
                        _percent(found["bound_share"]),
                    )
                )
    return _rows(COLUMNS, rows)


def _rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [columns, ("---",) * len(columns), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _why(part: Mapping[str, Any]) -> str:
    return "failed" if "error" in part else "left out"
