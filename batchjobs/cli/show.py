"""``batchjobs show``: everything about one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import out, out_json, print_fields, print_table
from batchjobs.cli.options import Text, as_json, open_client
from batchjobs.text import shortened

if TYPE_CHECKING:
    from batchjobs.results import Result
    from batchjobs.types import TokenText

_PROMPT_CHARACTERS = 300


@click.command("show")
@click.argument("request")
@click.option("--custom-id", type=Text(), help="The request of this id; REQUEST is then the batch.")
@as_json
@click.pass_context
def show_command(ctx: click.Context, request: str, custom_id: str | None, as_json: bool) -> None:
    """Show REQUEST (BATCH/INDEX, or BATCH with --custom-id): its text, and its tokens with logprobs and times."""
    from batchjobs.results import Result

    with open_client(ctx) as client:
        if custom_id is None:
            stored = client.store.result(*request_reference(request))
        else:
            stored = client.store.result_by_custom_id(request, custom_id)
    result = Result.of(stored)
    if as_json:
        made = {name: getattr(result, name) for name in Result.__dataclass_fields__}
        where = {"batch_id": stored.batch_id, "endpoint": stored.request.endpoint, "body": stored.request.body}
        out_json({**where, **made})
    else:
        print_fields(_fields(stored.batch_id, result, dict(stored.request.body)))
        _print_text(result)
        _print_tokens(result)


def request_reference(reference: str) -> tuple[str, int]:
    """The batch and the index in ``BATCH/INDEX``."""
    batch_id, slash, index = reference.rpartition("/")
    if not slash or not batch_id or not (index.isascii() and index.isdigit()) or len(index) > 18:
        raise click.UsageError("a request is named BATCH/INDEX, for instance 01J.../0 for the first one of a batch")
    return batch_id, int(index)


def _fields(batch_id: str, result: Result, body: dict[str, Any]) -> dict[str, object]:
    prompt = _prompt(body)
    times = [result.created_at, result.started_at, result.first_token_at, result.finished_at]
    created, started, first, finished = (None if t is None else f"{t:%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z" for t in times)
    return {
        "request": f"{batch_id}/{result.index}",
        "custom_id": result.custom_id,
        "status": result.status,
        "finish reason": result.finish_reason,
        "error": f"{result.error.code}: {result.error.message}" if result.error else None,
        "prompt": shortened(prompt, _PROMPT_CHARACTERS),
        "parameters": ", ".join(f"{name}={value}" for name, value in body.items()),
        "tokens": f"{result.prompt_tokens:,} in the prompt ({result.cached_tokens:,} cached), "
        f"{result.completion_tokens:,} generated",
        "model": result.model,
        "version": result.model_version,
        "worker": result.worker,
        "attempt": result.attempt or None,
        "created": created,
        "started": started,
        "first token": first,
        "finished": finished,
    }


def _prompt(body: dict[str, Any]) -> str:
    """Takes the prompt out of the body, as one text; a chat's messages with their roles."""
    messages = body.pop("messages", None)
    if messages is None:
        return str(body.pop("prompt", ""))
    return " | ".join(f"{message['role']}: {message['content']}" for message in messages)


def _print_text(result: Result) -> None:
    if result.text:
        out("")
        out(result.text)


def _print_tokens(result: Result) -> None:
    if not result.token_ids:
        return
    out("")
    columns = ["position", "token", "id", "logprob", "seconds"]
    tops = result.top_logprobs or ()
    if tops:
        columns.append("alternatives")
    rows = (
        [
            position,
            _token(result.tokens[position]),
            result.token_ids[position],
            f"{result.logprobs[position]:.4f}",
            f"{result.token_times[position]:.3f}",
            *([", ".join(f"{_token(text)} {chance:.2f}" for _, chance, text in tops[position])] if tops else []),
        ]
        for position in range(len(result.token_ids))
    )
    print_table(columns, rows, right=("position", "id", "logprob", "seconds"))


def _token(text: TokenText) -> str:
    """Quoted, because blanks count."""
    return f'"{text}"' if isinstance(text, str) else " ".join(f"{byte:02x}" for byte in text)
