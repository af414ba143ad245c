"""A full backlog holds up claiming at once, and is said only when it lasts."""

from __future__ import annotations

import pytest

from workers.backlog import PATIENCE_SECONDS, Backlog

MOST = 8


def test_it_is_full_at_once_and_said_once_when_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="batchjobs.worker")
    clock, waiting = 0.0, MOST
    backlog = Backlog(lambda: waiting, MOST, lambda: clock)
    assert not backlog.look()
    waiting += 1
    assert backlog.look()
    clock += PATIENCE_SECONDS - 0.1
    assert backlog.look()
    assert caplog.messages == []
    for _ in range(3):
        clock += 0.1
        assert backlog.look()
    assert [message.split(":")[0] for message in caplog.messages] == [f"{MOST} outcomes wait for the database"]
    waiting -= 1
    assert not backlog.look()
    assert not backlog.look()
    assert caplog.messages[1:] == ["the database takes outcomes again: claiming goes on"]


def test_a_moment_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="batchjobs.worker")
    clock, waiting = 0.0, MOST + 1
    backlog = Backlog(lambda: waiting, MOST, lambda: clock)
    for waiting in (MOST + 1, 0) * 3:
        clock += PATIENCE_SECONDS - 0.1
        assert backlog.look() is (waiting > 0)
    assert caplog.messages == []
