"""Which workers a fleet has, how it keeps them alive, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchjobs.errors import UsageError
from batchjobs.settings import Settings
from workers import fleet
from workers.fleet import Fleet, Member, members_of, visible_devices

CODE = "CODE"
WAITS = "trap 'echo told >>told-NAME; exit 0' TERM INT; echo up >>up-NAME; while :; do sleep 0.05; done"
STUBBORN = "trap 'echo told >>told-NAME' TERM; echo up >>up-NAME; while :; do sleep 0.05; done"
ENDS = "echo up >>up-NAME; exit CODE"
DIES_ONCE = "echo up >>up-NAME; [ $(wc -l <up-NAME) -ge 2 ] && exit 0; kill -9 $$"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fleet, "FIRST_REST_SECONDS", 0.1)
    monkeypatch.setattr(fleet, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "_TICK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)


def fleet_of(scripts: dict[str, str], **options: Any) -> Fleet:
    """Of shell scripts by name; each notes its starts in ``up-NAME``, and that it was told to end in ``told-NAME``."""
    members = [Member(name, "cpu", ["sh", "-c", script.replace("NAME", name)]) for name, script in scripts.items()]
    return Fleet(members, dict(os.environ), draw=lambda low, high: 1.0, **options)


def noted(what: str, name: str) -> int:
    """How often."""
    file = Path(f"{what}-{name}")
    return len(file.read_text().splitlines()) if file.exists() else 0


def when_up(names: Sequence[str], act: Callable[[], object]) -> Callable[[], bool]:
    """Does something once, when all of these have started."""
    done: list[object] = []

    def until() -> bool:
        if not done and all(noted("up", name) for name in names):
            done.append(act())
        return False

    return until


def test_workers_that_end_in_good_order_are_not_started_again() -> None:
    assert fleet_of({"a": ENDS.replace(CODE, "0"), "b": ENDS.replace(CODE, "0")}).run() == 0
    assert (noted("up", "a"), noted("up", "b")) == (1, 1)


def test_one_that_was_killed_is_started_again_after_a_rest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert fleet_of({"a": DIES_ONCE, "b": ENDS.replace(CODE, "0")}).run() == 0
    assert (noted("up", "a"), noted("up", "b")) == (2, 1)
    assert "worker a was killed by signal 9 (SIGKILL); it is started again in 0.1 s" in caplog.text
    assert caplog.text.count("worker a on cpu is process") == 2


def test_one_that_dies_again_and_again_ends_the_fleet(caplog: pytest.LogCaptureFixture) -> None:
    assert fleet_of({"a": ENDS.replace(CODE, "7"), "b": WAITS}).run() == 7
    assert noted("up", "a") == fleet.MAX_SOON == 3
    assert noted("told", "b") == 1
    assert (
        "worker a on cpu died 3 times in a row within 300 s of its start; the last time it ended with exit code 7"
        in (caplog.text)
    )
    assert "in 0.1 s" in caplog.text
    assert "in 0.2 s" in caplog.text


def test_one_that_lives_long_in_between_is_started_as_often_as_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SOON_SECONDS", 0.0)
    monkeypatch.setattr(fleet, "FIRST_REST_SECONDS", 0.0)
    script = "echo up >>up-NAME; [ $(wc -l <up-NAME) -ge 6 ] && exit 0; exit 1"
    assert fleet_of({"a": script}).run() == 0
    assert noted("up", "a") == 6


def test_one_that_cannot_begin_ends_the_fleet_at_once(caplog: pytest.LogCaptureFixture) -> None:
    assert fleet_of({"a": ENDS.replace(CODE, str(UsageError.exit_code)), "b": WAITS}).run() == UsageError.exit_code
    assert (noted("up", "a"), noted("told", "b")) == (1, noted("up", "b"))
    assert "worker a cannot begin, see its message (exit code 2). The fleet ends, and 1 other worker with it" in (
        caplog.text
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_each_worker_in_good_order(number: signal.Signals) -> None:
    until = when_up(["a", "b"], lambda: os.kill(os.getpid(), number))
    assert fleet_of({"a": WAITS, "b": WAITS}, until=until).run() == 0
    assert (noted("told", "a"), noted("told", "b")) == (1, 1)


def test_a_second_signal_ends_them_at_once_whatever_they_do() -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    assert fleet_of({"a": STUBBORN}, until=when_up(["a"], twice)).run() == 128 + signal.SIGTERM
    assert noted("up", "a") == 1


def test_a_fleet_whose_parent_is_gone_ends_in_good_order() -> None:
    assert fleet_of({"a": WAITS}, until=lambda: noted("up", "a") > 0).run() == 0
    assert noted("told", "a") == 1


# Which workers


def settings(**values: object) -> Settings:
    return Settings(**values)  # type: ignore[arg-type]


def options_of(member: Member) -> list[str]:
    """Behind ``--parent PID``."""
    command = list(member.command)
    return command[command.index("--parent") + 2 :]


def test_each_device_has_a_worker_with_its_name_and_port() -> None:
    devices = [f"cuda:{index}" for index in range(3)]
    members = members_of(settings(metrics_port=9000), devices, burst=True, name="node")
    assert [(member.name, member.device) for member in members] == [(f"node-{i}", f"cuda:{i}") for i in range(3)]
    assert [options_of(member) for member in members] == [
        ["--name", f"node-{i}", "--device", f"cuda:{i}", "--metrics-port", str(9000 + i), "--burst"] for i in range(3)
    ]


def test_any_free_port_is_one_for_each_worker_and_none_is_none() -> None:
    free = members_of(settings(metrics_port=0), ["cuda:0", "cuda:1"], burst=False, name="n")
    assert all(options_of(member)[-2:] == ["--metrics-port", "0"] for member in free)
    none = members_of(settings(), ["cuda:0", "cuda:1"], burst=False, name="n")
    assert not any("--metrics-port" in member.command for member in none)


def test_a_model_over_several_devices_takes_a_group_for_each_worker(caplog: pytest.LogCaptureFixture) -> None:
    devices = [f"cuda:{index}" for index in range(5)]
    members = members_of(settings(tensor_parallel_size=2), devices, burst=False, name="n")
    assert [(member.name, member.device) for member in members] == [("n-0", "cuda:0"), ("n-1", "cuda:2")]
    assert "1 device of 5 left over: each worker takes 2" in caplog.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4, but there are 2 devices here"),
        ({"metrics_port": 65535}, "metrics_port 65535 leaves too few ports for 2 workers"),
    ],
)
def test_too_few_of_something_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        members_of(settings(**values), ["cuda:0", "cuda:1"], burst=False, name=None)


def test_devices_are_counted_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_COUNT", "print(2)")
    assert visible_devices() == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(fleet, "_COUNT", "print(0)")
    with pytest.raises(UsageError, match="torch sees no CUDA device here"):
        visible_devices()
    monkeypatch.setattr(fleet, "_COUNT", "import a_module_that_is_not_here")
    with pytest.raises(UsageError, match="torch does not load: ModuleNotFoundError: No module named"):
        visible_devices()
