"""Checks of single values, shared by every kind of input line. All say what was found and what is wanted."""

from __future__ import annotations

import difflib
import itertools
import re
from typing import TYPE_CHECKING, Any

from batchjobs.text import shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_LONGEST_MESSAGE = 440
_MOST_PROBLEMS = 20
"""A line with more of them is not looked through: to find what a name could mean takes time."""
_LONGEST_NAME = 100
_ACCEPTED = "; accepted: "

# What other programs call our fields.
_ELSEWHERE: Mapping[str, str] = {
    "id": "custom_id",
    "request_id": "custom_id",
    "key": "custom_id",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "maxoutputtokens": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stopsequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "best_of_n": "n",
    "num_return_sequences": "n",
    "template_kwargs": "chat_template_kwargs",
    "return_full_text": "echo",
}

_VERSION = re.compile(r"sha256:[0-9a-f]{16}")


class FieldError(ValueError):
    """What is wrong with a line, before it is known which line it is. ``field`` is dotted, or None for the whole."""

    def __init__(self, message: str, field: str | None = None, code: str = "invalid_request") -> None:
        self.message = message
        self.field = field
        self.code = code
        super().__init__(message)

    def below(self, parent: str) -> FieldError:
        """The same problem, with its field inside ``parent``."""
        return FieldError(self.message, f"{parent}.{self.field}" if self.field else parent, self.code)


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article: ``a string``, ``an object``."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def wrong_type(name: str, wanted: str, value: object) -> FieldError:
    return FieldError(f"{name} must be {wanted}, not {json_type(value)}", name)


def text_value(name: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(name, "a string", value)
    if not value:
        raise FieldError(f"{name} must not be empty", name)
    return value


def version_value(name: str, value: Any) -> str:
    """A version of a model, as workers and results name it; whether there is one only the workers know."""
    if not _VERSION.fullmatch(text_value(name, value)):
        wanted = "must be sha256: and 16 of the digits 0 to f, as `batchjobs model list` shows it"
        raise FieldError(f"{name} {wanted}, not {quoted(shortened(str(value), 60))}", name)
    return str(value)


def unknown_name(name: str, accepted: Iterable[str], what: str = "field") -> FieldError:
    """Names the closest accepted one, or all of them when none is close."""
    accepted = sorted(accepted)
    close = nearest(name, accepted)
    hint = f"; did you mean {close}?" if close else f"{_ACCEPTED}{', '.join(accepted)}"
    return FieldError(f"unknown {what} {quoted(name)}{hint}", shortened(name, 80))


def nearest(name: str, accepted: Collection[str]) -> str | None:
    """The accepted name that ``name`` most likely stands for: what other programs call it, or one with a typo."""
    lower = name[:_LONGEST_NAME].lower()
    if (known := _ELSEWHERE.get(lower)) in accepted:
        return known
    close = difflib.get_close_matches(lower, sorted(accepted), n=1, cutoff=0.75)
    return close[0] if close else None


def joined(problems: Iterable[FieldError]) -> FieldError:
    """One error that names the problems of a line, as far as a message should go. There must be one at least."""
    known = list(itertools.islice(problems, _MOST_PROBLEMS + 1))
    if len(known) == 1:
        return known[0]
    messages, lists = zip(*(problem.message.partition(_ACCEPTED)[::2] for problem in known), strict=True)
    lengths = itertools.accumulate(len(message) + 2 for message in messages)
    told = max(1, sum(length <= _LONGEST_MESSAGE for length in lengths))
    message = "; ".join(messages[:told])
    more = len(messages) - told
    if more or len(known) > _MOST_PROBLEMS:
        number = "many" if len(known) > _MOST_PROBLEMS else more
        message += f"; and {number} more field{'' if more == 1 else 's'} that cannot be used"
    accepted = next(filter(None, lists), "")  # once, and only where there is room
    if accepted and len(message) + len(accepted) <= _LONGEST_MESSAGE:
        message += _ACCEPTED + accepted
    return FieldError(message, known[0].field)


def is_shallow(value: Any, depth: int) -> bool:
    """Whether at most ``depth`` objects and lists are inside each other."""
    level = [value] if type(value) is dict or type(value) is list else []
    for _ in range(depth):
        inner = [each for outer in level for each in (outer.values() if type(outer) is dict else outer)]
        level = [each for each in inner if type(each) is dict or type(each) is list]
        if not level:
            return True
    return False


def quoted(name: str) -> str:
    return f'"{shortened(name, 60)}"'


def listed(names: Iterable[str], limit: int = 8, width: int = 60) -> str:
    """At most ``limit`` names in a sentence, each of ``width`` characters at most, control characters shown."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shortened(name, width) for name in names[:limit]) + rest
