"""``batchjobs show``: everything about one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import out, out_json, print_fields, print_table
from batchjobs.cli.options import Text, as_json, open_client
from batchjobs.text import plural, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from batchjobs.results import Choice, Result
    from batchjobs.types import Completion, Progress, PromptScores, TokenText, TopLogprobs, VersionSpan

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
        earlier = client.store.past_completions(stored.batch_id, stored.request.index)
        begun = client.store.progress(stored.batch_id, stored.request.index)
    result = Result.of(stored)
    if as_json:
        where = {"batch_id": stored.batch_id, "endpoint": stored.request.endpoint, "body": stored.request.body}
        more = {"earlier_attempts": [_earlier(past) for past in earlier], "so_far": [_so_far(each) for each in begun]}
        out_json({**where, **result.as_dict(), **more})
        return
    print_fields(_fields(stored.batch_id, result, dict(stored.request.body)))
    _print_earlier(earlier)
    for each in begun:
        out("")
        out(f"{plural(len(each.token_ids), 'token')} so far" + (f" of choice {each.choice}" if len(begun) > 1 else ""))
        out(_so_far(each)["text"])
        _print_versions(each.version_spans, len(each.token_ids))
    if stored.completion is not None and stored.completion.prompt_scores is not None:
        _print_prompt(stored.completion.prompt_scores)
    for choice in result.choices:
        if result.n > 1:
            out("")
            out(f"choice {choice.choice}: {_ended(choice)}")
        _print_text(choice)
        _print_versions(choice.version_spans, choice.completion_tokens)
        _print_tokens(choice)


def request_reference(reference: str) -> tuple[str, int]:
    """The batch and the index in ``BATCH/INDEX``."""
    batch_id, slash, index = reference.rpartition("/")
    if not slash or not batch_id or not (index.isascii() and index.isdigit()) or len(index) > 18:
        raise click.UsageError("a request is named BATCH/INDEX, for instance 01J.../0 for the first one of a batch")
    return batch_id, int(index)


def _earlier(past: Completion) -> dict[str, Any]:
    """An attempt before the last retry, without its tokens; those are in the table past_completions."""
    names = ("attempt", "choice", "status", "finish_reason", "text", "error", "worker", "started_at", "finished_at")
    return {name: getattr(past, name) for name in names}


def _so_far(begun: Progress) -> dict[str, Any]:
    """What there is of a choice that goes on, without its tokens; those are in the table checkpoints."""
    from batchjobs.echo import prompt_text

    return {
        "choice": begun.choice,
        "tokens": len(begun.token_ids),
        "text": prompt_text((), begun.tokens),
        "version_spans": begun.version_spans,
    }


def _print_earlier(earlier: Sequence[Completion]) -> None:
    if not earlier:
        return
    out("")
    several = any(past.choice for past in earlier)
    rows = (
        [
            past.attempt,
            *([past.choice] if several else []),
            past.status,
            f"{past.error.code}: {past.error.message}" if past.error else past.finish_reason,
            past.worker,
            _moment(past.finished_at),
        ]
        for past in earlier
    )
    columns = ["earlier attempt", *(["choice"] if several else []), "status", "ended by", "worker", "finished"]
    print_table(columns, rows, right=("earlier attempt", "choice"))


def _moment(instant: datetime | None) -> str | None:
    return None if instant is None else f"{instant:%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"


def _fields(batch_id: str, result: Result, body: dict[str, Any]) -> dict[str, object]:
    prompt = _prompt(body)
    times = [result.created_at, result.started_at, result.first_token_at, result.finished_at]
    created, started, first, finished = map(_moment, times)
    return {
        "request": f"{batch_id}/{result.index}",
        "custom_id": result.custom_id,
        "status": result.status,
        "finish reason": result.finish_reason,
        "error": f"{result.error.code}: {result.error.message}" if result.error else None,
        "prompt": shortened(prompt, _PROMPT_CHARACTERS),
        "parameters": ", ".join(f"{name}={value}" for name, value in body.items()),
        "tokens": f"{result.prompt_tokens:,} in the prompt ({result.cached_tokens:,} cached), "
        f"{sum(choice.completion_tokens for choice in result.choices):,} generated",
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


def _ended(choice: Choice) -> str:
    said = f"{choice.status}, {choice.finish_reason}, {plural(choice.completion_tokens, 'token')}"
    return said if choice.error is None else f"{said}, {choice.error.code}: {choice.error.message}"


def _print_text(choice: Choice) -> None:
    if choice.text:
        out("")
        out(choice.text)


def _print_versions(spans: Sequence[VersionSpan], tokens: int) -> None:
    """Who drew which tokens, where that was not one worker with one version all along."""
    if len(spans) < 2:
        return
    out("")
    ends = [*(span.from_token for span in spans[1:]), tokens]
    rows = (
        [f"{span.from_token} to {end - 1}", span.version, span.worker, span.attempt or None]
        for span, end in zip(spans, ends, strict=True)
    )
    print_table(("tokens", "version", "worker", "attempt"), rows, right=("attempt",), whole=("tokens", "version"))


def _print_prompt(scores: PromptScores) -> None:
    out("")
    tops = scores.top_logprobs
    rows = (
        [
            position,
            _token(scores.tokens[position]),
            scores.token_ids[position],
            "" if logprob is None else f"{logprob:.4f}",
            *([_alternatives(tops[position])] if tops else []),
        ]
        for position, logprob in enumerate(scores.logprobs)
    )
    columns = ["position", "prompt token", "id", "logprob", *(["alternatives"] if tops else [])]
    print_table(columns, rows, right=("position", "id", "logprob"))


def _print_tokens(choice: Choice) -> None:
    if not choice.token_ids:
        return
    out("")
    tops = choice.top_logprobs
    rows = (
        [
            position,
            _token(choice.tokens[position]),
            choice.token_ids[position],
            f"{choice.logprobs[position]:.4f}",
            f"{choice.token_times[position]:.3f}",
            *([_alternatives(tops[position])] if tops else []),
        ]
        for position in range(len(choice.token_ids))
    )
    columns = ["position", "token", "id", "logprob", "seconds", *(["alternatives"] if tops else [])]
    print_table(columns, rows, right=("position", "id", "logprob", "seconds"))


def _alternatives(top: TopLogprobs | None) -> str:
    return ", ".join(f"{_token(text)} {chance:.2f}" for _, chance, text in top or ())


def _token(text: TokenText) -> str:
    """Quoted, because blanks count."""
    return f'"{text}"' if isinstance(text, str) else " ".join(f"{byte:02x}" for byte in text)
