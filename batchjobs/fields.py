"""Checks of single values, shared by every kind of input line. All say what was found and what is wanted."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from batchjobs.text import shortened, visible

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    close = difflib.get_close_matches(name.lower(), accepted, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else f"accepted: {', '.join(accepted)}"
    return FieldError(f"unknown {what} {quoted(name)}; {hint}", name)


def quoted(name: str) -> str:
    return f'"{shortened(name, 60)}"'


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names in a sentence, control characters shown, at most ``limit`` of them."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(visible(n)[:60] for n in names[:limit]) + rest
