"""Lines in the form of the OpenAI Batch API: the envelope, and what its bodies may carry beside sampling fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchjobs.fields import FieldError, json_type, listed, quoted, unknown_name, wrong_type
from batchjobs.foreign_lines import url_advice
from batchjobs.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVELOPE = ("custom_id", "method", "url", "body")

# Fields of the API that change the answer, with what to do instead.
UNSUPPORTED: Mapping[str, str] = {
    "stream": "batch answers are not streamed; remove it",
    "stream_options": "batch answers are not streamed; remove it",
    "tools": "tools cannot be called from a batch",
    "tool_choice": "tools cannot be called from a batch",
    "parallel_tool_calls": "tools cannot be called from a batch",
    "functions": "tools cannot be called from a batch",
    "function_call": "tools cannot be called from a batch",
    "web_search_options": "tools cannot be called from a batch",
    "suffix": "text cannot be filled in between",
    "audio": "text only",
    "modalities": 'only ["text"]',
    "prediction": "predicted output is not used",
    "store": "only store = false; every answer is kept in the batch's own database",
    "reasoning_effort": "put it into chat_template_kwargs when the model's template knows it",
    "verbosity": "there is no such setting",
    "chat_template": "a line cannot bring its own template",
    "input": "use messages for a chat, or prompt for a completion",
    "instructions": "use a system message",
    "max_output_tokens": "use max_tokens",
    "options": "write its fields beside prompt or messages",
    "parameters": "write its fields beside prompt or messages",
    "sampling_params": "write its fields beside prompt or messages",
    "generation_config": "write its fields beside prompt or messages",
    "generationConfig": "write its fields beside prompt or messages",
    "extra_body": "write its fields into the body itself",
    "guided_json": "use response_format",
    "completion": "the answer is what the model gives; remove it",
}

# The same fields with a value that asks for nothing.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "modalities": (["text"],),
    "tools": ([],),
}
_IGNORED = dict.fromkeys(
    ("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), str
)
"""Labels for the API's own books; they change no answer."""

OTHER_NAMES = frozenset({"model", "model_version", "metadata", "chat_template_kwargs", *_IGNORED, *_HARMLESS})


def open_envelope(line: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint and the body of an OpenAI Batch line. Raises FieldError with every missing part at once."""
    missing = [name for name in ("method", "url", "body") if name not in line]
    if missing:
        raise _incomplete(line, missing)
    if line["method"] != "POST":
        raise FieldError(f"method must be POST, not {_shown(line['method'])}", "method")
    try:
        endpoint = Endpoint(line["url"])
    except ValueError:
        raise _foreign_url(line["url"]) from None
    if type(line["body"]) is not dict:
        raise wrong_type("body", "an object", line["body"])
    if line.get("custom_id") is None:
        raise FieldError("missing custom_id", "custom_id")
    for name in line:
        if name not in ENVELOPE:
            raise unknown_name(name, ENVELOPE)
    return endpoint, line["body"]


def refused(name: str, value: Any) -> str | None:
    """Why a field of the API that is no sampling field cannot be used; None when it asks for nothing."""
    if name in _IGNORED:
        return None if type(value) is _IGNORED[name] else f"must be a string, not {json_type(value)}"
    # Compared by type too: 1 is not true.
    if any(type(value) is type(fine) and value == fine for fine in _HARMLESS.get(name, ())):
        return None
    return f"is not supported: {UNSUPPORTED[name]}"


def _incomplete(line: dict[str, Any], missing: list[str]) -> FieldError:
    message = f"missing {', '.join(missing)} (the line has: {listed(line, width=32)})"
    body = line.get("body")
    if type(body) is dict:
        url = Endpoint.COMPLETIONS if "prompt" in body else Endpoint.CHAT
        wanted = {"method": "POST", "url": url}
        message += "; add " + ", ".join(f'"{name}": "{wanted[name]}"' for name in missing)
    return FieldError(message, missing[0])


def _foreign_url(url: Any) -> FieldError:
    advice = url_advice(url) if type(url) is str else None
    message = f"url must be {' or '.join(Endpoint)}, not {_shown(url)}"
    return FieldError(f"{message}; {advice}" if advice else message, "url")


def _shown(value: Any) -> str:
    return quoted(value) if type(value) is str else json_type(value)
