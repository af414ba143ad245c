"""Stored results -> lines in the form of the OpenAI Batch API's output and error files.

One rule for all failures: a line either has a response with status 200 and no error, or an error and no response. So a
reader that looks at one of the two cannot take a failure for an answer.
"""

from __future__ import annotations

import codecs
import math
from typing import TYPE_CHECKING, Any

from batchjobs.echo import prompt_text
from batchjobs.results import json_line
from batchjobs.types import Completion, Endpoint, PromptScores, RequestError, RequestStatus, TokenText, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import StoredResult

_ASTRAY = 8
"""How many characters tokens and text may differ by."""

_VERY_UNLIKELY = -9999.0
"""The API's own value for a logprob that is no finite number: its types have no null there."""

_ERROR_CODES = {RequestStatus.CANCELLED: "batch_cancelled", RequestStatus.EXPIRED: "batch_expired"}


def is_success(stored: StoredResult) -> bool:
    """Whether the result goes into the output file, not into the error file: all of its choices are complete."""
    return stored.state == RequestStatus.COMPLETED


def openai_line(stored: StoredResult) -> bytes:
    """The output or error line of a finished request, without its end."""
    if not stored.choices:
        raise ValueError(f"request {stored.batch_id}/{stored.request.index} has no outcome yet")
    name = f"{stored.batch_id}-{stored.request.index}"
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": stored.request.custom_id}
    if is_success(stored):
        response = {"status_code": 200, "request_id": f"req_{name}", "body": _body(stored, name)}
        return json_line({**line, "response": response, "error": None})
    return json_line({**line, "response": None, "error": _error(stored).as_dict()})


def _error(stored: StoredResult) -> RequestError:
    if stored.error is not None:
        return stored.error
    code = _ERROR_CODES.get(RequestStatus(stored.state), "failed")
    return RequestError(code=code, message=f"the request was {stored.state} before it completed")


def _body(stored: StoredResult, name: str) -> dict[str, Any]:
    is_chat = stored.request.endpoint is Endpoint.CHAT
    first = stored.choices[0]
    made_at = max((c.finished_at for c in stored.choices if c.finished_at is not None), default=stored.created_at)
    completion_tokens = sum(completion.completion_tokens for completion in stored.choices)
    return {
        "id": f"chatcmpl-{name}" if is_chat else f"cmpl-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(made_at.timestamp()),
        "model": first.model,
        "choices": [(_chat_choice if is_chat else _text_choice)(stored, choice) for choice in stored.choices],
        "usage": {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": first.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        },
        "system_fingerprint": first.model_version,
    }


def _chat_choice(stored: StoredResult, completion: Completion) -> dict[str, Any]:
    return {
        "index": completion.choice,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _chat_logprobs(completion) if _wants_logprobs(stored) else None,
        "finish_reason": completion.finish_reason,
    }


def _text_choice(stored: StoredResult, completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "index": completion.choice,
        "logprobs": _text_logprobs(stored, completion) if _wants_logprobs(stored) else None,
        "finish_reason": completion.finish_reason,
    }


def _wants_logprobs(stored: StoredResult) -> bool:
    """``false`` and absent mean no; the number 0 means the sampled token alone."""
    wanted = stored.request.body.get("logprobs")
    return wanted is not None and wanted is not False


# ------------------------------------------------------------------------------------------------------- logprobs


def _chat_logprobs(completion: Completion) -> dict[str, Any]:
    tops = completion.top_logprobs or [()] * completion.completion_tokens
    content = [
        {
            **_token(text),
            "logprob": _finite(logprob),
            "top_logprobs": [{**_token(other), "logprob": _finite(chance)} for _, chance, other in top],
        }
        for text, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(text: TokenText) -> dict[str, Any]:
    return {"token": _shown(text), "bytes": list(_bytes_of(text))}


def _text_logprobs(stored: StoredResult, completion: Completion) -> dict[str, Any]:
    """Those of the answer, behind those of the prompt where it was repeated."""
    scores = stored.choices[0].prompt_scores or _NO_PROMPT
    prompt = prompt_text(stored.request.body["prompt"], scores.tokens) if stored.request.body.get("echo") else ""
    tokens = [_shown(text) for text in (*scores.tokens, *completion.tokens)]
    logprobs = [None if each is None else _finite(each) for each in (*scores.logprobs, *completion.logprobs)]
    tops: list[TopLogprobs | None] | None = None
    if scores.top_logprobs is not None or completion.top_logprobs is not None:
        tops = [
            *(scores.top_logprobs or [None] * len(scores.tokens)),
            *(completion.top_logprobs or [None] * completion.completion_tokens),
        ]
    offsets = text_offsets(completion.tokens, completion.text[len(prompt) :])
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops and [_by_text(*row) for row in zip(tops, tokens, logprobs, strict=True)],
        "text_offset": text_offsets(scores.tokens, prompt) + [len(prompt) + offset for offset in offsets],
    }


_NO_PROMPT = PromptScores(token_ids=(), tokens=(), logprobs=(), top_logprobs=None)


def _by_text(top: TopLogprobs | None, sampled: str, sampled_logprob: float | None) -> dict[str, float | None] | None:
    """Keyed by text, as this older form is: the likeliest tokens and the sampled one. Of two ids with one text the
    likelier one, which comes first, stays. None for the first token of a prompt."""
    if top is None:
        return None
    chances: dict[str, float | None] = {}
    for _, logprob, text in top:
        chances.setdefault(_shown(text), _finite(logprob))
    chances.setdefault(sampled, sampled_logprob)
    return chances


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _VERY_UNLIKELY


def text_offsets(tokens: Sequence[TokenText], text: str) -> list[int]:
    """Where in ``text`` each token begins, in characters.

    A token that is not in the text, because it is special or behind a stop string, begins where the next one does. One
    that completes a character begins where that character does. Where a tokenizer changed the text a little, by a blank
    put in front or a character written in another way, the next token that is found again leads back.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    at = 0
    for token in tokens:
        offsets.append(at)
        piece = decoder.decode(_bytes_of(token))
        if text.startswith(piece, at):
            at += len(piece)
        elif piece.startswith(text[at:]):
            at = len(text)
        elif piece.startswith(" ") and text.startswith(piece[1:], at):
            at += len(piece) - 1
        elif (there := text.find(piece, at, at + len(piece) + _ASTRAY)) > at:
            offsets[-1] = there
            at = there + len(piece)
    return offsets


def _bytes_of(text: TokenText) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _shown(text: TokenText) -> str:
    """Bytes that are no text alone are written as escapes, as the API does."""
    return text if isinstance(text, str) else "".join(f"\\x{byte:02x}" for byte in text)
