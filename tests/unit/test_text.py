"""What reaches a terminal: control characters shown, passwords hidden."""

from __future__ import annotations

import pytest

from batchjobs.database import parse_url
from batchjobs.errors import UsageError
from batchjobs.redis_client import connect
from batchjobs.text import has_stray_at, hide_password, plural, shortened, visible
from tests.support.cases import case


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 問い ✓ 😀", "plain äöü 問い ✓ 😀"),
        ("\x1b[2J\x1b]0;pwned\x07", "\\x1b[2J\\x1b]0;pwned\\x07"),
        ("\x1b]52;c;aGk=\x07 \x9b31m", "\\x1b]52;c;aGk=\\x07 \\x9b31m"),
        ("a\x7fb\x00c", "a\\x7fb\\x00c"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("abc\u202etxt.exe", "abc\\u202etxt.exe"),
        ("a\u2028b\u0085c", "a\\u2028b\\x85c"),
        ("half \ud800", "half \\ud800"),
    ],
)
@case("A-sec-02")
def test_control_characters_are_shown_not_executed(text: str, shown: str) -> None:
    """C0, DEL, C1, and what rearranges a line."""
    assert visible(text) == shown


def test_newlines_stay_where_text_is_printed_whole() -> None:
    assert visible("a\nb\x1b[1mc\r\n", keep_newlines=True) == "a\nb\\x1b[1mc\\r\n"


def test_shortened_counts_what_is_shown() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."
    assert shortened("\x1b\x1b\x1b", 6) == "\\x1..."


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("postgresql://u:p%40ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
        ("unix:///run/redis.sock?db=1&password=s3cret", "unix:///run/redis.sock?db=1&password=***"),
        ("postgresql://u:p/a/ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p@ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p[ss@h/db", "postgresql://u:***@h/db"),
    ],
)
@case("A-sec-06")
def test_passwords_are_hidden(url: str, shown: str) -> None:
    assert hide_password(url) == shown


@pytest.mark.parametrize(
    ("url", "stray"),
    [
        ("postgresql://u:p@ss@h/db", True),
        ("postgresql://u:p@s/s@h/db", True),
        ("redis://:p@ss@h:1/0", True),
        ("postgresql://u:p%40ss@h/db", False),
        ("redis://h:1/0?password=a@b@c", False),
        ("sqlite:////a@b/c@d.sqlite3", False),
        ("unix:///run/a@b/c@d.sock", False),
    ],
)
def test_an_at_sign_that_nobody_encoded_is_seen(url: str, stray: bool) -> None:
    assert has_stray_at(url) is stray


def test_an_address_with_a_stray_at_sign_is_refused_without_repeating_it() -> None:
    for address, parse, setting in (
        ("postgresql://user:hush@secret@host/db", parse_url, "BATCHJOBS_DATABASE_URL"),
        ("redis://:hush@secret@host:1/0", connect, "BATCHJOBS_REDIS_URL"),
    ):
        with pytest.raises(UsageError) as refused:
            parse(address)
        assert str(refused.value) == f"{setting} has more than one @; write each @ of the user or password as %40"


def test_plural() -> None:
    assert plural(1, "request") == "1 request"
    assert plural(12_000, "request") == "12,000 requests"
