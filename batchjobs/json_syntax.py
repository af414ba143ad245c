"""What is wrong with text that is no JSON, in words for the people who wrote it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import json

_WORDS = re.compile(r"(True|False|None|undefined|nan|inf)\b")
_COMMENT = ("//", "/*", "#")
_SINGLE_QUOTES = ("'", "`")
_CURLY_QUOTES = ("\u201c", "\u201d", "\u201e", "\u2018", "\u2019")

# By how the reader's own message begins. The column stands where the reader stopped.
_BY_MESSAGE = (
    (
        "Unterminated string",
        'the text that begins at column {} has no closing "; a line break in a text is written \\n',
    ),
    ("Invalid control char", "a control character at column {}; a tab in a text is written \\t, a line break \\n"),
    ("Invalid \\escape", "a single backslash at column {}; in a text it is written \\\\"),
    ("Invalid \\u", "an incomplete \\u escape at column {}"),
    ("Unexpected UTF-8 BOM", "a byte order mark at column {}; remove it"),
    ("Expecting property name", "a name in double quotes is wanted at column {}"),
    ("Expecting ':'", "a colon is wanted at column {}"),
    ("Expecting ','", 'a comma or the end is wanted at column {}; a quote in a text is written \\"'),
    ("Expecting value", "a value is wanted at column {}"),
    ("Extra data", "there is more behind the value, at column {}"),
)


def syntax_error(error: json.JSONDecodeError) -> str:
    """One sentence, with the column; nothing of the text itself."""
    at, rest = error.pos, error.doc[error.pos : error.pos + 20]
    if not error.msg.startswith(("Unterminated", "Invalid", "Unexpected")):
        if (comma := _needless_comma(error.doc, at)) is not None:
            return f"a comma too many at column {error.colno - (at - comma)}"
        if (mistake := _mistake(rest)) is not None:
            return mistake.format(error.colno)
        if not rest.strip(" \t\r\n"):
            return f"it ends at column {error.colno}, in the middle of an object or a list"
        if error.msg.startswith("Extra data") and rest.startswith("{"):
            return f"another object begins at column {error.colno}; write one on each line"
    known = next((text for start, text in _BY_MESSAGE if error.msg.startswith(start)), None)
    return known.format(error.colno) if known else f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"


def _needless_comma(text: str, at: int) -> int | None:
    """Where a comma stands before a closing bracket, or at the end of the line."""
    before = at if text[at : at + 1] == "," else len(text[:at].rstrip()) - 1
    if before < 0 or text[before] != ",":
        return None
    following = text[before + 1 :].lstrip()
    return before if following[:1] in ("", "}", "]") else None


def _mistake(rest: str) -> str | None:
    """What people write who are used to another language than JSON; the braces take the column."""
    if rest.startswith(_COMMENT):
        return "a comment at column {}; JSON has none"
    if rest.startswith(_SINGLE_QUOTES):
        return "a single quote at column {}; JSON has double quotes alone (in Python, json.dumps writes them)"
    if rest.startswith(_CURLY_QUOTES):
        return "a curly quote at column {}; JSON has straight double quotes alone"
    if word := _WORDS.match(rest):
        return f"{word.group()} at column {{}}; JSON has true, false and null"
    return None
