"""``batchjobs follow``: a batch and its workers as they go on, until the batch has ended."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import is_live, out_json, rich_console, say
from batchjobs.cli.estimate import live_speed
from batchjobs.cli.options import as_json, open_client
from batchjobs.cli.progress import PLAIN_SECONDS, BatchProgress
from batchjobs.cli.status import judge, status_fields, status_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.live import Live

    from batchjobs.client import Client
    from batchjobs.store import WorkerRow
    from batchjobs.types import BatchInfo


@click.command("follow")
@click.argument("batch")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to follow at most; then exit code 124.")
@as_json
@click.pass_context
def follow_command(ctx: click.Context, batch: str, timeout: float | None, as_json: bool) -> int:
    """Show how BATCH goes on, until it has ended: on a terminal drawn once a second, elsewhere a line every 5 s.

    Exit codes are those of `wait`. Ctrl-C ends the showing and leaves the batch alone. With --json, an object like that
    of `status` is printed every 5 s, and one at the end.
    """
    with open_client(ctx) as client:
        return follow_and_judge(client, batch, timeout, as_json=as_json)


def follow_and_judge(client: Client, batch_id: str, timeout: float | None, *, as_json: bool = False) -> int:
    """Shows the batch until it has ended, and returns the exit code; says why when it is not 0."""
    from batchjobs.waiting import wait_for_end

    is_drawn = not as_json and is_live(sys.stderr)
    try:
        with _Json(client) if as_json else _Drawn(client) if is_drawn else _Plain(client) as shown:
            info = wait_for_end(client.store, batch_id, timeout, shown.show)
    except KeyboardInterrupt:
        say(f"the batch is left alone; `batchjobs follow {batch_id}` shows it again")
        raise
    return judge(client, info)


class _Shown:
    """Something that shows one state after the other while it is open."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> _Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, info: BatchInfo) -> None:
        raise NotImplementedError

    def _failures(self, info: BatchInfo) -> dict[str, int]:
        return self._client.store.failures(info.id) if info.counts.failed else {}

    def _note(self, info: BatchInfo, workers: Sequence[WorkerRow]) -> str | None:
        from batchjobs.cli.waiting_note import why_waiting

        return why_waiting(self._client.store, info, workers)


class _Drawn(_Shown):
    """Drawn on a terminal, each time over what was there before."""

    _live: Live | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, info: BatchInfo) -> None:
        from batchjobs.cli.view import batch_view

        workers = self._client.store.workers()
        fields = status_fields(info, self._failures(info), live_speed(workers))
        view = batch_view(info, fields, workers, self._note(info, workers))
        if self._live is None:
            from rich.live import Live

            self._live = Live(view, console=rich_console(sys.stderr), auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._live.update(view, refresh=True)


class _Plain(_Shown):
    """A line every few seconds where something has changed, and each note once."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._workers: Sequence[WorkerRow] = ()
        self._lines = BatchProgress(live=lambda: live_speed(self._workers))
        self._last_note: str | None = None

    def show(self, info: BatchInfo) -> None:
        self._workers = self._client.store.workers()
        self._lines.show(info)
        note = self._note(info, self._workers)
        if note != self._last_note and note is not None:
            say(f"note: {note}")
        self._last_note = note


class _Json(_Shown):
    """An object every few seconds, and one at the end."""

    _next_at = 0.0

    def show(self, info: BatchInfo) -> None:
        if time.monotonic() < self._next_at and not info.status.is_final:
            return
        self._next_at = time.monotonic() + PLAIN_SECONDS
        workers = self._client.store.workers()
        shown = status_object(info, self._failures(info), live_speed(workers))
        out_json({**shown, "note": self._note(info, workers)})
