"""``batchjobs cancel``."""

from __future__ import annotations

import sys

import click

from batchjobs.cli.console import out_json, say
from batchjobs.cli.options import as_json, open_client
from batchjobs.text import plural, visible


@click.command("cancel")
@click.argument("batch", required=False)
@click.option("--request", help="Cancel this one request, named BATCH/INDEX.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def cancel_command(ctx: click.Context, batch: str | None, request: str | None, yes: bool, as_json: bool) -> None:
    """Cancel what has not ended of BATCH, or one request.

    Requests that have ended keep their answers, requests being answered keep their text so far. Cancelling again is
    harmless. On a terminal the command asks first.
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
        if left:
            _confirm(f"Cancel {plural(left, 'request')} of batch {batch}?", yes)
        counts = client.cancel_batch(batch)
        if as_json:
            out_json(status_object(client.store.batch(batch)))
    running = counts.total - counts.done
    later = f"; {plural(running, 'request')} being answered will end within seconds" if running else ""
    say(f"batch {batch}: {counts.cancelled:,} cancelled, {counts.completed:,} completed{later}")


def _cancel_request(ctx: click.Context, request: str, yes: bool, as_json: bool) -> None:
    from batchjobs.cli.show import request_reference

    batch_id, index = request_reference(request)
    with open_client(ctx) as client:
        client.store.result(batch_id, index)
        _confirm(f"Cancel request {request}?", yes)
        client.cancel_request(batch_id, index)
        found = client.store.result(batch_id, index)
    if as_json:
        out_json({"batch_id": batch_id, "index": index, "custom_id": found.request.custom_id, "status": found.state})
    ended = found.completion is not None
    say(f"request {request}: {found.state}" + ("" if ended else "; it is being cancelled"))


def _confirm(question: str, yes: bool) -> None:
    if not yes and _is_asked():
        click.confirm(visible(question), abort=True, err=True)


def _is_asked() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
