"""The comparison with other systems: peers in their own processes, and the figures that are told of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from batchjobs.errors import UsageError
from benchmarks import compare, whole_job
from benchmarks.comparison.peer_process import PeerProcess, stopped
from benchmarks.comparison.table import markdown, put_between_markers, summary

PEER = """
import sys
sys.path.insert(0, {peers!r})
from peer_protocol import serve

class Peer:
    versions, settings = {{"fake": "1"}}, {{"threads": 1}}

    def __init__(self, options):
        print("a library says hello")  # never mistaken for an answer
        if options.get("broken"):
            raise ValueError("no such model")
        self.less = options.get("less", 0)

    def run(self, work):
        print("and again")
        if any(ids == [13] for ids, _ in work):
            raise RuntimeError("bad luck")
        return 2.0, [tokens - self.less for _, tokens in work]

serve(Peer)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "fake_peer.py"
    script.write_text(PEER.format(peers=str(compare.PEERS)))
    return script


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_works_when_told_to_and_stands_still_otherwise(script: Path) -> None:
    peer = PeerProcess("fake", sys.executable, script, {"threads": 1})
    with stopped([peer]):
        assert peer.error is None
        assert (peer.versions, peer.settings) == ({"fake": "1"}, {"threads": 1})
        assert peer.start_seconds > 0
        deadline = time.monotonic() + 5
        while state_of(peer._process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_of(peer._process.pid) == "T"
        assert peer.run([([1, 2], 3), ([4], 5)]) == (2.0, [3, 5])
        with pytest.raises(RuntimeError, match="fake failed: RuntimeError: bad luck"):
            peer.run([([13], 1)])
    assert peer.log.is_file()  # it failed once
    with pytest.raises(ProcessLookupError):
        os.kill(peer._process.pid, signal.SIG_DFL)


def test_a_peer_that_cannot_start_says_why(script: Path, tmp_path: Path) -> None:
    broken = PeerProcess("fake", sys.executable, script, {"threads": 1, "broken": True})
    assert broken.error is not None
    assert broken.error.startswith("ValueError: no such model (its messages are in ")
    missing = PeerProcess("fake", sys.executable, tmp_path / "nowhere.py", {"threads": 1})
    assert missing.error is not None
    assert "exit code 2" in missing.error


@pytest.fixture
def fake_peers(script: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every peer is the fake one; what is put into the dict becomes options of all but ours."""
    more: dict[str, Any] = {}
    real = PeerProcess

    def started(name: str, python: str, path: Path, options: dict[str, Any]) -> PeerProcess:
        return real(name, python, script, {"threads": 1, **({} if name == "batchjobs" else more)})

    monkeypatch.setattr(compare, "PeerProcess", started)
    monkeypatch.setattr(compare, "folder_of", lambda model: "/models/small")
    return more


def run(*arguments: object) -> Any:
    return CliRunner().invoke(compare.main, [str(argument) for argument in arguments])


def test_a_comparison_skips_what_is_missing_and_writes_what_it_found(
    fake_peers: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- compare: mixed-64 float32 -->\nold\n<!-- /compare -->\nafter\n")
    done = run("--num-requests", 3, "--rounds", 2, "--output", tmp_path / "found.json", "--docs", page)
    assert done.exit_code == 0, done.output
    assert "vLLM for CPU is skipped" in done.stderr
    assert "round 2/2: transformers, continuous batching: 2.0 s" in done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- compare: mixed-64 float32 -->\n`mixed-64`, float32: 3 requests")
    assert text.endswith("<!-- /compare -->\nafter\n")
    assert "old" not in text
    assert "| transformers, static batches of 16 | " in text
    assert "1.00 × (1.00 to 1.00)" in text
    assert (tmp_path / "found.json").read_bytes().startswith(b"{")


def test_it_uses_the_cores_that_it_may_run_on(
    fake_peers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has fewer than the machine, and more threads than cores would slow some systems more than others."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5, 8})
    done = run("--num-requests", 1, "--rounds", 1, "--output", tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["threads"], found["machine"]["cores"]) == (3, "3")


def test_nobody_is_left_standing_when_a_comparison_is_told_to_end(script: Path) -> None:
    peer = PeerProcess("fake", sys.executable, script, {"threads": 1})
    with pytest.raises(SystemExit), stopped([peer]):
        signal.raise_signal(signal.SIGTERM)
    assert peer._process.returncode is not None
    assert not peer.log.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--output", "/nowhere/o.json"), "there is no folder /nowhere"),
        (("--docs", "README.md"), "README.md has no place for this table"),
        (("--python", "no-such-python"), "there is nothing to compare with"),
    ],
)
def test_what_cannot_end_well_is_said_before_anything_runs(
    options: tuple[str, str], said: str, fake_peers: dict[str, Any]
) -> None:
    done = run("--num-requests", 1, "--rounds", 1, *options)
    assert (done.exit_code, said in done.output, "round 1" in done.output) == (1, True, False)


def test_a_peer_that_does_less_fails_the_comparison(fake_peers: dict[str, Any]) -> None:
    fake_peers["less"] = 1
    done = run("--num-requests", 2, "--rounds", 1)
    assert done.exit_code == 1
    assert "static batches of 16 did not make the asked number of tokens" in done.output


def test_ratios_are_those_of_each_round() -> None:
    peer: Any = SimpleNamespace(name="vllm", start_seconds=90.0, versions={"vllm": "1"}, settings={"bind": "0-1"})
    mine: Any = SimpleNamespace(name="batchjobs", start_seconds=1.0, versions={}, settings={})
    runs = {"batchjobs": [1.0, 2.0, 4.0], "vllm": [3.0, 4.0, 6.0]}
    found = summary(peer, runs, compare.NAMES)
    assert (found["slower"], found["slower_min"], found["slower_max"]) == (2.0, 1.5, 3.0)
    table = markdown(
        {
            "workload": "mixed-64",
            "dtype": "float32",
            "requests": 2,
            "input_tokens": 5,
            "output_tokens": 1200,
            "model": "m",
            "threads": 2,
            "rounds": 3,
            "machine": {"processor": "P", "instructions": "avx2", "date": "2026-01-01"},
            "systems": [summary(mine, runs, compare.NAMES), found],
        }
    )
    assert "| batchjobs | 600 (300 to 1200) |  | 1 s |" in table
    assert "| vLLM for CPU | 300 (200 to 400) | 2.00 × (1.50 to 3.00) | 90 s |" in table
    assert "- vLLM for CPU: vllm 1; bind 0-1" in table


def test_a_page_without_the_section_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(UsageError, match="has no section"):
        put_between_markers(page, "mixed-64 float32", "table\n")
    assert page.read_text() == "nothing\n"


def test_a_whole_job_needs_an_answer_to_every_request(tmp_path: Path) -> None:
    file, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    answer = '{"custom_id": "%s", "response": {"status_code": %d, "body": {"usage": {"completion_tokens": 7}}}}\n'
    results.write_text(answer % ("a", 200) + answer % ("b", 200))
    assert whole_job.tokens_of(results, file) == 14
    results.write_text(answer % ("a", 200) + answer % ("b", 500))
    with pytest.raises(Exception, match="1 of 2 requests have no answer"):
        whole_job.tokens_of(results, file)
    told = whole_job.table(
        {"batchjobs run": [2.0, 4.0], "vllm run-batch": [8.0, 12.0]},
        {"batchjobs run": [7, 7], "vllm run-batch": [9, 9]},
    )
    assert "| `vllm run-batch` | 10.0 (8.0 to 12.0) | 9 | 3.50 (3.00 to 4.00) |" in told
