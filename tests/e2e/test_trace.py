"""What docs/trace.md shows is what the commands in it print, with the model that is used for want of a name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.support.command_line import CommandLine, command_line

__all__ = ["command_line"]

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text("utf-8")
SHOWN = dict(re.findall(r"```sh\n(batchjobs trace [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


def printed(command_line: CommandLine, command: str) -> str:
    return command_line.out(*shlex.split(command)[1:], "--device", "cpu", "--no-async-batching")


def test_the_picture_on_the_page(command_line: CommandLine) -> None:
    command = "batchjobs trace --explain --steps 4"
    assert printed(command_line, command) == SHOWN[command]


def test_the_lines_about_sequences_that_give_way(command_line: CommandLine) -> None:
    """The page has some of the lines, in their order."""
    command = "batchjobs trace --num-blocks 10"
    lines = iter(printed(command_line, command).splitlines())
    for line in SHOWN[command].splitlines():
        assert line in lines, f"not printed there: {line}"
