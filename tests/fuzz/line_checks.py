"""What holds for every input line, good or bad: the properties that the fuzz of the lines checks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from batchjobs.jsonl import MAX_CUSTOM_ID_CHARACTERS, InvalidLineError, parse_line
from batchjobs.sampling_fields import Defaults
from batchjobs.store.rows import is_storable, request_row
from batchjobs.text import visible
from batchjobs.types import Request, SamplingParams

LONGEST_MESSAGE = 500
LONGEST_FIELD = 200
CODES = frozenset({"invalid_request", "invalid_json", "invalid_utf8", "line_too_long"})
_LINE, _INDEX = 123_456, 789
_DERIVED = ("prompt_logprobs",)
"""Stored fields that follow from others and are none of a line."""


_DEFAULTS = {each.name: getattr(SamplingParams(), each.name) for each in dataclasses.fields(SamplingParams)}
_DEFAULTS |= {"echo": False, "response_format": {"type": "text"}}
_UNSTORED = ("max_completion_tokens", "best_of", "stream", "store", "modalities", "user", "service_tier")
_UNSTORED += ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "tools")
"""Other names for what is stored, and fields that ask for nothing."""


class Broken(AssertionError):
    """A property does not hold; the text says which."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def check_line(raw: bytes, line: int = _LINE, index: int = _INDEX) -> tuple[str, str]:
    """The verdict on a line ("accepted" or the code of its error) and what was said. Raises Broken."""
    try:
        request = parse_line(raw, line, index)
    except InvalidLineError as refusal:
        check_refusal(refusal, line)
        return refusal.error.code, refusal.error.message
    except Exception as error:
        raise Broken(f"parse_line raised {type(error).__name__}: {str(error)[:300]}") from error
    try:
        check_request(request, index)
        check_nothing_lost(request, raw)
        check_memory(request, raw)
        check_written_back(request)
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"what was accepted raises {type(error).__name__}: {str(error)[:300]}") from error
    return "accepted", f"{request.endpoint} {' '.join(sorted(request.body))}"


def check_refusal(refusal: InvalidLineError, line: int) -> None:
    error = refusal.error
    demand(error.line == line, f"the error is on line {error.line}, not {line}")
    demand(error.code in CODES, f"unknown code {error.code}")
    demand(0 < len(error.message) <= LONGEST_MESSAGE, f"a message of {len(error.message)} characters")
    demand(visible(error.message) == error.message, f"control characters in the message {error.message!r}")
    field = error.field or ""
    demand(len(field) <= LONGEST_FIELD and visible(field) == field, f"the field {field[:300]!r}")
    demand(len(error.custom_id or "") <= MAX_CUSTOM_ID_CHARACTERS, "a long custom_id")
    demand(is_storable(error.message) and is_storable(error.custom_id or ""), "an error that cannot be stored")


def check_request(request: Request, index: int) -> None:
    demand(request.index == index, "another index")
    demand(0 < len(request.custom_id) <= MAX_CUSTOM_ID_CHARACTERS, "an empty or long custom_id")
    demand(("prompt" in request.body) != ("messages" in request.body), "neither or both of prompt and messages")
    demand(bool(request.body.get("prompt") or request.body.get("messages")), "an empty prompt")
    demand(all(map(is_storable, strings_of(request.body))), "NUL or half of a surrogate pair in the body")
    body = request_row("batch", request, 64, rejected=False)[4]
    demand(written(strictly_read(body)) == written(dict(request.body)), "the stored body reads back as another one")
    sampling = request.sampling.as_fields()
    demand(all(written(request.body.get(name)) == written(value) for name, value in sampling.items()
               if name != "logit_bias"), "the sampling reads back as another one")  # fmt: skip


def check_nothing_lost(request: Request, raw: bytes) -> None:
    """Another reader finds the same in the line, and every field of it is in the request or asks for nothing."""
    line = strictly_read(raw.decode())
    fields = line.get("body", line)
    given = line.get("custom_id")
    demand(request.custom_id == (f"request-{request.index}" if given is None else given), "another custom_id")
    demand(fields.get("prompt") == request.body.get("prompt"), "another prompt")
    for name in ("metadata", "model", "model_version", "logprobs", "seed", "max_tokens", "n"):
        if fields.get(name) is not None:
            demand(fields[name] == request.body.get(name, _DEFAULTS.get(name)), f"another {name}")
    demand(len(fields.get("logit_bias") or ()) == len(request.sampling.logit_bias), "a bias was lost")
    for name, value in fields.items():
        if value is None or name in request.body or name in ("custom_id", *_UNSTORED):
            continue
        wanted = tuple(value) if isinstance(value, list) else value
        demand(name in _DEFAULTS and _DEFAULTS[name] == wanted, f"{name} was dropped")


def check_memory(request: Request, raw: bytes) -> None:
    """The lines before, whose sampling is remembered, changed nothing."""
    try:
        alone = parse_line(raw, 1, request.index, Defaults())
    except InvalidLineError as refusal:
        raise Broken(f"lines before made a bad one good: {refusal}") from refusal
    demand(same(request, alone, raw), "lines before changed the request")


def check_written_back(request: Request) -> None:
    """What was accepted is a plain line again, and the same request."""
    fields = {name: value for name, value in request.body.items() if name not in _DERIVED}
    line = orjson.dumps({"custom_id": request.custom_id, **fields})
    try:
        again = parse_line(line, 1, request.index)
    except InvalidLineError as refusal:
        raise Broken(f"what was accepted is refused when it is written back: {refusal}") from refusal
    demand(same(request, again, line), "what was accepted becomes another request when it is written back")


def same(one: Request, other: Request, line: bytes) -> bool:
    """Whether two readings of a line agree, to the type of each number. Seeds are drawn where the line has none."""
    left, right = dict(one.body), dict(other.body)
    if not _has_seed(line):
        left.pop("seed", None), right.pop("seed", None)
    identity = (one.index, one.custom_id, one.endpoint) == (other.index, other.custom_id, other.endpoint)
    return identity and written(left) == written(right)


def _has_seed(line: bytes) -> bool:
    value = orjson.loads(line)
    return value.get("body", value).get("seed") is not None


def written(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def strictly_read(text: str) -> Any:
    """Raises Broken for what is JSON to Python alone: NaN, infinities, repeated keys."""

    def refuse(word: str) -> None:
        raise Broken(f"{word} in the stored JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        demand(len(dict(pairs)) == len(pairs), "a key twice in the stored JSON")
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def strings_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner)


_VARYING = re.compile(r'"[^"]*"|[0-9.]+')


def shape(said: str) -> str:
    """What was said without the names and numbers in it: new shapes are new ground."""
    return _VARYING.sub("#", said)[:120]
