"""Errors that only the store raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 3


class DuplicateCustomId(UsageError):
    """A custom_id stands twice in one batch.

    ``pairs`` holds (custom_id, index of the later request, index of the first one), by index. Those later requests were
    not stored; all others of the call were, so that the next call finds the duplicates that are still to come.
    """

    def __init__(self, pairs: Sequence[tuple[str, int, int]]) -> None:
        self.pairs = list(pairs)
        shown = ", ".join(
            f"{custom_id!r} (request {index}, first used by request {first})"
            for custom_id, index, first in self.pairs[:_SHOWN]
        )
        more = f" and {len(self.pairs) - _SHOWN} more" if len(self.pairs) > _SHOWN else ""
        super().__init__(f"custom_id used twice: {shown}{more}; give each request its own")
