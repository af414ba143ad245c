"""What the parts of the store share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.errors import NotFound, UsageError
from batchjobs.store.rows import is_storable

if TYPE_CHECKING:
    from batchjobs.database import Database


class Part:
    """A noun's share of the store: each of its methods is one transaction, or says what else it is."""

    _database: Database


def known(what: str, identifier: str) -> str:
    """The identifier, if a database could hold it; NotFound otherwise."""
    if not is_storable(identifier):
        raise NotFound(f"no {what} {identifier!r}")
    return identifier


def plain(what: str, text: str | None) -> str | None:
    """The text, if both databases can hold it; UsageError otherwise."""
    if text is not None and not is_storable(text):
        raise UsageError(f"{what} {text!r} holds a NUL or an unpaired surrogate; use plain text")
    return text
