"""What ``results --follow`` does beside the writing: it says why nothing comes, and notices that nobody reads."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, BinaryIO

from batchjobs.cli.console import say
from batchjobs.cli.progress import PLAIN_SECONDS

if TYPE_CHECKING:
    from batchjobs.client import Client
    from batchjobs.types import BatchInfo


class Watch:
    """To be called at each look at the batch. Has its newest state in ``info``."""

    info: BatchInfo

    def __init__(self, client: Client, stream: BinaryIO) -> None:
        self._client = client
        self._stream = stream
        self._next_note_at = 0.0
        self._last_note: str | None = None

    def __call__(self, info: BatchInfo) -> None:
        """Raises BrokenPipeError where whoever read the output has closed it: the next line may be long in coming."""
        self.info = info
        if _is_closed(self._stream):
            raise BrokenPipeError
        if time.monotonic() >= self._next_note_at:
            self._next_note_at = time.monotonic() + PLAIN_SECONDS
            note = self._note(info)
            if note is not None and note != self._last_note:
                say(f"note: {note}")
            self._last_note = note

    def _note(self, info: BatchInfo) -> str | None:
        from batchjobs.cli.moments import pause_text
        from batchjobs.cli.waiting_note import why_waiting

        if info.pause is not None:
            return f"the batch is paused {pause_text(info.pause)}; `batchjobs resume {info.id}` lets it go on"
        return why_waiting(self._client.store, info, self._client.workers())


def _is_closed(stream: BinaryIO) -> bool:
    """Whether the other end of a pipe is closed. Never so of a file."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        poll.register(stream, 0)  # 0: only errors are told
        return bool(poll.poll(0))
    return False
