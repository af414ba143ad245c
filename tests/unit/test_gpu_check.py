"""The check for a GPU: all of it on a CPU with tiny shapes, its arithmetic by hand, and that nothing stops the rest."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from batchjobs.errors import BatchjobsError
from ops import gpu_check
from ops.gpu import machine, needs, sections, shapes, work
from ops.gpu.notes import Notes
from ops.gpu.peers import ContinuousBatching
from ops.gpu.sections import SECTIONS, Section, chosen, run_all, run_apart, seconds_for
from workers.workloads import Work

ROOT = Path(__file__).parents[2]
SKIPPED = ("speed qwen3-0.6b", "workloads llama-8b")  # the same as the others, where all models are the same


@pytest.fixture
def quick_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks of this machine, which take a second to measure, are 1 TFLOP/s and 0.1 TB/s here."""
    measured = {"flops": 1e12, "bytes_per_second": 1e11}
    monkeypatch.setattr(machine, "peaks", lambda name: measured)


# --------------------------------------------------------------------------------------------------- the whole of it


def test_the_whole_check_runs_on_a_cpu(quick_peaks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "deep" / "report.json"
    skipped = [word for name in SKIPPED for word in ("--skip", name)]
    options = ["--device", "cpu", "--tiny", "--in-process", "--minutes", "60", *skipped]
    code = gpu_check.main([*options, "--output", str(output)])
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert found["failed"] == []
    assert code == 0
    assert list(found["sections"]) == [section.name for section in SECTIONS if section.name not in SKIPPED]
    _same_answers(found["sections"]["correctness"])
    _figures_fit_together(found["sections"])
    decode = next(goal for goal in found["goals"] if "decode" in goal["goal"] and goal["model"] == "llama-8b")
    assert decode["verdict"] == "missed"
    assert set(decode["measured"]) == {"decode 2", "decode 4"}
    assert {goal["verdict"] for goal in found["goals"] if "idle" in goal["goal"]} == {"not measured"}
    assert "| llama-8b | decode 4 |" in printed
    assert "speed llama-8b: decode 4: output_tokens_per_second" in printed


def _same_answers(parts: dict[str, dict[str, Any]]) -> None:
    compared = {part: found for part, found in parts.items() if "same" in found}
    assert {found["same"] - found["answers"] for found in compared.values()} == {0}
    assert len(compared) >= 7
    assert parts["float32, llama, sequences that give way to memory"]["offloaded"] > 0
    assert parts["float32, llama, sequences that give way and are computed again"]["offloaded"] == 0
    assert parts["float32, llama, sequences that give way and are computed again"]["gave_way"] > 0
    assert parts["float32, llama, alone"]["different_tokens"] > 10  # else equal answers would say little


def _figures_fit_together(found: dict[str, Any]) -> None:
    speed = found["speed llama-8b"]
    for count in (2, 4):
        part = speed[f"decode {count}"]
        assert part["output_tokens_per_second"] == pytest.approx(count / part["step_ms"] * 1e3)
        assert part["share_of_bandwidth"] == pytest.approx(part["bytes_per_second"] / 1e11)
        assert part["gigabytes_a_step"] * 1e9 / (part["step_ms"] / 1e3) == pytest.approx(part["bytes_per_second"])
        assert 0 <= part["host_busy_ms"] <= part["step_ms"]
    assert speed["prefill"]["share_of_peak"] == pytest.approx(speed["prefill"]["flops"] / 1e12)
    assert speed["prefill"]["tokens_per_second"] == pytest.approx(60 / speed["prefill"]["seconds"])
    for name in work.ROUNDS:
        part = found["workloads qwen3-0.6b"][name]
        assert part["requests"] == 3
        assert part["faster_by"] > 0
        assert part["peer_output_tokens_per_second"] > 0


def test_one_section_alone(quick_peaks: None, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    assert gpu_check.main(["--device", "cpu", "--in-process", "--section", "machine", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert list(found["sections"]) == ["machine"]
    assert found["sections"]["machine"]["versions"]["torch"] == torch.__version__
    assert found["goals"] == []


def test_wrong_names_are_refused_with_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--section", "sped"]) == 2
    assert "no section 'sped'; there are: machine, correctness" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_it_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--in-process"])
    assert ended.value.code == 2
    assert capsys.readouterr().out.count("torch sees no CUDA device here") == 1


# ------------------------------------------------------------------------------------------------------ what it needs


def test_what_is_missing_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "missing", lambda names=(): ["psutil", "safetensors"])
    assert gpu_check.main(["--device", "cpu"]) == 2
    assert "needs psutil, safetensors, which this Python does not have" in capsys.readouterr().err
    monkeypatch.undo()
    assert needs.missing(["json", "no_such_package_here"]) == ["no_such_package_here"]


def test_the_list_of_needs_is_complete() -> None:
    """By the import statements of everything that the check loads at once: no queue, no database, no settings."""
    seen: dict[Path, None] = {}
    outside: set[str] = set()
    wanted = [ROOT / "ops/gpu_check.py", *sorted((ROOT / "ops/gpu").glob("*.py"))]
    while wanted:
        file = wanted.pop()
        if file in seen:
            continue
        seen[file] = None
        for name in imported(file):
            inside = _files_of(name)
            wanted += inside
            if not inside and (top := name.split(".")[0]) not in (*sys.stdlib_module_names, "ops"):
                outside.add(top)
    assert len(seen) > 60
    assert outside <= set(needs.REQUIRED)


def imported(file: Path) -> Iterator[str]:
    """Modules that it imports when it is imported, and of functions only those of this tree, which may run."""
    tree = ast.parse(file.read_text())
    runs = file.is_relative_to(ROOT / "ops")
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            assert node.level == 0
            yield str(node.module)
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if _files_of(f"{node.module}.{alias.name}")
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif runs or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def _files_of(name: str) -> list[Path]:
    """Files of this tree that are run when the module is imported."""
    parts = name.split(".")
    if parts[0] not in ("batchjobs", "workers", "ops"):
        return []
    packages = [ROOT.joinpath(*parts[: n + 1], "__init__.py") for n in range(len(parts))]
    module = ROOT.joinpath(*parts).with_suffix(".py")
    found = [file for file in (*packages, module) if file.exists()]
    own = module.exists() or packages[-1].exists() or ROOT.joinpath(*parts).is_dir()
    return found if own else []


# ----------------------------------------------------------------------------------------------- nothing stops the rest


def test_a_part_that_fails_or_has_no_time_is_noted_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    notes = Notes("speed", 100.0, file)

    def fails() -> dict[str, Any]:
        raise RuntimeError("no room\nand more")

    assert notes.run("first", fails) is None
    assert "RuntimeError: no room" in json.loads(file.read_text())["first"]["error"]
    assert notes.run("second", lambda: {"tokens": 5}, seconds=1e6) is None
    assert notes.run("third", lambda: {"tokens": 7}) == {"tokens": 7}
    kept = json.loads(file.read_text())
    assert list(kept) == ["first", "second", "third"]
    assert "it needs about 1000000 s" in kept["second"]["left_out"]
    assert kept["third"]["tokens"] == 7


def test_sections_share_the_time_that_is_left() -> None:
    names = {each.name: each for each in SECTIONS}
    assert chosen(["speed"], []) == [names["speed llama-8b"], names["speed qwen3-0.6b"]]
    assert names["correctness"] not in chosen([], ["correctness"])
    first, second = Section("a", "", 1), Section("b", "", 3)
    assert seconds_for(first, [second], 200) == 50
    assert seconds_for(first, [second], 30) == 20  # the first ones are worth more than a part for each
    assert seconds_for(second, [], 10) == 10
    given: list[tuple[str, float]] = []

    def run(section: Section, seconds: float, before: dict[str, Any]) -> dict[str, Any]:
        given.append((section.name, seconds))
        assert list(before) == [name for name, _ in given[:-1]]
        return {"start": {}}

    assert list(run_all([first, second], 200.0, run)) == ["a", "b"]
    (_, early), (_, late) = given
    assert early == pytest.approx(50, abs=1)
    assert late == pytest.approx(200, abs=1)  # what the first one did not use is the second one's
    assert "left_out" in run_all([first], 1.0, run)["a"]["start"]


def test_a_section_that_dies_keeps_what_it_had(tmp_path: Path) -> None:
    script = tmp_path / "child.sh"
    script.write_text('echo "{\\"first\\": {\\"tokens\\": 5}}" > "$4"; cp "$5" ' + f"{tmp_path}/known; kill -9 $$")
    parts = run_apart(["sh", str(script)], SECTIONS[0], 60.0, {"machine": {"peaks": {"flops": 1.0}}})
    assert parts == {"first": {"tokens": 5}, "end": {"error": "ended with signal SIGKILL"}}
    assert json.loads((tmp_path / "known").read_text()) == {"machine": {"peaks": {"flops": 1.0}}}


def test_a_section_that_hangs_is_stopped_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "GRACE_SECONDS", 0.0)
    script = tmp_path / "child.sh"
    script.write_text("sleep 1000 & wait")
    parts = run_apart(["sh", str(script)], SECTIONS[0], 0.2, {})
    assert parts == {"end": {"error": "stopped after 0 s"}}


def test_a_peer_gives_up_a_turn_that_takes_too_long() -> None:
    model = shapes.build(shapes.small(LlamaConfig, num_hidden_layers=1), "cpu", torch.float32)
    peer = ContinuousBatching(model, sequences=2, longest=300, max_batch_tokens=64)
    peer.limit_seconds = 0.0
    with pytest.raises(BatchjobsError, match=r"has answered [01] of 3 in"):
        peer.run([Work((5, 6, 7), 250)] * 3)
    peer.limit_seconds = 60.0
    assert peer.run([Work((5, 6, 7), 2)]).made == [2]
    peer.close()
