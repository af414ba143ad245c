"""``batchjobs retry``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchjobs.cli.console import out_json, say
from batchjobs.cli.options import as_json, open_client
from batchjobs.text import plural

if TYPE_CHECKING:
    from batchjobs.retrying import Retry


@click.command("retry")
@click.argument("batch")
@as_json
@click.pass_context
def retry_command(ctx: click.Context, batch: str, as_json: bool) -> None:
    """Let the failed requests of BATCH run again.

    Answers that are there stay as they are, and what failed is kept: `batchjobs show` lists it as earlier attempts.
    Lines that were refused when the batch was submitted can never run. The command may be given again at any time.
    """
    from batchjobs.retrying import retry

    with open_client(ctx) as client:
        done = retry(client.store, lambda: client.queue, batch)
    if done.warning is not None:
        say(f"warning: {done.warning}")
    if as_json:
        out_json(
            {
                "id": batch,
                "retried": done.requests,
                "refused": done.refused,
                "held": done.held,
                "queued": done.requests > 0 and done.warning is None,
            }
        )
    say(f"batch {batch}: {_sentence(done)}")


def _sentence(done: Retry) -> str:
    if not (done.requests or done.refused or done.held):
        return "no request has failed; nothing to run again"
    parts = [f"{_run(done.requests)} again"]
    if done.refused:
        was = "was a refused line" if done.refused == 1 else "were refused lines"
        parts.append(f"{done.refused:,} {was}, which can never run: mend and submit {_them(done.refused)} anew")
    if done.held:
        shards = "its shard" if done.held == 1 else "their shards"
        parts.append(
            f"{plural(done.held, 'failed request')} left, because a worker holds {shards} right now: "
            "give the command again later"
        )
    return "; ".join(parts)


def _run(count: int) -> str:
    if not count:
        return "nothing runs"
    return f"{plural(count, 'request')} {'runs' if count == 1 else 'run'}"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
