"""The scripts in ``benchmarks/`` that measure other processes: they read them whole, and never wait for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

from benchmarks import million_lines, throughput, whole_job

CHATTY = """
import sys
sys.stderr.write("a warning\\n" * 20_000)
sys.stderr.flush()
print("01BATCH")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def chatty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that says more on stderr than a pipe holds, and its result only then."""
    package = tmp_path / "batchjobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(CHATTY)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("chatty")
@pytest.mark.timeout(30)
def test_a_command_that_says_much_is_measured_all_the_same() -> None:
    found = million_lines.measure("submit", ["0"], 10, dict(os.environ))
    assert found.note == ""
    assert found.output_mb == 8e-6
    assert million_lines.measure("submit", ["3"], 10, dict(os.environ)).note == "not measured: a warning"


def test_nobody_waits_for_a_worker_or_a_submission_that_has_ended() -> None:
    over = threading.Thread(target=int)
    over.start()
    over.join()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        throughput.check_living(over, [million_lines.Figures("submit")], [child.pid])
        with pytest.raises(click.ClickException, match="submit could not be measured"):
            throughput.check_living(over, [], [child.pid])
        with pytest.raises(click.ClickException, match="submit: not measured: no such file"):
            throughput.check_living(over, [million_lines.Figures("submit", note="not measured: no such file")], [])
        child.communicate(b"\n")
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(click.ClickException, match="worker 0 has ended before the work was done"):
            throughput.check_living(over, [million_lines.Figures("submit")], [child.pid])
        assert child.wait() == 0  # its exit code is still there


def test_a_line_of_a_whole_job_ends_at_its_line_feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON may hold what Unicode calls a line separator, as it is, and a file may have empty lines."""
    file, told = tmp_path / "in.jsonl", []
    file.write_text(
        '{"custom_id": "a", "body": {"prompt": "one\u2028two"}}\n\n{"custom_id": "b", "body": {"prompt": "\x85"}}\n'
    )
    answer = '{"custom_id": "%s", "text": "\u2029", "response": {"status_code": 200, "body": {"usage": %s}}}\n'
    usage = '{"completion_tokens": 7}'

    def run(command: list[str], environment: dict[str, str]) -> float:
        source, target = (Path(command[command.index(option) + 1]) for option in ("-i", "-o"))
        told.extend(json.loads(line) for line in source.read_text().split("\n") if line)
        target.write_text(answer % ("a", usage) + answer % ("b", usage))
        return 1.5

    monkeypatch.setattr(whole_job, "_timed", run)
    assert whole_job.theirs("python", file, "small", "float32", 2, tmp_path) == (1.5, 14)
    assert [request["body"] for request in told] == [
        {"prompt": "one\u2028two", "model": "small"},
        {"prompt": "\x85", "model": "small"},
    ]
