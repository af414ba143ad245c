"""JSON that means one thing only.

orjson reads the line; it refuses NaN, Infinity, numbers beyond a double, lone surrogates and broken UTF-8 by itself.
What it lets through is found by counting, which costs next to nothing: duplicate keys and NUL characters. Only
lines that look suspicious take the slow way, through a reader that knows the name of the offending field.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from batchjobs.fields import FieldError, quoted
from batchjobs.json_syntax import syntax_error

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DIGITS = 20
"""Of an integer; its sign counts as one."""

_CODE = "invalid_json"
_LONGEST_PATH = 160
_MAX_DEPTH = 450
"""Objects and lists inside each other; it leaves room on the stack for whoever called."""
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"[ \t\r]*(:?)', re.DOTALL)
_KEY_ENDS = re.compile(rb'"[ \t\r\n]*:')
_BLANK_BEHIND = re.compile(rb'"[ \t\r\n]')
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def loads(raw: bytes) -> Any:
    """The value of one line. Raises FieldError with the reason, and the field where one is to blame."""
    try:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            _explain(raw, str(error))
        if b"\\u0000" in raw or _repeats_keys(raw, value) or _may_round_integers(raw):
            _inspect(_read_slowly(raw))
    except RecursionError:
        raise FieldError("not valid JSON: nested too deeply", None, _CODE) from None
    return value


def _may_round_integers(raw: bytes) -> bool:
    """orjson rounds integers beyond 64 bits. Most fields have ranges; metadata and schemas may hold any number."""
    return (b'"metadata"' in raw or b'"response_format"' in raw) and _LONG_NUMBER.search(raw) is not None


def _repeats_keys(raw: bytes, value: Any) -> bool:
    """Whether an object in this valid JSON names a key twice: then more keys are written than were kept.

    The colon of every key follows a quote, perhaps behind blanks. So the cheap counts may be too high, by colons inside
    texts, but never too low: when they equal the number of keys kept, none was lost. Else whole strings are told apart.
    """
    kept = _count_keys(value)
    if raw.count(b'":') == kept and _BLANK_BEHIND.search(raw) is None:  # as nearly everybody writes JSON
        return False
    if len(_KEY_ENDS.findall(raw)) == kept:
        return False
    return sum(map(bool, _STRINGS.findall(raw))) != kept


def _count_keys(value: Any, depth: int = 0) -> int:
    if depth > _MAX_DEPTH:
        raise RecursionError
    count = 0
    if type(value) is dict:
        count = len(value)
        for inner in value.values():
            if type(inner) is dict or type(inner) is list:
                count += _count_keys(inner, depth + 1)
    elif type(value) is list and value and type(value[0]) is not int:
        for inner in value:
            if type(inner) is dict or type(inner) is list:
                count += _count_keys(inner, depth + 1)
    return count


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands in for a value that must not be used, until the walk finds out where it is."""

    reason: str


def _read_slowly(raw: bytes) -> Any:
    return json.loads(
        raw.decode(),
        object_pairs_hook=_object,
        parse_constant=lambda word: _Refused(f"is {word}, which is no JSON number"),
        parse_int=_integer,
        parse_float=_number,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        result[name] = _Refused("is given more than once") if name in result else value
    return result


def _integer(digits: str) -> int | _Refused:
    if len(digits) > MAX_DIGITS or not -(2**63) <= int(digits) < 2**64:
        return _Refused(f"has {len(digits.lstrip('-'))} digits, more than 64 bits hold")
    return int(digits)


def _number(text: str) -> float | _Refused:
    value = float(text)
    return value if math.isfinite(value) else _Refused("is too large for a number")


def _explain(raw: bytes, complaint: str) -> NoReturn:
    """Raises what ``orjson`` found, with the field where that can be told."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        message = f"invalid UTF-8 at byte {error.start + 1}; save the file as UTF-8"
        raise FieldError(message, None, "invalid_utf8") from None
    try:
        _inspect(_read_slowly(raw))
    except json.JSONDecodeError as error:
        raise FieldError(f"not valid JSON: {syntax_error(error)}", None, _CODE) from None
    raise FieldError(f"not valid JSON: {complaint.partition(':')[0]}", None, _CODE)


def _inspect(value: Any) -> None:
    for path, found in _walk(value, ""):
        name = path if len(path) <= _LONGEST_PATH else f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
        if isinstance(found, _Refused):
            raise FieldError(f"{name or 'the value'} {found.reason}", name or None, _CODE)
        match = _UNSTORABLE.search(found)
        if match is not None:
            what = "a NUL character" if match.group() == "\0" else "half of a surrogate pair"
            message = f"{name or 'the value'} holds {what} (\\u{ord(match.group()):04x})"
            raise FieldError(message, name or None, _CODE)


def _walk(value: Any, path: str) -> Iterator[tuple[str, str | _Refused]]:
    """Every string, key and refused value with its dotted path."""
    if isinstance(value, str | _Refused):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            shown = name if name.isprintable() else quoted(name)
            below = f"{path}.{shown[:80]}" if path else shown[:80]
            yield below, name
            yield from _walk(inner, below)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{position}]")
