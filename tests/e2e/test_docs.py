"""What the documents tell people to type works as written, on a tiny model in place of the ones they name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import Machine
from tests.support.models import save_chat_model

ROOT = Path(__file__).parents[2]
NAMED_MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "./my-model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def folder_with_prompts(home: Path, name: str) -> Path:
    folder = home / name
    folder.mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    return folder


def type_in(machine: Machine, block: str, folder: Path) -> None:
    """Run a block in a shell as a person would, and end the worker that it leaves in the background."""
    for named in NAMED_MODELS:
        block = block.replace(named, machine.environment["BATCHJOBS_MODEL"])
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{block}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=machine.environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = (folder / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 2


@pytest.mark.parametrize(
    ("document", "number"), [("README.md", 1), ("README.md", 2), ("docs/cli.md", 0), ("docs/cli.md", 1)]
)
def test_shell_commands(embedded: Machine, home: Path, document: str, number: int) -> None:
    block = blocks(document, "sh")[number]
    commands = "\n".join(line for line in block.splitlines() if not line.startswith("pip install"))
    assert "batchjobs" in commands
    type_in(embedded, commands, folder_with_prompts(home, "work"))


def test_python_of_the_readme(embedded: Machine, home: Path) -> None:
    (block,) = blocks("README.md", "python")
    folder = folder_with_prompts(home, "work")
    embedded.start("worker")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=folder, env=embedded.environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_python_of_the_engine_page(home: Path, model: Path) -> None:
    (block,) = blocks("docs/engine.md", "python")
    for named in NAMED_MODELS:
        block = block.replace(named, str(model))
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_guarantees_name_tests_that_exist() -> None:
    page = (ROOT / "docs/guarantees.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert sorted(name for name in named if not re.search(rf"def {name}\b", tests)) == []
    files = re.findall(r"`(tests/[\w/.]+)`", page)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
