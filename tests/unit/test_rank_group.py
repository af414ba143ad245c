"""The processes of a split model: what they say to each other, and what becomes of the group when one is gone."""

from __future__ import annotations

import json
import socket
import sys
import threading

import numpy as np
import pytest
import torch

from batchjobs.errors import UsageError
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.device_path import DevicePath
from workers.engine.offload import Direction, PageCopy
from workers.engine.parallel import group as groups
from workers.engine.parallel.group import Group, GroupBroken
from workers.engine.parallel.messages import Begin, Failed, Forward, Load, Message, receive, send
from workers.engine.parallel.ranks import devices_from
from workers.engine.streams import HostStream, Streams

STANDING = """
import socket, struct, sys
told = socket.socket(fileno=int(sys.argv[1]))
def say(text): told.sendall(struct.pack("!QQ", len(text), 0) + text.encode())
def hear():
    size = sum(struct.unpack("!QQ", told.recv(16, socket.MSG_WAITALL)))
    return told.recv(size, socket.MSG_WAITALL)
hear()
say('{"#class": "Here"}')
hear()
LAST
"""
"""A follower that joins nobody. ``LAST`` is what it does when it is told something."""

KILLED = "import os; os.kill(os.getpid(), 9)"
CPU = torch.device("cpu")
ORDER = Load("m", None, {})


def stand_in(patch: pytest.MonkeyPatch, last: str) -> Group:
    patch.setattr(groups, "_FOLLOWER", [sys.executable, "-S", "-c", STANDING.replace("LAST", last)])
    patch.setattr(groups, "join", lambda *_: None)
    return Group(2, CPU)


def failing_step(group: Group) -> None:
    """All that this process sees of a follower's end is that an exchange with it fails."""
    with group.watched():
        group.tell(ORDER)
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("code", "how"),
    [("raise SystemExit(3)", "ended with exit code 3"), (KILLED, r"was killed by signal 9 \(SIGKILL\)")],
)
def test_a_follower_that_cannot_begin_breaks_the_group(code: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_FOLLOWER", [sys.executable, "-S", "-c", code])
    with pytest.raises(GroupBroken, match=rf"rank 1 on cpu \(process \d+\) {how}"):
        Group(2, CPU)


def test_whoever_computes_when_a_follower_is_gone_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    group = stand_in(monkeypatch, KILLED)
    try:
        with pytest.raises(GroupBroken, match="was killed by signal 9"):
            failing_step(group)
        for ask in (group.check, lambda: group.tell(ORDER)):
            with pytest.raises(GroupBroken, match="was killed by signal 9"):
                ask()
    finally:
        group.close()


@pytest.mark.parametrize(("is_refusal", "error"), [(True, UsageError), (False, GroupBroken)])
def test_what_a_follower_says_last_is_told(
    is_refusal: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"#class": "Failed", "reason": "no memory on cuda:1", "is_refusal": is_refusal})
    group = stand_in(monkeypatch, f"say({text!r})")
    try:
        with pytest.raises(error, match=r"^no memory on cuda:1$"):
            failing_step(group)
    finally:
        group.close()


def test_a_failure_that_is_nobody_elses_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_OWN_SECONDS", 0.01)
    group = stand_in(monkeypatch, "hear()")
    try:
        with pytest.raises(UsageError, match="mine"), group.watched():
            raise UsageError("mine")
    finally:
        group.close()


def test_a_group_that_breaks_unnoticed_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = threading.Event(), []
    monkeypatch.setattr(groups, "EXIT_SECONDS", 0.01)
    monkeypatch.setattr(groups, "_end_process", lambda reason, _: (said.append(reason), ended.set()))
    group = stand_in(monkeypatch, KILLED)
    try:
        group.tell(ORDER)
        assert ended.wait(30)
        assert "was killed by signal 9" in said[0]
    finally:
        group.close()


def test_a_group_that_is_closed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = stand_in(monkeypatch, "hear()")
    (follower,), folder = group._followers, group._folder
    assert follower.process.poll() is None
    for _ in range(2):
        group.close()
    assert follower.process.poll() is not None
    assert not folder.exists()
    group.check()


def test_devices_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_from(CPU, 3) == [CPU] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    names = [str(device) for device in devices_from(torch.device("cuda", 1), 3)]
    assert names == ["cuda:1", "cuda:2", "cuda:3"]
    assert [str(device) for device in devices_from(torch.device("cuda"), 2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="tensor_parallel_size is 3, but from cuda:2 on there are 2 devices"):
        devices_from(torch.device("cuda", 2), 3)
    with pytest.raises(UsageError, match="not over mps"):
        devices_from(torch.device("mps"), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="only where no GPU is visible"):
        devices_from(CPU, 2)


def test_a_threads_work_goes_to_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    streams = Streams(HostStream(), HostStream())
    for device in (torch.device("cuda", 3), CPU):
        DevicePath(device, streams, works_beside=False).make_current()
    assert chosen == [torch.device("cuda", 3)]


def test_messages_come_as_they_were_sent() -> None:
    rows = PackedRows(np.array([0, 2], np.int32), np.array([3], np.int32), np.array([[1, 2]], np.int32), 4)
    none = np.zeros(0, np.int64)
    batch = PackedBatch(
        np.array([5, 6]), np.array([3, 4]), none, none, np.array([1]), np.array([0]), none, none, [rows]
    )
    sent: list[Message] = [
        Begin(1, 2, "cuda:1", "/a folder/store"),
        Load("a/model", None, {"device": "cpu", "num_blocks": None, "max_memory_percent": 0.25}),
        Forward(batch, [PageCopy(Direction.IN, [3, 1], [1, 2]), PageCopy(Direction.OUT, [2], [4])]),
        Failed("no such folder: ü", is_refusal=True),
    ]
    here, there = socket.socketpair()
    with here, there:
        for message in sent:
            send(here, message)
        here.shutdown(socket.SHUT_WR)
        came = [receive(there) for _ in sent]
        assert receive(there) is None
    assert came[0], came[1] == sent[:2]
    assert came[3] == sent[3]
    forward = came[2]
    assert isinstance(forward, Forward)
    assert forward.copies == sent[2].copies  # type: ignore[union-attr]
    for name in ("input_ids", "positions", "fed_rows", "sampled_rows"):
        array = getattr(forward.batch, name)
        assert (array.dtype, array.tolist()) == (np.int64, getattr(batch, name).tolist())
        assert array.flags.writeable
    (own,) = forward.batch.rows
    assert (own.starts.tolist(), own.cached.tolist(), own.tables.tolist(), own.page_size) == ([0, 2], [3], [[1, 2]], 4)
    assert own.tables.dtype == np.int32
