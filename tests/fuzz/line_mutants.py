"""Does the fuzz of the lines find bugs? Plausible ones are put into the parser, one at a time, until a line shows each.

python -m tests.fuzz.line_mutants [NAME ...]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import orjson

from batchjobs import chat, fields, jsonl, sampling_fields, strict_json
from batchjobs.sampling_fields import NO_DEFAULTS
from tests.fuzz import lines
from tests.fuzz.lines import Failure, Hunt

MOST_LINES = 30_000
"""A bug that so many lines do not show counts as missed."""

Mutation = Callable[[], AbstractContextManager[Any]]
MUTANTS: dict[str, Mutation] = {}


def mutant(mutation: Mutation) -> Mutation:
    MUTANTS[mutation.__name__] = mutation
    return mutation


@mutant
def repeated_keys_are_overlooked() -> AbstractContextManager[Any]:
    return patch.object(strict_json, "_repeats_keys", lambda raw, value: False)


@mutant
def nul_is_let_through() -> AbstractContextManager[Any]:
    return patch.object(strict_json, "_UNSTORABLE", re.compile("[\ud800-\udfff]"))


@mutant
def long_integers_are_rounded() -> AbstractContextManager[Any]:
    return patch.object(strict_json, "_may_round_integers", lambda raw: False)


@mutant
def depth_is_not_expected() -> AbstractContextManager[Any]:
    return patch.object(strict_json, "RecursionError", ZeroDivisionError, create=True)


@mutant
def names_are_repeated_whole() -> AbstractContextManager[Any]:
    return patch.object(fields, "quoted", lambda name: f'"{name}"')


@mutant
def fields_are_named_as_they_are() -> AbstractContextManager[Any]:
    return patch.object(chat, "shortened", lambda text, limit: text[:limit])


@mutant
def ids_of_any_length() -> AbstractContextManager[Any]:
    return patch.object(jsonl, "_custom_id", str)


@mutant
def sampling_is_remembered_by_its_keys() -> AbstractContextManager[Any]:
    return patch.object(sampling_fields, "_json", lambda given: orjson.dumps(sorted(given)))


@mutant
def sampling_is_remembered_without_types() -> AbstractContextManager[Any]:
    """1, 1.0 and true are one key to a dict."""
    numbers = lambda given: orjson.dumps({k: v + 0.0 if isinstance(v, int) else v for k, v in given.items()})  # noqa: E731
    return patch.object(sampling_fields, "_json", numbers)


@mutant
def two_biases_for_one_token() -> AbstractContextManager[Any]:
    return patch.object(sampling_fields, "_ID", re.compile("[0-9]{1,10}"))


@mutant
def roles_of_any_type() -> AbstractContextManager[Any]:
    def read(original: Any, value: Any, system: Any) -> Any:
        {message["role"] for message in value if isinstance(message, dict) and "role" in message}
        return original(value, system)

    original = jsonl.read_messages
    return patch.object(jsonl, "read_messages", lambda value, system: read(original, value, system))


@mutant
def a_field_is_dropped() -> AbstractContextManager[Any]:
    return patch.object(sampling_fields, "_KINDS", {k: v for k, v in sampling_fields._KINDS.items() if k != "min_p"})


@mutant
def unknown_fields_are_dropped() -> AbstractContextManager[Any]:
    original = jsonl._other_problem

    def problem(name: str, *rest: Any) -> Any:
        return None if name.startswith("f") else original(name, *rest)

    return patch.object(jsonl, "_other_problem", problem)


@mutant
def blank_lines_are_not_counted() -> AbstractContextManager[Any]:
    def read(stream: Any, name: str) -> Any:
        for number, (_, raw) in enumerate(original(stream, name), 1):
            yield number, raw

    original = lines.read_lines_of
    return patch.object(lines, "read_lines_of", read)


@mutant
def lines_end_where_unicode_says() -> AbstractContextManager[Any]:
    def read(stream: Any, name: str) -> Any:
        for number, raw in original(stream, name):
            for part in raw.replace(b"\xe2\x80\xa8", b"\n").split(b"\n"):
                yield number, part

    original = lines.read_lines_of
    return patch.object(lines, "read_lines_of", read)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The bug is there, and afterwards nothing of it: not even what was remembered."""
    try:
        with mutation():
            yield
    finally:
        NO_DEFAULTS._known.clear()


def first_failure(mutation: Mutation, seed: int = 1) -> tuple[int, Failure] | None:
    """How many lines it took, and what was wrong; None if none of the lines shows it."""
    hunt = Hunt(seed)
    with planted(mutation):
        while hunt.inputs < MOST_LINES and not hunt.failures:
            hunt.step()
    return (hunt.inputs, hunt.failures[0]) if hunt.failures else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.line_mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], help="default: all")
    names = parser.parse_args().names or list(MUTANTS)
    missed = 0
    for name in names:
        found = first_failure(MUTANTS[name])
        missed += found is None
        what = f"line {found[0]:,}: {found[1].problem[:120]}" if found else f"MISSED in {MOST_LINES:,} lines"
        print(f"{name:40} {what}", flush=True)
    print(f"{len(names) - missed} of {len(names)} mutants found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
