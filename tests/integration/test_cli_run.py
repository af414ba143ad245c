"""``batchjobs run``: once, again, interrupted, and with a worker that dies. The queue and the worker are real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from batchjobs.cli import main
from batchjobs.cli.progress import BatchProgress
from batchjobs.client import Client
from tests.support import stub_worker
from tests.support.cases import case
from tests.support.stub_engine import expected_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

    from batchjobs.types import BatchInfo

DYING = [sys.executable, "-c", "print('no \\x1b[2J memory left', flush=True); raise SystemExit(3)"]


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("REDIS_URL", "DATABASE_URL", "MODEL", "DEBUG"):
        monkeypatch.delenv(f"BATCHJOBS_{name}", raising=False)
    monkeypatch.setenv("BATCHJOBS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    use_worker(monkeypatch, stub_worker.command())
    write("in.jsonl", "one", "three")
    yield
    if (tmp_path / "home" / "redis").exists():  # a server with queued work stays, by design
        with Client() as client:
            client.queue.connection.flushall()


def use_worker(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr("batchjobs.cli.local_worker.worker_command", lambda: command)


def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[str]:
        pytest.fail("a worker was started")

    monkeypatch.setattr("batchjobs.cli.local_worker.worker_command", refuse)


def write(name: str, *prompts: str, max_tokens: int = 3) -> None:
    lines = [json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}) for prompt in prompts]
    Path(name).write_text("\n".join(lines) + "\n")


def run(*arguments: str, model: str = "org/model") -> Result:
    return CliRunner().invoke(main, ["run", *arguments, "--model", model])


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def batches() -> list[BatchInfo]:
    with Client() as client:
        return client.batches()


def test_run_answers_and_running_again_prints_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("in.jsonl", "-o", "out.jsonl")
    assert (done.exit_code, done.stdout) == (0, "")
    found = rows(Path("out.jsonl").read_text())
    assert [row["text"] for row in found] == [expected_text("one", 3), expected_text("three", 3)]
    assert "2 of 2 done, 0 running, 6 tokens" in done.stderr
    (batch,) = batches()
    assert (batch.model, batch.queue, batch.name) == ("org/model", "high", "in.jsonl")
    no_worker(monkeypatch)
    again = run("in.jsonl")
    assert again.exit_code == 0
    assert rows(again.stdout) == found
    assert f"batch {batch.id} has ended already; these are its results" in again.stderr
    same = run("in.jsonl", "-o", "out.jsonl")
    assert same.exit_code == 0
    assert len(batches()) == 1


@case("A-out-02")
def test_an_interrupted_run_goes_on_and_generates_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished stays, and only the rest is made."""
    write("in.jsonl", *(f"prompt {number}" for number in range(6)), max_tokens=2)
    Path("in.jsonl").write_text(
        Path("in.jsonl").read_text() + '{"prompt":"long","max_tokens":100000,"temperature":0}\n'
    )
    show = BatchProgress.show

    def interrupt(self: BatchProgress, info: BatchInfo) -> None:
        show(self, info)
        if info.counts.completed >= 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchProgress, "show", interrupt)
        done = run("in.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 130
    assert "interrupted; the same command goes on where this one stopped\n" in done.stderr
    assert not Path("out.jsonl").exists()
    (batch,) = batches()
    assert (batch.counts.completed, batch.counts.queued) == (6, 1)
    with Client() as client:
        before = [row.completion for row in client.store.results(batch.id)][:6]
        client.cancel_request(batch.id, 6)
    no_worker(monkeypatch)
    again = run("in.jsonl", "-o", "out.jsonl")
    assert again.exit_code == 0
    with Client() as client:
        assert [row.completion for row in client.store.results(batch.id)][:6] == before
    assert [row["status"] for row in rows(Path("out.jsonl").read_text())] == ["completed"] * 6 + ["cancelled"]


def test_a_worker_that_dies_shows_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_worker(monkeypatch, DYING)
    done = run("in.jsonl")
    assert (done.exit_code, done.stdout) == (1, "")
    (log,) = (tmp_path / "home" / "logs").iterdir()
    assert "no \\x1b[2J memory left\n" in done.stderr
    assert f"batchjobs: the worker ended with exit code 3 before the batch did; its log is {log}" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_requests_are_results_and_exit_code_5() -> None:
    write("in.jsonl", "one", "untokenizable")
    done = run("in.jsonl", "--format", "openai", "-o", "out", "--errors", "err")
    assert done.exit_code == 5
    assert [row["custom_id"] for row in rows(Path("out").read_text())] == ["request-0"]
    assert [row["error"]["code"] for row in rows(Path("err").read_text())] == ["invalid_prompt"]
    assert "batchjobs: 1 request of 2 failed: 1 invalid_prompt" in done.stderr


def test_redo_makes_a_fresh_batch_which_the_next_run_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(monkeypatch, DYING)
    assert [run("in.jsonl").exit_code, run("in.jsonl", "--redo").exit_code] == [1, 1]
    newest, oldest = batches()
    assert newest.id != oldest.id
    assert f"batch {newest.id} goes on: 0 of 2 requests done before" in run("in.jsonl").stderr


def test_other_content_model_or_sampling_is_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(monkeypatch, DYING)
    run("in.jsonl")
    run("in.jsonl")
    assert len(batches()) == 1
    run("in.jsonl", "--top-k", "5")
    run("in.jsonl", model="org/other")
    write("in.jsonl", "four")
    run("in.jsonl")
    assert len(batches()) == 4


def test_bad_lines_start_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    no_worker(monkeypatch)
    Path("in.jsonl").write_text('{"prompt":1}\n')
    done = run("in.jsonl")
    assert done.exit_code == 2
    assert "line 1: prompt must be a string or a list of token ids, not an integer\n" in done.stderr
    assert batches() == []


@case("A-out-03")
def test_output_over_something_else_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    no_worker(monkeypatch)
    Path("precious").write_text("x")
    Path("link").symlink_to("in.jsonl")
    before = Path("in.jsonl").read_text()
    for target, message in (("precious", "exists already"), ("in.jsonl", "is the input"), ("link", "is the input")):
        done = run("in.jsonl", "-o", target, *(["--force"] if target != "precious" else []))
        assert done.exit_code == 2, target
        assert message in done.stderr, target
    assert (Path("precious").read_text(), Path("in.jsonl").read_text()) == ("x", before)
    assert batches() == []


def test_finished_results_are_not_put_over_something_else() -> None:
    assert run("in.jsonl").exit_code == 0
    Path("precious").write_text("x")
    done = run("in.jsonl", "-o", "precious")
    assert (done.exit_code, Path("precious").read_text()) == (2, "x")
    assert run("in.jsonl", "-o", "precious", "--force").exit_code == 0
    assert len(rows(Path("precious").read_text())) == 2


def test_standard_input_is_a_file_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(monkeypatch, DYING)
    content = Path("in.jsonl").read_bytes()
    assert CliRunner().invoke(main, ["run", "-", "--model", "org/model"], input=content).exit_code == 1
    assert "goes on" in run("in.jsonl").stderr
    assert len(batches()) == 1
