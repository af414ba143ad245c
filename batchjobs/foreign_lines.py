"""Lines that were written for another program: what they are, and what to write instead.

Only lines that are refused anyway come here. What is said never depends on the texts in a line, so that the lines of
one file get one message.
"""

from __future__ import annotations

import difflib
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from batchjobs.text import shortened
from batchjobs.types import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

_AS_CHAT = '{"messages": [{"role": "user", "content": "..."}]}'
_GEMINI = f"this is a line for the Gemini API; write its contents as {_AS_CHAT}"
_RESPONSES = "a line for the Responses API; put its input into messages"
_ANTHROPIC = "this is a line for the Anthropic API"
_RESULT = "this is a line of results; give the file that was submitted"

# Keys of other APIs, with the type of their values.
_TELLING: Mapping[str, tuple[type, str]] = {
    "contents": (list, _GEMINI),
    "params": (dict, f"{_ANTHROPIC}; write the messages and max_tokens of its params beside custom_id"),
    "modelInput": (dict, "this is a line for Amazon Bedrock; write the messages of its modelInput beside custom_id"),
    "instances": (list, 'this is a line for Vertex AI; write each of its instances as {"prompt": "..."}'),
    "finish_reason": (str, _RESULT),
}  # fmt: skip
_ENDPOINTS: Mapping[str, str] = {
    "responses": f"this is {_RESPONSES} and use {Endpoint.CHAT}",
    "messages": f"{_ANTHROPIC}; use {Endpoint.CHAT}",
    "embeddings": "this is a line for embeddings, which are not made here",
    "moderations": "this is a line for moderation, which is not done here",
    "generations": "this is a line for images, which are not made here",
}

_PROMPT_NAMES = (
    "prompt", "input", "inputs", "input_text", "inputtext", "text", "question", "query", "instruction", "user_prompt",
    "user_input", "prompt_text", "content", "user", "message", "task", "request", "q",
)  # fmt: skip
_CHAT_NAMES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue", "turns", "history")
_NAMES_LOOKED_AT = 50


def line_advice(line: Mapping[str, Any]) -> str | None:
    """What a line without ``prompt`` and ``messages`` is, or which of its keys seems to hold them; None for no idea."""
    request, response = line.get("request"), line.get("response")
    if type(request) is dict and "contents" in request:
        return _GEMINI
    if type(response) is dict and "body" in response:
        return _RESULT
    for name, (kind, advice) in _TELLING.items():
        if type(line.get(name)) is kind:
            return advice
    return _renaming(line) or _unpacking(line)


def url_advice(url: str) -> str | None:
    """What a line for this url is, or which url is meant."""
    path = _path_of(url).rstrip("/")
    for endpoint in Endpoint:
        if path.endswith(endpoint.removeprefix("/v1")):
            return f"did you mean {endpoint}?"
    return _ENDPOINTS.get(path.rpartition("/")[2])


def body_advice(body: Mapping[str, Any], endpoint: Endpoint) -> str | None:
    """What to do about a body that lacks what its url asks for."""
    if endpoint is Endpoint.CHAT and "prompt" in body:
        return f"for a prompt, url must be {Endpoint.COMPLETIONS}"
    if endpoint is Endpoint.COMPLETIONS and "messages" in body:
        return f"for messages, url must be {Endpoint.CHAT}"
    if endpoint is Endpoint.CHAT and "input" in body:
        return f"this is {_RESPONSES}"
    return line_advice(body)


def _renaming(line: Mapping[str, Any]) -> str | None:
    """``did you mean prompt?``, where one key most likely is the prompt under another name."""
    by_name = {name[:40].lower(): name for name in islice(line, _NAMES_LOOKED_AT)}
    for name in (*_CHAT_NAMES, *_PROMPT_NAMES):
        if name in by_name and _says_something(line[by_name[name]]):
            return _meant(by_name[name], line[by_name[name]])
    for wanted in ("prompt", "messages"):
        if close := difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.8):
            return _meant(by_name[close[0]], line[by_name[close[0]]])
    return None


def _meant(name: str, value: Any) -> str:
    is_chat = type(value) is list and (not value or any(type(item) is dict for item in value))
    wanted = "messages" if is_chat else "prompt"
    return f"did you mean {wanted} instead of {shortened(name, 32)}?"


def _says_something(value: Any) -> bool:
    return type(value) in (str, list) and bool(value)


def _unpacking(line: Mapping[str, Any]) -> str | None:
    """Where the whole file is one object with the requests in a list, or each request is an object in another."""
    for name, value in line.items():
        item = value[0] if type(value) is list and value else value
        if type(item) is dict and item.keys() & {"prompt", "messages", "body", "params"}:
            one = "each request as a line of its own" if type(value) is list else "its fields into the line itself"
            return f"the request is inside {shortened(name, 32)}; write {one}"
    return None


def _path_of(url: str) -> str:
    try:
        return urlsplit(url[:500]).path
    except ValueError:
        return url[:500]
