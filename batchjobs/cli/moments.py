"""Instants, durations and pauses as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchjobs.text import visible

if TYPE_CHECKING:
    from batchjobs.types import Pause

_SHOWN_DIGITS = 8


def moment(instant: datetime | None) -> str | None:
    """An instant for people, to the second, in UTC."""
    return None if instant is None else f"{instant.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min``, ``2 h 10 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def time_left(seconds: float) -> str:
    """An estimate, which is never nothing: ``about 42 s``."""
    return f"about {duration(max(seconds, 1))}"


def pause_text(pause: Pause | None) -> str:
    """``by ada@node1 since 2026-03-01 12:00:00Z: new weights``; nothing for no pause."""
    if pause is None:
        return ""
    why = f": {visible(pause.reason)}" if pause.reason else ""
    released = " (with --release)" if pause.release else ""
    return f"by {visible(pause.by)} since {moment(pause.at)}{released}{why}"


def short_version(version: str) -> str:
    """``sha256:0123456789abcdef`` as ``01234567``: enough to tell versions apart in a table."""
    kind, colon, digits = version.partition(":")
    return digits[:_SHOWN_DIGITS] if colon and kind == "sha256" else version
