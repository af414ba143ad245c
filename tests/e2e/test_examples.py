"""The programs in `examples/` run as they are and print what they promise, on a tiny model.

One runs with workers in processes of their own, as people run it. The others run in this process, with a worker in a
thread where they start one.
"""

from __future__ import annotations

import csv
import math
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchjobs import load_settings
from batchjobs.cli.worker import engine_config
from tests.support.machine import Machine
from tests.support.models import save_chat_model
from workers.daemon import run_worker
from workers.engine import Engine, EngineLoop

EXAMPLES = Path(__file__).parents[2] / "examples"
run_process = subprocess.run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def work(command: list[Any], **options: Any) -> Any:
    """What `batchjobs worker --burst` does, in a thread; other commands are run."""
    if command[:4] != [sys.executable, "-m", "batchjobs", "worker"]:
        return run_process(command, **options)
    assert (command[4], command[5:6] in ([], ["--model"]), options) == ("--burst", True, {"check": True})
    settings = load_settings(**({"model": str(command[6])} if command[5:] else {}))
    codes: list[int] = []

    def burst() -> None:
        loop = EngineLoop(Engine(str(settings.model), engine_config(settings)))
        codes.append(run_worker(settings, loop, burst=True))

    thread = threading.Thread(target=burst)
    thread.start()
    thread.join(120)
    assert codes == [0]
    return None


@pytest.fixture
def run(
    embedded: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """Runs an example and gives the lines that it prints."""
    for name, value in embedded.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(embedded.home)
    monkeypatch.setattr(subprocess, "run", work)

    def lines(name: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name])
        capfd.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out.splitlines()

    return lines


def processes_of(machine: Machine) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BATCHJOBS_HOME") == str(machine.home) and process.pid != os.getpid():
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def test_a_csv_file_is_classified(run: Any, embedded: Machine) -> None:
    printed = run("classify_csv.py")
    assert printed[-1] == "written to labels.csv"
    with (EXAMPLES / "reviews.csv").open(newline="") as file:
        given = list(csv.DictReader(file))
    with (embedded.home / "labels.csv").open(newline="") as file:
        labelled = list(csv.DictReader(file))
    assert [(row["id"], row["text"]) for row in labelled] == [(row["id"], row["text"]) for row in given]
    for row in labelled:
        assert row["label"] in ("positive", "negative")
        assert 0 <= float(row["confidence"]) <= 1


def test_confidences_are_shares_of_the_labels() -> None:
    chances = runpy.run_path(str(EXAMPLES / "classify_csv.py"))["chances"]
    top = ((1, -0.5, " positive"), (2, -1.5, " neg"), (3, -2.0, "!"), (4, -2.5, (240, 159)), (5, -3.0, " "))
    share = 1 / (1 + math.exp(-1))
    assert chances(top) == pytest.approx({"positive": share, "negative": 1 - share})
    assert chances(((3, -2.0, "!"),)) == {"positive": 0.0, "negative": 0.0}


def test_cards_that_keep_to_their_schema(run: Any) -> None:
    printed = run("json_schema.py")
    assert [line.split()[0] for line in printed] == ["cat", "spider", "salmon", "eagle", "ant", "frog"]
    card = re.compile(r"\w+ +(\d+ legs, in (water|air|land) +called ['\"].*['\"]|length: '\{.*)")
    assert [line for line in printed if not card.fullmatch(line)] == []


def test_a_killed_worker_and_one_that_goes_on(embedded: Machine) -> None:
    """With real processes; none is left behind."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "resume.py"], env=embedded.environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed, resumed, twice, went_on = done.stdout.splitlines()
    before = re.fullmatch(r"the first worker was killed: (\d+) of 24 answered", killed)
    assert before is not None
    assert 4 <= int(before[1]) <= 24
    assert resumed == "a second one went on: 24 of 24 answered"
    assert twice == "answered twice: 0"
    assert went_on.startswith("begun by the first worker and finished by the second: ")
    assert processes_of(embedded) == []


def test_how_sure_the_model_was(run: Any) -> None:
    answers, *rows = run("query_logprobs.py")
    assert answers == "answers, the least certain first"
    middle = rows.index("the five least likely tokens")
    perplexities = [float(row.split()[2].strip(",")) for row in rows[:middle]]
    assert len(perplexities) == 6
    assert perplexities == sorted(perplexities, reverse=True)
    logprobs = [float(row.split()[4]) for row in rows[middle + 1 :]]
    assert len(logprobs) == 5
    assert logprobs == sorted(logprobs)


def test_two_versions_side_by_side(run: Any) -> None:
    one, other, *rows, total = run("compare_models.py")
    versions = [line.removeprefix("answered by ") for line in (one, other)]
    assert all(re.fullmatch("sha256:[0-9a-f]{16}", version) for version in versions)
    assert versions[0] != versions[1]
    prompts, first, second = rows[::3], rows[1::3], rows[2::3]
    assert len(prompts) == len(first) == len(second) == 6
    same = [a.split(maxsplit=1)[1] == b.split(maxsplit=1)[1] for a, b in zip(first, second, strict=True)]
    assert [line[0] for line in prompts] == ["=" if each else "!" for each in same]
    assert total == f"they agree on {sum(same)} of 6"
