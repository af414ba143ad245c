# ruff: noqa: PT012 - what is interrupted is a block
"""Ctrl-C and SIGTERM in the middle of a transaction come at its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from batchjobs.database import Database
from batchjobs.inputs import ObjectInput
from batchjobs.interrupts import TERMINATED, terminated, uninterrupted
from batchjobs.store import Store
from batchjobs.submission import Plan, submit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    store.prepare()
    yield store
    store.close()


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            interrupt()
        done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_so_does_a_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        with pytest.raises(SystemExit) as ended, uninterrupted():
            interrupt(signal.SIGTERM)
            late = True
        assert (ended.value.code, late) == (TERMINATED, True)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_interrupt_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        interrupt()
        pytest.fail("it went on")
    with uninterrupted():
        pass  # nothing is left over


def test_a_handler_that_raises_nothing_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            interrupt()
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_transaction_is_finished_first(sqlite: Store) -> None:
    database = Database(sqlite.url_without_password)
    with pytest.raises(KeyboardInterrupt), database.writing() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = version_num"))
        interrupt()
        connection.execute(
            sa.text("INSERT INTO worker_pauses VALUES ('w', '2026-01-01T00:00:00.000000Z', 'a', NULL, 0)")
        )
    assert list(sqlite.select("SELECT worker FROM worker_pauses")[1]) == [("w",)]
    database.close()


def test_who_waits_for_a_lock_is_interrupted(sqlite: Store) -> None:
    database, other = Database(sqlite.url_without_password), Database(sqlite.url_without_password)
    begun = time.monotonic()
    with other.writing() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = version_num"))
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt), database.writing():
            pytest.fail("two transactions write at a time")
    assert time.monotonic() - begun < 30  # far less than it would wait for the lock
    database.close()
    other.close()


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_submission_that_is_interrupted_in_a_transaction_is_taken_back_at_once(sqlite: Store, at: int) -> None:
    """In the one that makes the batch, and in later ones."""
    begun, seen = time.monotonic(), []

    def statement(connection: sa.Connection, *_: object) -> None:
        seen.append(connection)
        if len(seen) == at:
            interrupt()

    sa.event.listen(sa.Engine, "after_cursor_execute", statement)
    try:
        with pytest.raises(KeyboardInterrupt):
            submit(
                sqlite,
                lambda: pytest.fail("it was queued"),
                [ObjectInput({"prompt": "a"} for _ in range(5000))],
                Plan(),
            )
    finally:
        sa.event.remove(sa.Engine, "after_cursor_execute", statement)
    assert len(seen) >= at
    assert sqlite.batches() == []
    assert time.monotonic() - begun < 20  # a lock that was kept would hold it up for a minute
