"""Sampling fields as they stand in a line or in the defaults of a batch -> the values stored with a request.

Types are checked here, ranges by :class:`SamplingParams`: one place for each. Most lines of a file ask for the same
sampling, so the checked result is remembered by the fields' own JSON.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.errors import InvalidParameter, UsageError
from batchjobs.fields import FieldError, is_shallow, json_type, quoted, unknown_name, version_value, wrong_type
from batchjobs.response_format import response_format
from batchjobs.types import MAX_TOP_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REMEMBERED = 4096
_MAX_REMEMBERED_BYTES = 4096
_MAX_TOKEN_ID = 2**31 - 1
_MAX_DEPTH = 200
"""Objects and lists inside each other, below what can be written as JSON."""
_ID = re.compile("0|[1-9][0-9]{0,9}")
_SEED_BITS = 53
"""Seeds survive every JSON reader: doubles are exact up to 53 bits."""

_random = random.Random()


class Dialect(StrEnum):
    """Whose rules a line follows where they differ: ``logprobs`` is a boolean in chats and a number in completions."""

    PLAIN = "plain"
    CHAT = "chat"
    COMPLETIONS = "completions"


def _integer(name: str, value: Any) -> int:
    if type(value) is float and abs(value) >= 2**63:  # an integer too long for the JSON parser arrives as a float
        raise FieldError(f"{name} must be a 64-bit integer", name)
    if type(value) is not int:
        raise wrong_type(name, "an integer", value)
    return value


def _number(name: str, value: Any) -> float:
    if type(value) is not int and type(value) is not float:
        raise wrong_type(name, "a number", value)
    return value


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise wrong_type(name, "true or false", value)
    return value


def _stop(name: str, value: Any) -> list[str]:
    texts = value if type(value) is list else [value]
    for text in texts:
        if type(text) is not str:
            raise wrong_type(name, "a string or a list of strings", text)
        if not text:
            raise FieldError(f"{name} must not be empty: an empty string matches everywhere", name)
    return texts


def token_id(name: str, value: Any) -> int:
    """One token id: an integer from 0 to 2**31 - 1; whether the model knows it, only the model can tell."""
    if type(value) is not int:
        raise wrong_type(name, "a token id", value)
    if not 0 <= value <= _MAX_TOKEN_ID:
        raise FieldError(f"{name}: {value} is not a token id", name)
    return value


def _token_ids(name: str, value: Any) -> list[int]:
    if type(value) is not list:
        raise wrong_type(name, "a list of token ids", value)
    return [token_id(name, item) for item in value]


def _logit_bias(name: str, value: Any) -> dict[str, float]:
    if type(value) is not dict:
        raise wrong_type(name, "an object that maps token ids to numbers", value)
    for key, bias in value.items():
        # Without leading zeros: two ways to write one id would be two biases for it, and one of them lost.
        if not (_ID.fullmatch(key) and int(key) <= _MAX_TOKEN_ID):
            raise FieldError(f"{name}: {quoted(key)} is not a token id", name)
        if type(bias) is not int and type(bias) is not float:
            raise FieldError(f"{name}: the bias of token {key} must be a number, not {json_type(bias)}", name)
    return value


_KINDS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer,
    "max_completion_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "n": _integer,
    "best_of": _integer,
    "seed": _integer,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "min_tokens": _integer,
    "ignore_eos": _boolean,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _logit_bias,
    "echo": _boolean,
    "response_format": response_format,
}

SAMPLING_NAMES = frozenset({*_KINDS, "logprobs", "top_logprobs"})
"""Every sampling field that an input line may carry."""


@dataclass(frozen=True)
class Defaults:
    """What applies to the lines of a batch that do not say otherwise.

    ``fields`` are sampling fields as a plain line would have them; ``system`` is put in front of chats that have no
    system message, and changes nothing else. ``model_version`` is the only version of a model that may answer the lines
    that name none. Raises UsageError when they could not stand in a line.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    model_version: str | None = None
    _typed: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[bytes, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in SAMPLING_NAMES:
                raise UsageError(unknown_name(name, SAMPLING_NAMES, "sampling field").message)
        try:
            typed = _typed(self.fields, Dialect.PLAIN)
            _resolved(typed)
            if self.model_version is not None:
                version_value("model_version", self.model_version)
        except FieldError as problem:
            raise UsageError(f"the default for all lines cannot be used: {problem.message}") from None
        object.__setattr__(self, "_typed", typed)

    def as_json(self) -> dict[str, Any]:
        """The defaults as they are stored with the batch."""
        others = {"system": self.system, "model_version": self.model_version}
        return {**self.fields, **{name: value for name, value in others.items() if value is not None}}

    def sampling(self, given: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
        """What to store for a line with the sampling fields ``given``: checked, with the defaults, and with a seed
        wherever something is drawn at random. Raises FieldError."""
        seed = given.pop("seed", None)
        fields = dict(self._checked(given, dialect))
        if seed is not None:
            fields["seed"] = seed
            _in_range({"seed": _integer("seed", seed)})
        elif "seed" not in fields and fields.get("temperature", 1.0) != 0:
            fields["seed"] = _random.getrandbits(_SEED_BITS)
        return fields

    def _checked(self, given: dict[str, Any], dialect: Dialect) -> Mapping[str, Any]:
        key = dialect.encode() + _json(given)
        known = self._known.get(key)
        if known is None:
            known = _resolved({**self._typed, **_typed(given, dialect)})
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            if len(key) <= _MAX_REMEMBERED_BYTES:
                self._known[key] = known
        return known


def _json(given: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(given)
    except TypeError:
        deep = next(name for name, value in given.items() if not is_shallow(value, _MAX_DEPTH))
        raise FieldError(f"{deep} is nested too deeply", deep) from None


def _typed(given: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The fields with their types checked, under one name for the limit, and ``logprobs`` as a pair."""
    values = {name: kind(name, given[name]) for name, kind in _KINDS.items() if given.get(name) is not None}
    if "max_completion_tokens" in values:
        limit = values.pop("max_completion_tokens")
        if dialect is Dialect.COMPLETIONS:
            raise FieldError(
                "max_completion_tokens is not a field of /v1/completions; use max_tokens", "max_completion_tokens"
            )
        if values.setdefault("max_tokens", limit) != limit:
            raise FieldError("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    values.update(_logprobs(given.get("logprobs"), given.get("top_logprobs"), dialect))
    return values


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """What to store for typed values, checked as a whole: the sampling fields, and what the answer is to show."""
    n, best_of = values.get("n", 1), values.get("best_of")
    if best_of is not None and best_of != n:
        raise FieldError(f"best_of must equal n, which is {n}: every choice is given out, none is dropped", "best_of")
    echo, logprobs = values.get("echo", False), values.get("logprobs")
    asked = logprobs is not None and logprobs is not False
    scores = None
    if echo and (asked or values.get("max_tokens") == 0):  # without a token to make, the prompt is there to be scored
        scores = values.get("top_logprobs", 0)
    fields = _in_range({**values, "prompt_logprobs": scores}).as_fields()
    shown = {"logprobs": logprobs, "echo": echo or None}
    return fields | {name: value for name, value in shown.items() if value is not None}


def _logprobs(logprobs: Any, top: Any, dialect: Dialect) -> dict[str, Any]:
    """``logprobs`` as the line had it, with the number of alternatives; nothing when the line asks for none."""
    if logprobs is None and top is None:
        return {}
    if top is not None:
        if dialect is Dialect.COMPLETIONS:
            raise FieldError(
                "top_logprobs is not a field of /v1/completions; logprobs takes the number", "top_logprobs"
            )
        _number_of_logprobs("top_logprobs", top)
    if dialect is not Dialect.CHAT and type(logprobs) is int:
        return _numbered(logprobs, top)
    if dialect is Dialect.COMPLETIONS:
        raise wrong_type("logprobs", f"a number from 0 to {MAX_TOP_LOGPROBS}", logprobs)
    if logprobs is None and dialect is Dialect.PLAIN:
        logprobs = True
    if top is not None and logprobs is not True:
        raise FieldError("top_logprobs needs logprobs to be true", "top_logprobs")
    return {"logprobs": _boolean("logprobs", logprobs), "top_logprobs": top or 0}


def _numbered(logprobs: int, top: Any) -> dict[str, Any]:
    _number_of_logprobs("logprobs", logprobs)
    if top not in (None, logprobs):
        raise FieldError("logprobs and top_logprobs name different numbers; give one of them", "top_logprobs")
    return {"logprobs": logprobs, "top_logprobs": logprobs}


def _number_of_logprobs(name: str, value: Any) -> None:
    if type(value) is not int:
        raise wrong_type(name, "an integer", value)
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise FieldError(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, not {value}", name)


def _in_range(values: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_fields(values)
    except InvalidParameter as error:
        raise FieldError(str(error), error.field) from None


NO_DEFAULTS = Defaults()
