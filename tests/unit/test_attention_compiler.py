"""How the attention kernel gets built, found again, refused, and done without."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import workers.engine.attention as attention
from workers.engine.attention.compiler import KernelError, load_kernel
from workers.engine.attention.cpu import CpuPagedAttention
from workers.engine.attention.interface import LayerSpec
from workers.engine.folders import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

SPEC = LayerSpec(0, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, scaling=0.5)
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of the test's own, and nothing remembered from other tests."""
    monkeypatch.setenv("BATCHJOBS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BATCHJOBS_NO_COMPILE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    attention._kernel.cache_clear()
    attention._say_once.cache_clear()
    yield
    attention._kernel.cache_clear()
    attention._say_once.cache_clear()


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def real_cache(fresh: None, real_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for the tests that need the real kernel, which takes seconds to build."""
    monkeypatch.setenv("BATCHJOBS_CACHE", str(real_folder))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def script(path: Path, body: str) -> Path:
    """An executable that stands in for a compiler."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def counting(tmp_path: Path) -> tuple[Path, Path]:
    """The real compiler behind a script that notes each build, and its notes."""
    notes = tmp_path / "builds"
    notes.touch()
    body = f'case "$*" in *-shared*) echo build >> {notes};; esac\nexec {COMPILER} "$@"'
    return script(tmp_path / "counting-c++", body), notes


def only_compiler(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("workers.engine.attention.compiler.COMPILERS", (str(path),))


@needs_compiler
def test_a_kernel_is_built_once_and_found_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, notes = counting(tmp_path)
    only_compiler(monkeypatch, compiler)
    assert load_kernel(source).answer() == 42
    assert load_kernel(source).answer() == 42
    assert notes.read_text() == "build\n"
    folder = cache_folder() / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


@needs_compiler
def test_a_changed_source_is_another_kernel(source: Path) -> None:
    assert load_kernel(source).answer() == 42
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert load_kernel(source).answer() == 43


@needs_compiler
def test_a_changed_header_is_another_kernel(source: Path) -> None:
    """Also one that a header includes, each from its own folder; and headers may include each other."""
    (source.parent / "parts").mkdir()
    source.write_text('#include "parts/one.h"\nextern "C" int answer() { return ANSWER; }\n')
    (source.parent / "parts" / "one.h").write_text('#pragma once\n  #  include "two.h"\n')
    for answer in (42, 43):
        header = f'#pragma once\n#include <cstdint>\n#include "one.h"\n#define ANSWER {answer}\n'
        (source.parent / "parts" / "two.h").write_text(header)
        assert load_kernel(source).answer() == answer


@needs_compiler
def test_another_processor_gets_another_kernel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernel(source)
    monkeypatch.setattr("workers.engine.attention.compiler._processor", lambda: "a later one")
    load_kernel(source)
    assert len(list((cache_folder() / "kernels").glob("*.so"))) == 2


@needs_compiler
def test_a_damaged_library_is_built_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'for last; do :; done\ncase "$last" in *.so) echo "not a library" > "$last";; esac'
    garbage = script(tmp_path / "c++", body)
    only_compiler(monkeypatch, garbage)
    with pytest.raises(KernelError, match="cannot be loaded"):
        load_kernel(source)
    [damaged] = (cache_folder() / "kernels").glob("*.so")
    monkeypatch.setattr("workers.engine.attention.compiler._key", lambda *_: damaged.stem.removeprefix("answer-"))
    monkeypatch.setenv("CXX", str(COMPILER))
    assert load_kernel(source).answer() == 42


RACER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("compiler", sys.argv[1])
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)
compiler.COMPILERS = (sys.argv[2],)
print("ready", flush=True)
sys.stdin.readline()
print(compiler.load_kernel(Path(sys.argv[3])).answer())
"""


@needs_compiler
def test_several_processes_build_one_good_library(source: Path, tmp_path: Path) -> None:
    compiler, notes = counting(tmp_path)
    command = [sys.executable, "-c", RACER, attention.compiler.__file__, str(compiler), str(source)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    racers = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 4
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate(timeout=120)[0] for racer in racers] == ["42\n"] * 4
    assert notes.read_text() == "build\n"
    assert len(list((cache_folder() / "kernels").glob("*.so"))) == 1


@needs_compiler
def test_the_next_compiler_is_tried_when_one_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken-c++", "exit 1")))
    assert load_kernel(source).answer() == 42


def test_a_failing_build_says_what_the_compiler_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "echo 'In file included from x:' >&2; echo 'x.cpp:3: fatal error: omp.h: No such file' >&2; exit 1"
    only_compiler(monkeypatch, script(tmp_path / "c++", body))
    with pytest.raises(KernelError, match=r"c\+\+ failed: x.cpp:3: fatal error: omp.h: No such file"):
        load_kernel(source)
    assert not list((cache_folder() / "kernels").glob("*.so"))


def test_without_a_compiler_the_reason_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(KernelError, match=r"no C\+\+ compiler was found .*; install g\+\+ or set CXX"):
        load_kernel(source)


def test_a_folder_that_others_can_write_to_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(KernelError, match="other users could write to the cache folder"):
        load_kernel(source)


def test_a_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KernelError, match=r"cache/kernels cannot be used \(.*\); set BATCHJOBS_CACHE"):
        load_kernel(source)


def test_the_cache_folder_is_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHJOBS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "batchjobs"


@needs_compiler
@pytest.mark.usefixtures("real_cache")
def test_the_kernel_is_chosen_on_a_cpu_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first = attention.choose_backend("cpu", torch.float32, [SPEC])
        second = attention.choose_backend(torch.device("cpu"), torch.bfloat16, [SPEC])
    assert (first.name, second.name) == ("cpu", "cpu")
    assert first is not second
    [message] = caplog.messages
    assert message.startswith("attention runs in the C++ kernel ")


def test_torch_is_chosen_and_said_once_where_the_kernel_is_not_wanted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHJOBS_NO_COMPILE", "1")
    with caplog.at_level(logging.INFO):
        names = [attention.choose_backend("cpu", torch.float32, [SPEC]).name for _ in range(2)]
    assert names == ["torch", "torch"]
    assert caplog.messages == [
        "attention runs in plain torch, several times slower on a CPU: BATCHJOBS_NO_COMPILE is set"
    ]


def test_torch_is_chosen_where_the_kernel_cannot_be_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert attention.choose_backend("cpu", torch.float32, [SPEC]).name == "torch"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler was found" in record.message


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float16), ("cpu", torch.float64), ("cuda", torch.float32)])
def test_torch_serves_what_the_kernel_does_not(device: str, dtype: torch.dtype) -> None:
    assert attention.choose_backend(device, dtype, [SPEC]).name == "torch"


SHARER = """
import os
import numpy as np, torch
from workers.engine.attention import LayerSpec, PackedRows, choose_backend

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
a = torch.ones(600, 600)
torch.exp(a); a @ a
before = threads()
spec = LayerSpec(0, 4, 2, 8, 8, 0.5)
backend = choose_backend("cpu", torch.float32, [spec])
cache = backend.allocate(spec, 8, 16, torch.float32, "cpu")
rows = PackedRows(*(np.array(a, np.int32) for a in ([0, 100], [0], [range(1, 8)])), 16)
for _ in range(50):
    backend.begin(rows)
    out = backend.attend(spec, cache, *(torch.ones(1, h, 100, 8) for h in (4, 2, 2)))
    assert torch.equal(out, torch.ones(1, 100, 4, 8))
    torch.exp(a); a @ a
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
print(backend.name, threads() - before, len(runtimes))
"""


@needs_compiler
@pytest.mark.usefixtures("real_cache")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_kernel_and_torch_share_their_threads() -> None:
    """Both run on one OpenMP runtime: going from one to the other and back starts no further thread."""
    done = subprocess.run([sys.executable, "-c", SHARER], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["cpu", "0", "1"]


def test_a_library_of_another_layout_is_refused() -> None:
    stranger: Any = SimpleNamespace(batchjobs_call_size=lambda: 8)
    with pytest.raises(ValueError, match="disagree about the layout"):
        CpuPagedAttention(stranger)
