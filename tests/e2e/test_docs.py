"""What the documents tell people to type works as written, on a tiny model in place of the ones they name.

Every ```sh and ```python block is run, page by page and in order, in one folder a page. All pages share one home with
one worker. What cannot run here is listed below with the reason; of that every `batchjobs` command has to be one that
the parser accepts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchjobs.cli import main
from tests.support.machine import Machine, stop_private_redis
from tests.support.models import save_chat_model
from tests.unit.test_ops_commands import accept, commands_in

pytestmark = pytest.mark.xdist_group("docs")  # one worker for all of them

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PAGES = [
    *sorted(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "ops/README.md",
    ROOT / "examples/README.md",
]
LANGUAGES = {"", "sh", "python", "json", "jsonl", "sql", "sql sqlite", "sql postgresql", "promql", "toml", "text"}
"""Of these only sh and python are typed in. Anything else would hide from this test."""

PROMPTS = """\
{"prompt": "one", "max_tokens": 8}
{"messages": [{"role": "user", "content": "two"}], "max_tokens": 8}
"""
REQUESTS = """\
{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", \
"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}}
"""
NAMED_MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "./my-model", "/models/my-model-2")

CANNOT_RUN = {
    ("README.md", "make run "): "installs everything, and is the whole suite",
    ("README.md", "export BATCHJOBS_DATABASE_URL=postgresql://"): "needs servers of that name",
    ("ops/README.md", "useradd --system"): "needs root and systemd",
    ("docs/benchmarks.md", "python -m venv envs/vllm"): "installs other systems, and measures for an hour",
    ("docs/gpu.md", "pip install 'batchjobs[worker]'"): "needs a GPU",
    ("docs/gpu.md", "python ops/gpu_check.py"): "needs a GPU; test_gpu_check.py runs it on a CPU",
    ("docs/gpu.md", "python -m pip download"): "installs from the network",
    ("docs/trace.md", "batchjobs trace --explain"): "test_trace.py runs it, and compares what it prints",
    ("docs/trace.md", "batchjobs trace --num-blocks"): "test_trace.py runs it, and compares what it prints",
    ("examples/README.md", "export BATCHJOBS_HOME"): "test_examples.py runs the examples",
}
"""The beginning of a block -> why it is not run."""

LINES_LEFT_OUT = {
    "pip install ": "installs from the network",
    "batchjobs worker --metrics-port": "serves until it is stopped, on a port of its own",
    "batchjobs metrics ": "serves until it is stopped, on a port of its own",
}
"""The beginning of a line -> why it is not run; the others of its block are."""

AFTERWARDS = {"batchjobs pause --all-workers": 'batchjobs model update "$BATCHJOBS_MODEL"'}
"""What puts the worker back into the state that the next page finds it in."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it cannot run here; None when it can."""
        found = [why for (page, start), why in CANNOT_RUN.items() if page == self.page and self.text.startswith(start)]
        return found[0] if found else None

    def lines(self) -> list[str]:
        """Those that run."""
        return [line for line in self.text.splitlines() if not _left_out(line)]

    def commands(self) -> list[str]:
        """What follows `batchjobs` in lines that do not run: those left out, and those of a screen that is shown."""
        lines = self.text.splitlines()
        if self.language:
            left = [line for line in lines if self.reason or _left_out(line)]
        else:
            left = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [command for line in left for command in commands_in(line.split(" && ")[-1].removesuffix("&"))]


def _left_out(line: str) -> bool:
    return any(line.startswith(start) for start in LINES_LEFT_OUT) and "--once" not in line


def blocks_of(page: Path) -> list[Block]:
    name = str(page.relative_to(ROOT))
    return [
        Block(name, language.strip(), text)
        for language, text in re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.DOTALL)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TYPED = [block for block in BLOCKS if block.language in ("sh", "python")]
RUNNABLE = [block for block in TYPED if block.reason is None]


# ------------------------------------------------------------------------------------------------ blocks that run


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """With a worker that all pages share."""
    model = save_chat_model(tmp_path_factory.mktemp("model"))
    other = save_chat_model(tmp_path_factory.mktemp("other"), seed=1)
    with tempfile.TemporaryDirectory(prefix="bj-home-") as home:
        machine = Machine(Path(home), model, OTHER_MODEL=str(other), PATH=f"{BIN}:{os.environ['PATH']}")
        machine.start("worker")
        yield machine
        machine.end()
        stop_private_redis(Path(home))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    (tmp_path / "requests.jsonl").write_text(REQUESTS)
    return tmp_path


def for_here(text: str, machine: Machine) -> str:
    """The block with the models that there are."""
    for named in NAMED_MODELS:
        text = text.replace(named, machine.environment["OTHER_MODEL" if named.endswith("-2") else "BATCHJOBS_MODEL"])
    return text


def run(block: Block, machine: Machine, folder: Path) -> str:
    """What it prints. Workers that it leaves in the background are ended in good order: one that was killed would be
    listed as living for a while, and be waited for."""
    text = for_here("\n".join(block.lines()), machine)
    if block.language == "python":
        command = [sys.executable, "-c", text]
    else:
        after = "\n".join(line for start, line in AFTERWARDS.items() if block.text.startswith(start))
        script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{text}\n{after}"
        command = ["bash", "-c", script]
    environment = machine.environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{block.page}:\n{block.text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", list(dict.fromkeys(block.page for block in RUNNABLE)))
def test_every_block_of_a_page_runs(machine: Machine, folder: Path, page: str) -> None:
    for block in RUNNABLE:
        if block.page == page:
            (folder / "answers.jsonl").unlink(missing_ok=True)
            printed = run(block, machine, folder)
            if "answers.jsonl" in block.text:
                assert len((folder / "answers.jsonl").read_text().splitlines()) == 2
            if re.search(r"^ *print\((?!.*file=)", block.text, re.M):
                assert printed


# -------------------------------------------------------------------------------------- blocks that cannot run here


@pytest.mark.parametrize(
    ("page", "command"),
    [(each.page, command) for each in BLOCKS if each in TYPED or not each.language for command in each.commands()],
)
def test_commands_that_cannot_run_here_exist(page: str, command: str) -> None:
    accept(main, shlex.split(command), whole=True)


def test_the_lists_name_what_is_there() -> None:
    assert len(RUNNABLE) >= 12
    found = {(block.page, start) for block in TYPED for _, start in CANNOT_RUN if block.text.startswith(start)}
    assert CANNOT_RUN.keys() - found == set()
    lines = [line for block in RUNNABLE for line in block.text.splitlines()]
    for start in (*LINES_LEFT_OUT, *AFTERWARDS):
        assert any(line.startswith(start) for line in lines), start


def test_no_block_hides_in_another_language() -> None:
    assert sorted({(block.page, block.language) for block in BLOCKS if block.language not in LANGUAGES}) == []
    assert [block for block in BLOCKS if not block.language and re.search(r"^batchjobs \w", block.text, re.M)] == []


# ------------------------------------------------------------------------------------------------------- guarantees


def test_the_guarantees_name_tests_that_exist() -> None:
    page = (ROOT / "docs/guarantees.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert sorted(name for name in named if not re.search(rf"def {name}\b", tests)) == []
    files = re.findall(r"`(tests/[\w/.]+)`", page)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
