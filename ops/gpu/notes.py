"""What a section has found: printed as it comes, and written to its file at once, so that a run that is killed keeps
what it had. A part that fails or has no time left is noted as such, and the next one runs."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")
Found = dict[str, Any]
LAST_LINES = 6  # of a traceback


class Notes:
    """The parts of one section, by name. ``seconds`` is how long the section may take."""

    def __init__(self, section: str, seconds: float, file: Path | None = None) -> None:
        self.section = section
        self.parts: dict[str, Found] = {}
        self._deadline = time.monotonic() + seconds
        self._file = file

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def run(self, part: str, work: Callable[[], Found], *, seconds: float = 0.0) -> Found | None:
        """What the part found; None if it failed, or if fewer than so many ``seconds`` are left."""

        def both() -> tuple[Found, Found]:
            found = work()
            return found, found

        return self.make(part, both, seconds=seconds)

    def make(self, part: str, work: Callable[[], tuple[Made, Found]], *, seconds: float = 0.0) -> Made | None:
        """What the part made, beside what it found; None as above."""
        if self.left < seconds:
            self.leave_out(part, f"it needs about {seconds:.0f} s, and {max(self.left, 0):.0f} s are left")
            return None
        begin = time.monotonic()
        try:
            made, found = work()
        except Exception as error:  # noqa: BLE001 - whatever a part raises, the others still say something
            self.failed(part, error, begin)
            return None
        self._keep(part, found, begin)
        return made

    def leave_out(self, part: str, why: str) -> None:
        self._keep(part, {"left_out": why}, time.monotonic())

    def failed(self, part: str, error: Exception, begin: float | None = None) -> None:
        lines = traceback.format_exception(error)
        told = "".join(lines).splitlines()[-LAST_LINES:]
        self._keep(part, {"error": first_line(error), "traceback": told}, begin or time.monotonic())

    def _keep(self, part: str, found: Found, begin: float) -> None:
        self.parts[part] = {**found, "took_seconds": round(time.monotonic() - begin, 2)}
        print(f"{self.section}: {part}: {told(found)}", flush=True)
        if self._file is not None:
            write_json(self._file, self.parts)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """All of it or nothing: whoever is killed in the middle leaves what was there."""
    half = file.with_name(file.name + ".part")
    half.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    half.replace(file)


def told(found: Mapping[str, Any]) -> str:
    """The figures of a part in one line."""
    if "error" in found:
        return f"FAILED: {found['error']}"
    if "left_out" in found:
        return f"left out: {found['left_out']}"
    return ", ".join(f"{name} {_short(value)}" for name, value in found.items() if not isinstance(value, dict | list))


def first_line(error: BaseException) -> str:
    text = " ".join(str(error).split("\n")[0].split())
    return f"{type(error).__name__}: {text}"[:300]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
