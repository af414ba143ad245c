"""Progress on stderr: a bar where it can be drawn, else a plain line now and then."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from batchjobs.cli import counting, progress
from batchjobs.cli.console import is_live
from batchjobs.types import BatchInfo, BatchStatus, Counts, Priority, TokenCounts

NOW = datetime(2026, 3, 1, tzinfo=UTC)
INFO = BatchInfo(
    id="B", name=None, key=None, model=None, queue=Priority.DEFAULT, status=BatchStatus.RUNNING, paused=False,
    counts=Counts(total=10, running=2), tokens=TokenCounts(), shard_size=64, created_at=NOW, submitted_at=NOW,
    started_at=NOW, finished_at=None,
)  # fmt: skip


class Clock:
    """Stands in for the time module of the code under test."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(counting, "time", clock)
    return clock


def at(done: int, tokens: int, status: BatchStatus = BatchStatus.RUNNING) -> BatchInfo:
    counts = Counts(total=10, running=2, completed=done, queued=8 - done)
    return replace(INFO, counts=counts, tokens=TokenCounts(completion=tokens), status=status)


def test_off_a_terminal_there_is_one_line_every_five_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = iter([0.0, 1493.25, 51.0])
    with progress.BatchProgress(live=lambda: next(speeds)) as shown:
        for second in range(11):
            shown.show(at(second // 2, second * 40))
            clock.now += 1
        shown.show(replace(at(8, 440), status=BatchStatus.COMPLETED, finished_at=NOW + timedelta(seconds=11)))
    assert capsys.readouterr().err.splitlines() == [
        "0 of 10 done, 2 running, 0 tokens",
        "2 of 10 done, 2 running, 200 tokens, 1,493.2 tokens/s, about 1 s left",
        "5 of 10 done, 2 running, 400 tokens, 51.0 tokens/s, about 8 s left",
        "8 of 10 done, 2 running, 440 tokens, 40.0 tokens/s",
    ]


def test_with_no_worker_busy_there_is_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.BatchProgress(live=lambda: None) as shown:
        shown.show(replace(at(1, 20_000_000), started_at=datetime.now(UTC) - timedelta(seconds=1_000_000)))
    assert capsys.readouterr().err == "1 of 10 done, 2 running, 20,000,000 tokens\n"


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.BatchProgress(quiet=True) as shown:
        shown.show(INFO)
    assert capsys.readouterr().err == ""


def test_failures_and_cancellations_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.BatchProgress() as shown:
        shown.show(replace(INFO, counts=Counts(total=3, failed=1, cancelled=2), status=BatchStatus.CANCELLING))
    assert capsys.readouterr().err == "3 of 3 done, 0 running, 1 failed, 2 cancelled, 0 tokens, cancelling\n"


def test_counting_is_silent_when_quick(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with counting.counting("requests stored") as count:
        for number in (1000, 2000, 3000):
            count(number)
            clock.now += 2.5
        count(4000)
    assert capsys.readouterr().err == "3,000 requests stored\n"


@pytest.mark.parametrize(
    ("term", "terminal", "live"), [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)]
)
def test_bars_need_a_terminal_that_can_draw(
    term: str, terminal: bool, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", term)
    assert is_live(stream) is live


def test_a_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.BatchProgress() as shown:
        shown.show(at(4, 80))
    drawn = stream.getvalue()
    assert "4/10" in drawn
    assert "80 tokens" in drawn
    assert "\x1b[3" not in drawn  # no colour
