"""A container's share of the processors decides how many threads a forward pass gets, its limit how much memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.engine import cgroups as cgroup_files
from workers.engine.cgroups import memory_left, memory_limit
from workers.engine.processors import processor_quota, threads_for


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup_files, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroup_files, "OWN_CGROUP", tmp_path / "own")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_tightest_group_counts(cgroups: Path) -> None:
    write(cgroups / "own", "0::/pods/one\n")
    write(cgroups / "pods" / "one" / "cpu.max", "max 100000\n")
    assert processor_quota() is None
    write(cgroups / "pods" / "cpu.max", "250000 100000\n")
    assert processor_quota() == 2.5
    write(cgroups / "pods" / "one" / "cpu.max", "150000 100000\n")
    assert processor_quota() == 1.5
    write(cgroups / "cpu.max", "50000 100000\n")
    assert processor_quota() == 0.5


def test_the_path_of_the_host_may_not_exist_inside(cgroups: Path) -> None:
    write(cgroups / "own", "0::/kubepods/burstable/pod7\n")
    write(cgroups / "cpu.max", "400000 100000\n")
    assert processor_quota() == 4


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_cgroups_of_the_first_version(cgroups: Path, folder: str) -> None:
    write(cgroups / "own", "5:memory:/x\n4:cpu,cpuacct:/job\n0::/\n")
    write(cgroups / folder / "job" / "cpu.cfs_period_us", "100000\n")
    write(cgroups / folder / "job" / "cpu.cfs_quota_us", "-1\n")
    assert processor_quota() is None
    write(cgroups / folder / "job" / "cpu.cfs_quota_us", "300000\n")
    assert processor_quota() == 3


def test_without_groups_there_is_no_limit(cgroups: Path) -> None:
    assert processor_quota() is None


@pytest.mark.parametrize(("quota", "threads"), [("20000", 1), ("240000", 2), ("260000", 3), ("9900000", 8)])
def test_threads_follow_the_quota(cgroups: Path, quota: str, threads: int) -> None:
    write(cgroups / "own", "0::/\n")
    write(cgroups / "cpu.max", f"{quota} 100000\n")
    assert threads_for(8, {}) == threads
    assert threads_for(8, {"OMP_NUM_THREADS": "8"}) == 8, "the user's choice stays"


def test_without_a_quota_torch_chooses(cgroups: Path) -> None:
    assert threads_for(8, {}) == 8


def test_the_memory_that_the_tightest_group_has_left(cgroups: Path) -> None:
    write(cgroups / "own", "0::/pods/one\n")
    write(cgroups / "pods" / "one" / "memory.max", "max\n")
    write(cgroups / "pods" / "one" / "memory.current", "500\n")
    assert (memory_limit(), memory_left()) == (None, None)
    write(cgroups / "pods" / "memory.max", "1000\n")
    write(cgroups / "pods" / "memory.current", "700\n")
    assert (memory_limit(), memory_left()) == (1000, 300)
    write(cgroups / "pods" / "memory.stat", "anon 400\ninactive_file 250\nactive_file 50\n")
    assert (memory_limit(), memory_left()) == (1000, 550), "the kernel gives file pages up"
    write(cgroups / "memory.max", "2000\n")
    write(cgroups / "memory.current", "2100\n")
    assert (memory_limit(), memory_left()) == (1000, 0)


def test_memory_in_groups_of_the_first_version(cgroups: Path) -> None:
    write(cgroups / "own", "5:memory:/job\n0::/\n")
    write(cgroups / "memory" / "job" / "memory.limit_in_bytes", "4096\n")
    write(cgroups / "memory" / "job" / "memory.usage_in_bytes", "3000\n")
    write(cgroups / "memory" / "job" / "memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n")
    assert (memory_limit(), memory_left()) == (4096, 2096)
