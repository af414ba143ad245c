"""A wheel in a fresh virtual environment: no torch, the migrations are inside, and a producer can submit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("wheel")  # one build for all of them


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment into which the wheel was installed, without any extra."""
    folder = tmp_path_factory.mktemp("install")
    wheels = folder / "wheels"
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT))
    venv.create(folder / "venv")
    programs = folder / "venv" / "bin"
    # With the pip that is here, and no bytecode of modules that are never imported: half of the time.
    pip = (sys.executable, "-m", "pip", "--python", str(programs / "python"))
    _run(*pip, "install", "--quiet", "--no-compile", str(next(wheels.glob("*.whl"))))
    return programs


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHJOBS_") and k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=clean | variables, cwd="/", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_holds_what_it_should(environment: Path) -> None:
    with zipfile.ZipFile(next((environment.parents[1] / "wheels").glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert {
        "batchjobs/_migrations/env.py",
        "workers/engine/attention/paged_attention.cpp",
        "batchjobs/py.typed",
    } <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"batchjobs", "workers"}
    assert not [name for name in names if "__pycache__" in name]


def test_a_plain_install_brings_no_torch(environment: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    assert _run(str(environment / "python"), "-c", code).stdout.strip() == "[]"


def test_a_producer_submits_and_asks_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    home = {"BATCHJOBS_HOME": str(tmp_path / "home")}
    batchjobs = str(environment / "batchjobs")
    batch = _run(batchjobs, "submit", str(prompts), **home).stdout.strip()
    status = json.loads(_run(batchjobs, "status", batch, "--json", **home).stdout)
    assert (status["id"], status["status"], status["counts"]["total"]) == (batch, "queued", 2)
    assert _run(batchjobs, "db", "check", **home)
    _run(batchjobs, "cancel", batch, "--yes", **home)  # with nothing queued, the private Redis server ends by itself
    assert json.loads(_run(batchjobs, "status", batch, "--json", **home).stdout)["counts"]["cancelled"] == 2
    assert not (tmp_path / "home" / "redis" / "redis.sock").exists()
