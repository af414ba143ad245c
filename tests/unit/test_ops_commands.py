"""Every command line in the runbooks, units, manifests and comments is one that the real parser accepts, and every SQL
query one that runs."""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from batchjobs.cli import main
from tests.support.ops_files import DOCUMENTS, KUBERNETES, OPS, OWN, TEXTS, UNITS, documents, pods, relative, unit


def typed() -> Iterator[tuple[str, str]]:
    """Each command line in the documents' blocks and in comments, as ``(file, what follows "batchjobs")``."""
    for file in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", file.read_text(), re.DOTALL):
            for line in block.splitlines():
                yield from ((relative(file), found) for found in commands_in(line))
    for file in TEXTS:
        if file not in DOCUMENTS:
            for line in re.findall(r"^#   (.*)$", file.read_text(), re.M):
                yield from ((relative(file), found) for found in commands_in(line))


def commands_in(line: str) -> Iterator[str]:
    line = re.sub(r"\s# .*$", "", line)
    for match in re.finditer(r"(?:^|\$\(|\s)(?:/opt/batchjobs/bin/)?batchjobs (?=[a-z-])", line):
        rest = re.split(r" < ", line[match.end() :])[0]
        if not line[: match.start()].rstrip().endswith(("-t", "-n", "--username", "secret", "pip")):
            yield rest.removesuffix(")") if "$(" in match.group() else rest


def mentioned() -> Iterator[tuple[str, str]]:
    for file in TEXTS:
        for found in re.findall(r"`batchjobs ([a-z][^`]*)`", file.read_text()):
            yield file.name, found


def configured() -> Iterator[tuple[str, str]]:
    for file in UNITS:
        for command in unit(file).get("Service.ExecStart", []):
            yield relative(file), command.split("/bin/batchjobs ")[1]
    gpu = documents(OPS / "compose.gpu.yaml")[0]["services"]
    for name, service in [*OWN.items(), *gpu.items()]:
        yield f"compose {name}", shlex.join(service["command"])
    for file in sorted((KUBERNETES / "base").glob("*.yaml")):
        for pod in pods(documents(file)):
            yield relative(file), shlex.join(pod["containers"][0]["args"])


def accept(command: click.Command, words: list[str], *, whole: bool) -> None:
    """Parses all of it, runs nothing. Where it is not the ``whole`` command, arguments may lack."""
    if isinstance(command, click.Group):
        _, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
        chosen = command.get_command(click.Context(command), rest[0])
        assert chosen is not None, rest[0]
        return accept(chosen, rest[1:], whole=whole)
    try:
        command.make_context(command.name, words)
    except click.MissingParameter:
        assert not whole, f"{command.name} lacks something: {words}"


@pytest.mark.parametrize(("where", "line"), [*typed(), *configured()])
def test_command_lines_are_accepted(where: str, line: str) -> None:
    accept(main, shlex.split(line), whole=True)


@pytest.mark.parametrize(("where", "line"), sorted(set(mentioned())))
def test_mentioned_commands_exist(where: str, line: str) -> None:
    accept(main, shlex.split(line), whole=False)


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.NoSuchOption):
        accept(main, ["worker", "--nmae", "x"], whole=True)
    with pytest.raises(AssertionError, match="no-such"):
        accept(main, ["no-such"], whole=True)
    assert len(list(typed())) > 40


def test_queries_of_the_runbooks_run(migrated_sqlite_file: Path) -> None:
    queries = [words[1] for _, line in typed() if (words := shlex.split(line))[0] == "sql"]
    assert len(queries) >= 5
    with sqlite3.connect(migrated_sqlite_file) as database:
        for query in queries:
            database.execute(query).fetchall()
    database.close()
