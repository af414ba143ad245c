"""The files in `ops/`, as their tests read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
UNITS = sorted((OPS / "systemd").glob("batchjobs-*"))
KUBERNETES = OPS / "kubernetes"
TEXTS = sorted(file for file in OPS.rglob("*") if file.is_file() and file.suffix not in (".json", ".pyc"))
DOCUMENTS = sorted(OPS.rglob("*.md"))


def relative(file: Path) -> str:
    return str(file.relative_to(OPS))


def documents(file: Path) -> list[Any]:
    """Everything in a YAML file."""
    return list(yaml.safe_load_all(file.read_text()))


SERVICES: dict[str, Any] = documents(OPS / "compose.yaml")[0]["services"]
OWN = {name: service for name, service in SERVICES.items() if "build" in service}


def unit(file: Path) -> dict[str, list[str]]:
    """The settings of a unit, in order, under ``Section.Key``."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in file.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, separator, value = line.partition("=")
            assert separator, line
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def pods(resources: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (each["spec"]["template"]["spec"] for each in resources if "template" in each.get("spec", {}))
