"""How far a batch is, on stderr: a bar on a terminal, elsewhere one plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from batchjobs.cli.console import is_live, rich_console, say
from batchjobs.cli.estimate import eta_seconds, tokens_per_second, tokens_so_far
from batchjobs.cli.moments import time_left
from batchjobs.types import BatchInfo, BatchStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 5.0


class BatchProgress:
    """Shows a batch's counts and speed as long as it is open. ``show`` may be called as often as one likes.

    ``live`` tells the workers' speed at the moment in tokens per second; None where that is unknown.
    """

    def __init__(self, quiet: bool = False, live: Callable[[], float | None] = lambda: None) -> None:
        self._quiet = quiet
        self._live_speed = live
        self._live: tuple[Progress, TaskID] | None = None
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
        if is_live(sys.stderr):
            self._draw(info)
        else:
            self._print(info)

    def _draw(self, info: BatchInfo) -> None:
        if self._live is None:
            self._live = _start_bar(info)
        progress, task = self._live
        progress.update(task, completed=info.counts.done, total=info.counts.total, detail=self._detail(info))

    def _print(self, info: BatchInfo) -> None:
        now = time.monotonic()
        due = self._last_line is None or now - self._last_line >= PLAIN_SECONDS or info.status.is_final
        if not due:
            return
        text = f"{info.counts.done:,} of {info.counts.total:,} done, {self._detail(info)}"
        if text != self._last_text:
            self._last_line, self._last_text = now, text
            say(text)

    def _detail(self, info: BatchInfo) -> str:
        live = self._live_speed() if info.status == BatchStatus.RUNNING else None
        return _detail(info, tokens_per_second(info, live), eta_seconds(info, live))


def _detail(info: BatchInfo, speed: float | None, eta: float | None) -> str:
    parts = [f"{info.counts.running:,} running"]
    if info.counts.failed:
        parts.append(f"{info.counts.failed:,} failed")
    if info.counts.cancelled:
        parts.append(f"{info.counts.cancelled:,} cancelled")
    parts.append(f"{tokens_so_far(info):,} tokens")
    if speed:
        parts.append(f"{speed:,.1f} tokens/s")
    if eta is not None:
        parts.append(f"{time_left(eta)} left")
    if info.paused and not info.status.is_final:
        parts.append(f"paused by {info.pause.by}" if info.pause else "paused")
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
