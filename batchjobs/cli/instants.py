"""Instants as people give them to commands: ISO 8601, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_AGE = re.compile(r"(\d{1,6})(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}


class InstantOrAge(click.ParamType[datetime]):
    """``2026-03-08T02:30:00-08:00``, ``2026-03-08`` (without an offset it is UTC), or an age such as ``90min``."""

    name = "instant"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            if age := _AGE.fullmatch(value.strip()):
                return datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
            given = datetime.fromisoformat(value.strip())
            return (given if given.tzinfo is not None else given.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is no instant; give one like 2026-03-08T02:30:00-08:00 (UTC where there is no offset), "
                "or an age like 90min, 2h or 3d",
                param,
                ctx,
            )
