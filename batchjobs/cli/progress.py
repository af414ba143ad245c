"""How far a batch is, on stderr: a bar on a terminal, elsewhere one plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from batchjobs.cli.console import is_live, rich_console, say
from batchjobs.types import BatchInfo, BatchStatus

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 5.0
_RATE_WINDOW_SECONDS = 15.0


class BatchProgress:
    """Shows a batch's counts and speed as long as it is open. ``show`` may be called as often as one likes."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live: tuple[Progress, TaskID] | None = None
        self._rate = _Rate()
        self._last_line: float | None = None
        self._last_text = ""

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def show(self, info: BatchInfo) -> None:
        if self._quiet:
            return
        speed = self._rate.add(info.tokens.completion)
        if is_live(sys.stderr):
            self._draw(info, speed)
        else:
            self._print(info, speed)

    def _draw(self, info: BatchInfo, speed: float | None) -> None:
        if self._live is None:
            self._live = _start_bar(info)
        progress, task = self._live
        progress.update(task, completed=info.counts.done, total=info.counts.total, detail=_detail(info, speed))

    def _print(self, info: BatchInfo, speed: float | None) -> None:
        now = time.monotonic()
        due = self._last_line is None or now - self._last_line >= PLAIN_SECONDS or info.status.is_final
        text = f"{info.counts.done:,} of {info.counts.total:,} done, {_detail(info, speed)}"
        if due and text != self._last_text:
            self._last_line, self._last_text = now, text
            say(text)


class _Rate:
    """Tokens per second over the last seconds; None until there is something to divide."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> float | None:
        now = time.monotonic()
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] > _RATE_WINDOW_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (tokens - before) / (now - then) if now - then > 1 else None


def _detail(info: BatchInfo, speed: float | None) -> str:
    parts = [f"{info.counts.running:,} running"]
    if info.counts.failed:
        parts.append(f"{info.counts.failed:,} failed")
    if info.counts.cancelled:
        parts.append(f"{info.counts.cancelled:,} cancelled")
    parts.append(f"{info.tokens.completion:,} tokens")
    if speed:
        parts.append(f"{speed:,.1f} tokens/s")
    if info.status in (BatchStatus.CANCELLING, BatchStatus.LOADING):
        parts.append(str(info.status))
    return ", ".join(parts)


def _start_bar(info: BatchInfo) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=rich_console(sys.stderr),
    )
    task = progress.add_task("", total=info.counts.total, detail="")
    progress.start()
    return progress, task
