"""Stored results -> lines in the form of the OpenAI Batch API's output and error files.

One rule for all failures: a line either has a response with status 200 and no error, or an error and no response. So a
reader that looks at one of the two cannot take a failure for an answer.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from batchjobs.results import json_line
from batchjobs.types import Completion, Endpoint, RequestError, RequestStatus, TokenText, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchjobs.store import StoredResult

_ERROR_CODES = {RequestStatus.CANCELLED: "batch_cancelled", RequestStatus.EXPIRED: "batch_expired"}


def is_success(stored: StoredResult) -> bool:
    """Whether the result goes into the output file, not into the error file."""
    return stored.completion is not None and stored.completion.status == RequestStatus.COMPLETED


def openai_line(stored: StoredResult) -> bytes:
    """The output or error line of a finished request, without its end."""
    completion = stored.completion
    if completion is None:
        raise ValueError(f"request {stored.batch_id}/{stored.request.index} has no outcome yet")
    name = f"{stored.batch_id}-{stored.request.index}"
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": stored.request.custom_id}
    if is_success(stored):
        body = _chat_body if stored.request.endpoint is Endpoint.CHAT else _completion_body
        response = {"status_code": 200, "request_id": f"req_{name}", "body": body(stored, completion, name)}
        return json_line({**line, "response": response, "error": None})
    return json_line({**line, "response": None, "error": _error(completion).as_dict()})


def _error(completion: Completion) -> RequestError:
    if completion.error is not None:
        return completion.error
    code = _ERROR_CODES.get(completion.status, "failed")
    return RequestError(code=code, message=f"the request was {completion.status} before it completed")


def _chat_body(stored: StoredResult, completion: Completion, name: str) -> dict[str, Any]:
    choice = {
        "index": completion.choice,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _chat_logprobs(completion) if _wants_logprobs(stored) else None,
        "finish_reason": completion.finish_reason,
    }
    return _body(f"chatcmpl-{name}", "chat.completion", stored, completion, choice)


def _completion_body(stored: StoredResult, completion: Completion, name: str) -> dict[str, Any]:
    choice = {
        "text": completion.text,
        "index": completion.choice,
        "logprobs": _completion_logprobs(completion) if _wants_logprobs(stored) else None,
        "finish_reason": completion.finish_reason,
    }
    return _body(f"cmpl-{name}", "text_completion", stored, completion, choice)


def _body(
    identity: str, kind: str, stored: StoredResult, completion: Completion, choice: dict[str, Any]
) -> dict[str, Any]:
    made_at = completion.finished_at or stored.created_at
    return {
        "id": identity,
        "object": kind,
        "created": int(made_at.timestamp()),
        "model": completion.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        },
        "system_fingerprint": completion.model_version,
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
            "logprob": logprob,
            "top_logprobs": [{**_token(other), "logprob": chance} for _, chance, other in top],
        }
        for text, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(text: TokenText) -> dict[str, Any]:
    return {"token": _shown(text), "bytes": list(_bytes_of(text))}


def _completion_logprobs(completion: Completion) -> dict[str, Any]:
    shown = [_shown(text) for text in completion.tokens]
    tops = completion.top_logprobs
    return {
        "tokens": shown,
        "token_logprobs": list(completion.logprobs),
        "top_logprobs": tops and [_by_text(*row) for row in zip(tops, shown, completion.logprobs, strict=True)],
        "text_offset": text_offsets(completion.tokens, completion.text),
    }


def _by_text(top: TopLogprobs, sampled: str, sampled_logprob: float) -> dict[str, float]:
    """Keyed by text, as this older form is: the likeliest tokens and the sampled one. Of two ids with one text the
    likelier one, which comes first, stays."""
    chances: dict[str, float] = {}
    for _, logprob, text in top:
        chances.setdefault(_shown(text), logprob)
    chances.setdefault(sampled, sampled_logprob)
    return chances


def text_offsets(tokens: Sequence[TokenText], text: str) -> list[int]:
    """Where in ``text`` each token begins, in characters.

    A token that is not in the text, because it is special or behind a stop string, begins where the next one does. One
    that completes a character begins where that character does.
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
    return offsets


def _bytes_of(text: TokenText) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _shown(text: TokenText) -> str:
    """Bytes that are no text alone are written as escapes, as the API does."""
    return text if isinstance(text, str) else "".join(f"\\x{byte:02x}" for byte in text)
