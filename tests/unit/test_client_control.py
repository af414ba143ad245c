"""Orders given by the client: pauses, model updates, drains."""

from __future__ import annotations

import getpass
import socket
from typing import TYPE_CHECKING

import pytest

from batchjobs import Client, Inflight, NotFound, UsageError, WaitTimeout
from batchjobs.errors import ConnectionFailed
from tests.support.command_line import StandInQueue
from tests.support.orders import UPDATED, answer_orders, carried_out, drained, register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchjobs.store import Store
    from batchjobs.types import Command

ME = f"{getpass.getuser()}@{socket.gethostname()}"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> StandInQueue:
    queue = StandInQueue()
    monkeypatch.setattr("batchjobs.client.connect_queue", queue.connect)
    return queue


@pytest.fixture
def client(tmp_path: Path, queue: StandInQueue) -> Iterator[Client]:
    with Client(home=tmp_path / "home") as client:
        yield client


# --------------------------------------------------------------------------------------------------------- pauses


def test_a_batch_is_paused_and_goes_on(client: Client, queue: StandInQueue) -> None:
    batch = client.submit([{"prompt": "a"}])
    assert batch.pause("why")
    assert not batch.pause(release=True)
    pause = batch.info.pause
    assert pause is not None
    assert (pause.by, pause.reason, pause.release) == (ME, "why", True)
    assert client.store.claimable(5) == []
    assert batch.resume()
    assert not batch.resume()
    assert batch.info.pause is None
    assert queue.woken == 4
    batch.cancel()
    assert not batch.pause()


def test_workers_are_paused_by_name_and_all_together(client: Client, queue: StandInQueue) -> None:
    register(client.store, "w1", "w2")
    assert client.pause_workers("w1", reason="hot") == ["w1"]
    assert client.pause_workers(["w1", "w2"]) == ["w2"]
    assert client.pause_workers() == ["*"]
    assert [row.pause.reason for row in client.workers() if row.pause] == ["hot", None]
    assert client.resume_workers("w1") == ["w1"]
    assert [row.pause is not None for row in client.workers()] == [True, True]  # with all others
    assert client.resume_workers() == ["*", "w2"]
    assert [row.pause for row in client.workers()] == [None, None]
    assert queue.woken == 5


def test_only_workers_that_were_there_are_paused(client: Client, queue: StandInQueue) -> None:
    register(client.store, "w1")
    for change in (client.pause_workers, client.resume_workers):
        with pytest.raises(NotFound, match="no worker w9; `batchjobs workers` lists those of the last day"):
            change(["w1", "w9"])
        with pytest.raises(UsageError, match="no worker is named"):
            change([])
    assert client.store.worker_pauses() == {}
    client.store.retire_worker("w1", "stopped")
    assert client.pause_workers("w1") == ["w1"]  # holds when it starts again


def test_an_order_needs_no_redis(client: Client, queue: StandInQueue) -> None:
    batch = client.submit([{"prompt": "a"}])
    register(client.store, "w1")
    client._queue = None
    queue.broken = True
    assert batch.pause()
    assert client.pause_workers() == ["*"]
    (command,) = client.update_model("m", wait=False)
    assert command.worker == "w1"
    with pytest.raises(ConnectionFailed):
        _ = client.queue


# ------------------------------------------------------------------------------------------------------- commands


