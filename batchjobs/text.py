"""Text from outside on its way to a person: control characters are shown, passwords are not."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

# C0, DEL and C1 drive a terminal; the line separators and the direction marks rearrange what is read; some characters
# cannot be seen at all; lone surrogates cannot be encoded.
_BEYOND_ASCII = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
_UNSAFE = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]")
_UNSAFE_BUT_NEWLINES = re.compile(f"[\x00-\x09\x0b-\x1f{_BEYOND_ASCII}]")
_SECRET_PARAMETER = re.compile(r"([?&](?:password|passwd|pwd|passfile|sslpassword)=)[^&#]*", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(://[^:@/?#]*):.*@")
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, *, keep_newlines: bool = False) -> str:
    """``text`` with every control character written as an escape (``\\x1b``), so that no terminal obeys it."""
    pattern = _UNSAFE_BUT_NEWLINES if keep_newlines else _UNSAFE
    return pattern.sub(_escape, text)


def escaped_json(line: bytes) -> bytes:
    """A line of JSON with the same characters as JSON escapes, so that it can go to a terminal and stays the same JSON.
    Those below the blank are escapes in any JSON."""
    if line.isascii() and b"\x7f" not in line:
        return line
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", line.decode()).encode()


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT_ESCAPES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def shortened(text: str, limit: int) -> str:
    """``text`` on one line of at most ``limit`` characters, control characters shown."""
    safe = visible(text[: limit + 1])
    return safe if len(safe) <= limit else safe[: max(limit - 3, 0)] + "..."


def hide_password(url: str) -> str:
    """The URL with ``***`` for its password, in front of the host or among the query's parameters."""
    url = _SECRET_PARAMETER.sub(r"\1***", url)
    try:
        location = urlsplit(url).netloc
    except ValueError:  # cannot be taken apart
        return _CREDENTIALS.sub(r"\1:***@", url)
    before, at, host = location.rpartition("@")
    if not at and "@" in url:  # a password with a slash that nobody encoded
        return _CREDENTIALS.sub(r"\1:***@", url)
    user, colon, _ = before.partition(":")
    return url.replace(location, f"{user}:***@{host}", 1) if colon else url


def has_stray_at(url: str) -> bool:
    """Whether ``url`` has more than one ``@`` in front of its query, so that where its password ends is a guess."""
    scheme, _, rest = url.partition("://")
    return not scheme.startswith(("sqlite", "unix")) and rest.partition("?")[0].count("@") > 1


def plural(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``; thousands separated."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
