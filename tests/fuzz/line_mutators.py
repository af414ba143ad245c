"""Lines near good ones: bytes, tokens, values, keys, depth and whole lines are changed, one way or several."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from batchjobs.chat import TEMPLATE_KWARGS
from batchjobs.foreign_lines import _CHAT_NAMES, _PROMPT_NAMES
from batchjobs.openai_lines import OTHER_NAMES, UNSUPPORTED
from batchjobs.sampling_fields import SAMPLING_NAMES

_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Why is the sky blue?\nSay: "x"'}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _SCHEMA}}

SEEDS: tuple[dict[str, Any], ...] = (
    {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    {"prompt": [504, 3575, 282], "custom_id": "by-ids", "n": 2, "best_of": 2, "top_k": 5, "min_p": 0.1},
    {"messages": _CHAT, "seed": 7, "stop": ["\n\n", "END"], "top_p": 0.9, "chat_template_kwargs": {"thinking": False}},
    {"prompt": "The sky", "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": "x", "metadata": {"a": [1, 2.5, None], "b": {"c": "d"}}, "model": "m", "user": "u",
     "model_version": "sha256:0f2a8d5c9b3e4711"},
    {"prompt": "x", "logit_bias": {"5": -1.5, "17": 100}, "stop_token_ids": [1, 2], "min_tokens": 2, "ignore_eos": True,
     "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "response_format": _FORMAT},
    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": "gpt", "messages": _CHAT, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 3,
        "stream": False, "store": False, "service_tier": "auto", "response_format": {"type": "text"}}},
    {"custom_id": "q2", "method": "POST", "url": "/v1/completions", "body": {
        "model": "gpt", "prompt": "Ünïcödé \U0001f600 \u2028", "max_tokens": 5, "logprobs": 2, "stop": "x",
        "seed": 2**62}},
    {"custom_id": "q3", "method": "POST", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}], "temperature": 1.5}},
    {"custom_id": "1", "params": {"model": "m", "max_tokens": 5, "messages": _CHAT}},
    {"request": {"contents": [{"parts": [{"text": "hi"}]}]}, "key": "1"},
    {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"model": "m", "input": "hello"}},
)  # fmt: skip

NAMES = sorted({*SAMPLING_NAMES, *OTHER_NAMES, *UNSUPPORTED, *TEMPLATE_KWARGS, *_CHAT_NAMES, *_PROMPT_NAMES})
NAMES += ["custom_id", "method", "url", "body", "role", "content", "name", "type", "schema", "json_schema", "strict"]
NAMES += ["", "x" * 700, "a\nb", "\x1b[31m", "\u202e", "Prompt", "temprature", "0", "5", "05", "column 9"]
_LONG = "y" * 5000

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 5, 20, 21, 128, 129, 256, 2**31, 2**31 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    2**64, -(2**63), -(2**63) - 1, 10**30, 0.0, -0.0, 0.5, 1.0, 2.0, 2.5, 1e-320, 1e308, float("nan"), float("inf"),
    "", "a", "0.5", "true", "POST", "GET", "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/", "http://[",
    "user", "system", "developer", "tool", "text", "json_object", "json_schema", "image_url", "a\0b", "\ud800",
    "\U0001f600", "\u2028", "\x1b[2J", "\\u0000", '"', "x" * 512, "x" * 513, _LONG, "sha256:" + "0" * 16,
    [], [[]], [1], [1, "a"], ["a"], ["a"] * 17, [None], [{}], [1.5], [2**31], {}, {"a": 1}, {"type": "text"},
    {"type": "text", "text": "x"}, {"role": "user", "content": "x"}, {"05": 1, "5": 2}, {"5": 101}, {"0": "a"},
    {"7": 1.5}, {"2147483648": 1}, {"5": "x"},
)  # fmt: skip
_BY_TYPE = {kind: [value for value in VALUES if type(value) is kind] for kind in map(type, VALUES)}
_TYPES = {name: type(value) for seed in SEEDS for name, value in {**seed, **seed.get("body", {})}.items()}
_TOKENS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"1.5E+3", b"01",
    b"9" * 4500, b"9" * 25, b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"', b"\\", b"//", b"'", b"True",
    b'"prompt"', b'"metadata"', b'"custom_id"', b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80", b"\xe6\x87", b"\0", b"\r",
    b"\t", b" ", b"\xe2\x80\xa8", b'{"a":1}', b'"a":1,"a":2',
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+|"|\s+', re.DOTALL)

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]


def written(rng: Random, value: Any) -> bytes:
    """The value as one of the many texts that mean it."""
    separators = rng.choice(((",", ":"), (", ", ": "), (" , ", "\t:")))
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7, separators=separators)
    return text.encode("utf-8", "surrogatepass")


def mutated(rng: Random, corpus: Sequence[bytes]) -> bytes:
    """A line of the corpus, changed one to three times."""
    raw = rng.choice(corpus)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        raw = rng.choice(MUTATORS)(rng, raw, corpus)
    return raw[:60_000].replace(b"\n", b" ")


# Text


def _bytes(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(raw) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + raw[at + rng.choice((1, 1, 2, 8, 60)) :]
    if kind == 2:
        return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :] if at < len(raw) else raw
    return raw[:at] + rng.choice(_TOKENS) + raw[at:]


def _tokens(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
    tokens = _TOKEN.findall(raw)
    if not tokens:
        return raw
    at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    kind = rng.randrange(4)
    if kind == 0:
        del tokens[at]
    elif kind == 1:
        tokens.insert(at, tokens[other])
    elif kind == 2:
        tokens[at], tokens[other] = tokens[other], tokens[at]
    else:
        tokens[at] = rng.choice(_TOKENS)
    return b"".join(tokens)


def _splice(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
    other = rng.choice(corpus)
    return raw[: rng.randrange(len(raw) + 1)] + other[rng.randrange(len(other) + 1) :]


def _repeat_key(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
    """A pair of the line once more, in this object or another."""
    at = rng.choice([match.end() for match in re.finditer(rb"[{,]", raw)] or [0])
    pairs = re.findall(rb'"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[0-9a-z.-]+)', raw) or [b'"a":1']
    return raw[:at] + rng.choice(pairs) + b"," + raw[at:]


# Values


def _changing(change: Callable[[Random, Any], Any]) -> Mutator:
    """``change`` gets the line's value and returns another; lines that are no JSON are left as they are."""

    def mutate(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
        try:
            return written(rng, change(rng, json.loads(raw)))
        except (ValueError, RecursionError):
            return raw

    return mutate


def _somewhere(rng: Random, value: Any) -> tuple[Any, Any]:
    """A container in the value, and one of its keys."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        if not keys:
            return None, None
        key = rng.choice(keys)
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.4:
            return value, key
        value = inner


def _value(rng: Random, value: Any) -> Any:
    container, key = _somewhere(rng, value)
    if container is None:
        return rng.choice(VALUES)
    alike = _BY_TYPE.get(type(container[key]), VALUES) if rng.random() < 0.5 else VALUES
    container[key] = copy.deepcopy(rng.choice(alike))
    return value


def _near_value(rng: Random, value: Any) -> Any:
    container, key = _somewhere(rng, value)
    old = None if container is None else container[key]
    if isinstance(old, bool) or old is None:
        return value
    if isinstance(old, int | float):
        container[key] = rng.choice((-old, old + 1, old - 1, old * 1000, float(old), str(old), [old]))
    elif isinstance(old, str):
        container[key] = rng.choice((old.upper(), old * 3, old[:1], old + "\0", old[::-1], [old], {"text": old}))
    else:
        container[key] = rng.choice(([], {}, [old], str(old)))
    return value


def _key(rng: Random, value: Any) -> Any:
    container, key = _somewhere(rng, value)
    if isinstance(container, dict):
        inner = container.pop(key)
        kind = rng.randrange(4)
        if kind == 0:
            container[str(key).swapcase()] = inner
        elif kind == 1:
            container[rng.choice(NAMES)] = inner
        elif kind == 2:
            container[str(key) + rng.choice(_ODD)] = inner
    return value


def _add(rng: Random, value: Any) -> Any:
    """A field more, most often one that lines know."""
    container, _ = _somewhere(rng, value)
    if rng.random() < 0.7:
        container = value.get("body", value) if isinstance(value, dict) else value
    if isinstance(container, dict):
        name = rng.choice(NAMES)
        alike = _BY_TYPE.get(_TYPES.get(name, object), VALUES) if rng.random() < 0.7 else VALUES
        container[name] = copy.deepcopy(rng.choice(alike))
    elif isinstance(container, list):
        container.append(copy.deepcopy(rng.choice(VALUES)))
    return value


def _rewritten(rng: Random, value: Any) -> Any:
    """The same line in other words."""
    if isinstance(value, dict):
        pairs = list(value.items())
        rng.shuffle(pairs)
        return dict(pairs)
    return value


_ODD: tuple[str, ...] = (
    '"', "\\", ":", ",", "{", "}", '":', '"a":', "\\u0000", "\\\\", "\n", "\t", "\x1b", "\x7f", "\u0085",
    "\u2029", "\u202e", "\ufeff", "\U0001f600", "\uffff", "e\u0301", " ", "a", "1e999", "NaN", "//", "'", "custom_id",
)  # fmt: skip
_UNSTORABLE = ("\0", "\ud83d")


def _odd_text(rng: Random, value: Any) -> Any:
    """A text with what JSON writes by escapes, or what looks like JSON."""
    for _ in range(4):
        container, key = _somewhere(rng, value)
        if container is not None and isinstance(container[key], str):
            container[key] = "".join(
                rng.choice(_ODD[: rng.choice((25, 25, 25, None))]) for _ in range(rng.randrange(1, 9))
            )
            break
    return value


_DEPTHS, _TOO_DEEP = (1, 2, 3, 5, 30, 62, 65), (125, 127, 200, 250, 252, 253, 254, 255, 500, 900, 3000)


def _deep(rng: Random, raw: bytes, corpus: Sequence[bytes]) -> bytes:
    """A value of the line inside many lists or objects."""
    values = list(re.finditer(rb'(?<=:)\s*("[^"\\]*"|[0-9a-z.-]+)', raw))
    if not values:
        return raw
    chosen, depth = (
        rng.choice(values),
        rng.choice((1, 2, 3, 5, 30, 62, 65, rng.choice((125, 127, 200, 250, 252, 253, 254, 255, 500, 900, 3000)))),
    )
    start, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"not":[', b"]}")))
    return raw[: chosen.start()] + start * depth + chosen.group() + end * depth + raw[chosen.end() :]


MUTATORS: tuple[Mutator, ...] = (
    _bytes, _tokens, _splice, _repeat_key, _deep,
    *map(_changing, (_value, _value, _value, _near_value, _near_value, _key, _add, _add, _add)),
    *map(_changing, (_rewritten, _rewritten, _odd_text, _odd_text, _odd_text)),
)  # fmt: skip
