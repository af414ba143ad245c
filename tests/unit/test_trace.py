"""The command that runs prompts under observation, on tiny real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchjobs.cli import trace as command
from batchjobs.errors import UsageError
from batchjobs.types import Endpoint, Request
from tests.support.command_line import CommandLine, command_line
from tests.support.models import save_chat_model, save_model
from tests.support.step_script import told
from tests.support.trace_events import check_format
from workers.engine.config import EngineConfig
from workers.trace import trace

__all__ = ["command_line"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("llama"))


def test_observation_ends_when_enough_was_seen(llama: Path) -> None:
    config = EngineConfig(device="cpu", page_size=4, num_blocks=64, max_batch_tokens=16, max_requests_per_batch=3)
    made = trace(str(llama), config, pictures=2, whole=False)
    assert not made.is_whole
    assert len(made.log.steps) == 4
    assert made.summary().startswith("4 steps, ")
    assert made.summary().endswith(", 0 preemptions; not run to the end")


def test_a_model_with_a_window_shows_pages_let_go_of(tmp_path: Path) -> None:
    """Pages behind the window are null pages in the real tables of the step."""
    folder = save_model("mistral", tmp_path)
    config = EngineConfig(device="cpu", page_size=4, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=3)
    made = trace(str(folder), config, [request_of(list(range(3, 40)), 4)], pictures=9, whole=False)
    assert made.engine.pool.windows == (24,)
    story = told(made.log, made.view("utf-8"))
    assert "   37        37 A" not in story.partition("step 2")[0]
    second = story.partition("step 2: 1 row, 1 decode\n")[2]
    assert second.splitlines()[1].split("#")[1].split()[1] == "23■"  # 24 keys, its own included
    assert second.splitlines()[2].startswith("  pages: A - - - ")


def request_of(prompt: list[int], max_tokens: int) -> Request:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return Request(index=0, custom_id="ids", endpoint=Endpoint.COMPLETIONS, body=body)


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_draws_and_writes(command_line: CommandLine, llama: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "trace.json"
    source.write_text(
        '{"custom_id": "\\u001b[2J", "prompt": "one\\u001b", "max_tokens": 3}\n'
        '{"messages": [{"role": "user", "content": "two"}], "n": 2}\n'
    )
    done = command_line.run("trace", source, "--explain", "-o", target, "-m", llama, "--max-tokens", 5)
    assert done.exit_code == 0, done.output
    assert "admitted A (\\x1b[2J), 4 prompt tokens" in done.stdout
    assert '"\\x1b"' in done.stdout
    assert "admitted B (request-1, choice 0)" in done.stdout
    assert "\x1b" not in done.stdout
    assert f"wrote {target}; open it at https://ui.perfetto.dev" in done.stderr
    found = json.loads(target.read_bytes())
    check_format(found)
    assert {e["args"]["request"] for e in found if "request" in e["args"]} == {
        "\x1b[2J",
        "request-1, choice 0",
        "request-1, choice 1",
    }
    again = command_line.run("trace", source, "-o", target, "-m", llama)
    assert (again.exit_code, again.stdout) == (2, "")
    assert f"{target} exists already; --force replaces it" in again.stderr
    assert command_line.run("trace", source, "-o", source, "-m", llama, "--force").exit_code == 2


def test_json_alone_goes_to_standard_output(command_line: CommandLine, llama: Path) -> None:
    found = json.loads(command_line.out("trace", "-o", "-", "-m", llama, "--num-blocks", 64, "--async-batching"))
    check_format(found)
    names = {e["args"]["request"] for e in found if "request" in e["args"]}
    assert names == {"sea", "count", "garden", "garden again", "capital"}
    assert command_line.run("trace", "--explain", "-o", "-").exit_code == 2


def test_bad_input_is_refused_before_a_model_is_loaded(command_line: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "x"}\n\n{"promt": "y"}\n{"custom_id": "a", "prompt": "z"}\n')
    done = command_line.run("trace", source, "-m", tmp_path / "no-model")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "line 3: " in done.stderr
    assert 'line 4: custom_id "a" was used before, on line 1' in done.stderr
    source.write_text("\n")
    assert "no requests in" in command_line.run("trace", source, "-m", tmp_path).stderr
    missing = command_line.run("trace", tmp_path / "none.jsonl")
    assert (missing.exit_code, "cannot read" in missing.stderr) == (2, True)
    bad = command_line.run("trace", "-m", tmp_path, "--num-blocks", 1)
    assert (bad.exit_code, "num_blocks must be 2 or more" in bad.stderr) == (2, True)
    assert command_line.run("trace", "--steps", 0).exit_code == 2


def test_requests_that_cannot_run_are_named(command_line: CommandLine, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "ok", "max_tokens": 2}, {"prompt": [99999]}, {"prompt": "x" * 600}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = command_line.run("trace", source, "-m", llama)
    assert done.exit_code == 5
    assert "request request-1 failed: " in done.stderr
    assert "request request-2 failed: context_length_exceeded: " in done.stderr
    assert "A left after 2 tokens (length); free" in done.stdout


def test_a_timeline_goes_over_no_file_that_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "steps.json"

    def timeline(log: object, process: str) -> Iterator[bytes]:
        target.write_text("theirs")
        yield b"ours"

    monkeypatch.setattr("workers.timeline.timeline", timeline)
    made: Any = SimpleNamespace(log=None, engine=SimpleNamespace(model_name="m"))
    with pytest.raises(UsageError, match="has appeared meanwhile and stays as it is"):
        command._write(made, target, False)
    assert target.read_text() == "theirs"
    command._write(made, target, True)
    assert target.read_text() == "ours"
