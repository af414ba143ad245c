"""``batchjobs cancel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchjobs.cli.asking import confirm, yes
from batchjobs.cli.console import out_json, say
from batchjobs.cli.options import as_json, open_client
from batchjobs.errors import WaitTimeout
from batchjobs.text import plural
from batchjobs.types import RequestStatus

if TYPE_CHECKING:
    from batchjobs.client import Client
    from batchjobs.types import BatchInfo

OUTCOME_SECONDS = 3.0
"""How long the command waits for what workers make of it; a worker that lives takes less than two."""


@click.command("cancel")
@click.argument("batch", required=False)
@click.option("--request", help="Cancel this one request, named BATCH/INDEX.")
@yes
@as_json
@click.pass_context
def cancel_command(ctx: click.Context, batch: str | None, request: str | None, yes: bool, as_json: bool) -> None:
    """Cancel what has not ended of BATCH, or one request, and say what became of it.

    Requests that have ended keep their answers, requests being answered keep their text so far. Cancelling again is
    harmless. What was never submitted in full is discarded. On a terminal the command asks first.
    """
    if (batch is None) == (request is None):
        raise click.UsageError("name a batch, or one request with --request")
    if batch is not None:
        _cancel_batch(ctx, batch, yes, as_json)
    elif request is not None:
        _cancel_request(ctx, request, yes, as_json)


def _cancel_batch(ctx: click.Context, batch: str, yes: bool, as_json: bool) -> None:
    from batchjobs.cli.status import status_object

    with open_client(ctx) as client:
        before = client.store.batch(batch)
        left = before.counts.total - before.counts.done
        if before.submitted_at is None:
            _discard(client, before, yes, as_json)
            return
        if left:
            confirm(f"Cancel {plural(left, 'request')} of batch {batch}?", yes)
        client.cancel_batch(batch)
        after = _ended(client, batch)
        if as_json:
            out_json(status_object(after))
    say(f"batch {batch}: {after.counts.cancelled:,} cancelled, {after.counts.completed:,} completed{_rest(after)}")


def _discard(client: Client, info: BatchInfo, yes: bool, as_json: bool) -> None:
    """Of a submission that was cut, or is still on its way: then that one ends with an error."""
    from batchjobs.cli.status import status_object

    arrived = f"batch {info.id} was never submitted in full: {plural(info.counts.total, 'request')} arrived"
    confirm(f"{arrived}. Discard them?", yes)
    client.store.discard_batch(info.id)
    if as_json:
        out_json({**status_object(info), "status": "discarded"})
    say(f"{arrived}; it is discarded, nothing of it ran")


def _ended(client: Client, batch_id: str) -> BatchInfo:
    """The batch once its workers have let go of it, or as it is after a while."""
    from batchjobs.waiting import wait_for_end

    try:
        return wait_for_end(client.store, batch_id, _patience(client))
    except WaitTimeout:
        return client.store.batch(batch_id)


def _rest(info: BatchInfo) -> str:
    left = info.counts.total - info.counts.done
    if not left:
        return ""
    are, them = ("is", "it") if left == 1 else ("are", "them")
    return f"; {plural(left, 'request')} {are} still with a worker, which ends {them} within seconds if it lives"


def _cancel_request(ctx: click.Context, request: str, yes: bool, as_json: bool) -> None:
    from batchjobs.cli.show import request_reference

    batch_id, index = request_reference(request)
    with open_client(ctx) as client:
        before = client.store.result(batch_id, index)
        if before.completion is None:
            confirm(f"Cancel request {request}?", yes)
        client.cancel_request(batch_id, index)
        found = client.request_outcome(batch_id, index, _patience(client))
    if as_json:
        out_json({"batch_id": batch_id, "index": index, "custom_id": found.request.custom_id, "status": found.state})
    say(f"request {request}: {_what_it_became(before.state, found.state, ended=found.completion is not None)}")


def _patience(client: Client) -> float:
    """Where no worker lives, there is nothing to wait for."""
    return OUTCOME_SECONDS if any(worker.is_alive for worker in client.store.workers()) else 0.0


def _what_it_became(before: str, now: str, *, ended: bool) -> str:
    if not ended:
        return f"{now}; it is still with a worker, which ends it within seconds if it lives"
    if now != RequestStatus.CANCELLED:
        return f"too late to cancel, it had ended before: {now}"
    return "it was cancelled before" if before == RequestStatus.CANCELLED else "cancelled"