def test_all_living_workers_are_updated(
    client: Client, queue: StandInQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(client.store, "w2", "w1", "w3")
    client.store.retire_worker("w3", "stopped")
    given = answer_orders(monkeypatch, carried_out)
    seen: list[Command] = []
    done = client.update_model(str(tmp_path), revision="r", inflight=Inflight.KEEP, seen=seen.append)
    assert [command.worker for command in done] == ["w1", "w2"]
    assert {command.id for command in done} == {command.id for command in given} == {command.id for command in seen}
    assert done[0].result == UPDATED
    assert (done[0].given_by, done[0].error) == (ME, None)
    assert done[0].arguments == {"model": str(tmp_path), "revision": "r", "inflight": "keep", "dry_run": False}
    assert queue.woken == 1


def test_a_refusal_is_in_what_comes_back(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    register(client.store, "w1")
    answer_orders(monkeypatch, lambda store, command: store.end_command(command.id, error="another shape"))
    (command,) = client.update_model("m", workers="w1")
    assert (command.error, command.result) == ("another shape", None)


def test_an_update_for_nobody_is_refused(client: Client) -> None:
    with pytest.raises(NotFound, match="no worker lives that could be told"):
        client.update_model("m")
    register(client.store, "w1", "w2")
    client.store.retire_worker("w2", "stopped")
    with pytest.raises(NotFound, match="no living worker w2, w9; those that live: w1"):
        client.update_model("m", workers=["w1", "w2", "w9"])
    with pytest.raises(UsageError, match="inflight must be recompute, keep, finish, restart, not 'drop'"):
        client.update_model("m", inflight="drop")
    with pytest.raises(UsageError, match="no worker is named"):
        client.update_model("m", workers=[])
    assert client.store.open_commands("w1") == []


def test_waiting_for_an_order_ends_in_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    register(client.store, "w1", "w2")

    def only_the_first(store: Store, command: Command) -> None:
        if command.worker == "w1":
            carried_out(store, command)

    answer_orders(monkeypatch, only_the_first)
    with pytest.raises(WaitTimeout, match="within 0 s there was no answer from w2; the order stands"):
        client.update_model("m", timeout=0)
    assert len(client.store.open_commands("w2")) == 1


BEGUN = "while it carried this out; `batchjobs workers` shows which version it serves when it is back"


@pytest.mark.parametrize(
    ("begun", "is_dead", "error"),
    [
        (False, False, "the worker ended before it began; one of that name carries it out when it starts"),
        (True, False, f"the worker ended {BEGUN}"),
        (True, True, f"the worker died {BEGUN}"),
    ],
)
def test_a_worker_that_goes_away_is_noticed(
    client: Client, monkeypatch: pytest.MonkeyPatch, begun: bool, is_dead: bool, error: str
) -> None:
    register(client.store, "w1")

    def leave(store: Store, command: Command) -> None:
        if begun:
            store.begin_command(command.id)
        if not is_dead:
            store.retire_worker("w1", "stopped")
            return
        with store._database.writing() as connection:
            connection.exec_driver_sql("UPDATE workers SET heartbeat_at = heartbeat_at - 100")

    answer_orders(monkeypatch, leave)
    (command,) = client.update_model("m")
    assert command.error == error


def test_a_drain_ends_with_its_worker(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    register(client.store, "w1", "w2", "w3")
    given = answer_orders(monkeypatch, drained)
    done = client.drain("w1", release=True)
    assert done.result == {"finished": 3, "given_back": 1}
    assert [(command.kind, command.worker, command.arguments) for command in given] == [
        ("drain", "w1", {"release": True})
    ]
    with pytest.raises(NotFound, match="no living worker w1"):
        client.drain("w1")


def test_a_drain_whose_worker_still_lives_is_not_over(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    register(client.store, "w1")
    answer_orders(monkeypatch, lambda store, command: store.end_command(command.id, result={}))
    with pytest.raises(WaitTimeout, match="no answer from w1"):
        client.drain("w1", timeout=0)


def test_a_drain_is_over_when_its_worker_has_been_started_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client.store, "w1")

    def restart(store: Store, command: Command) -> None:
        drained(store, command)
        register(store, "w1")

    answer_orders(monkeypatch, restart)
    assert client.drain("w1", timeout=5).error is None


def test_a_worker_that_ended_without_a_word_has_drained_and_a_dead_one_has_not(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(client.store, "w1", "w2")

    def end(store: Store, command: Command) -> None:
        if command.worker == "w1":
            store.retire_worker("w1", "stopped")
        else:
            with store._database.writing() as connection:
                connection.exec_driver_sql("UPDATE workers SET heartbeat_at = heartbeat_at - 100")

    answer_orders(monkeypatch, end)
    first, second = client.drain("w1"), client.drain("w2")
    assert (first.error, first.result) == (None, None)
    assert first.finished_at is not None
    assert second.error is not None
    assert second.error.startswith("the worker died before it began")


def test_versions_are_listed(client: Client) -> None:
    for number in (1, 2):
        client.store.register_model_version(f"v{number}", f"m{number}", f"/m/{number}", "float32", {"parameters": 5})
    assert sorted(known.version for known in client.model_versions()) == ["v1", "v2"]
    assert client.model_versions()[0].details == {"parameters": 5}
