"""Orders to workers: commands that are begun and ended once, and all that a worker hears in one reading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa

from batchjobs.errors import UsageError
from batchjobs.store import Orders, Store, WorkerInfo
from batchjobs.tables import commands
from batchjobs.types import Command, CommandKind
from tests.support.batches import STARTED, claim, submit

UPDATE, DRAIN = CommandKind.UPDATE_MODEL, CommandKind.DRAIN


def register(store: Store, name: str = "w1") -> None:
    info = WorkerInfo(name=name, host="h", pid=1, device="cpu", dtype="float32", model="m", model_version="v1")
    store.register_worker(info)


class TestCommands:
    def test_from_the_order_to_the_result(self, store: Store) -> None:
        arguments = {"model": "/models/größer", "revision": None, "dry_run": False}
        [first, second] = given = store.order(UPDATE, ["w2", "w1"], arguments=arguments, by="ann@desk")
        assert [(each.worker, each.kind, each.given_by) for each in given] == [
            ("w2", UPDATE, "ann@desk"), ("w1", UPDATE, "ann@desk"),
        ]  # fmt: skip
        assert (store.open_commands("w2"), store.open_commands("w1")) == ([first], [second])
        assert (first.arguments, first.started_at, first.finished_at, first.result) == (arguments, None, None, None)

        assert store.begin_command(first.id)
        [begun] = store.open_commands("w2")
        assert begun.started_at is not None
        assert begun.started_at >= begun.created_at == first.created_at
        result = {"new_version": "v2", "seconds": 0.25}
        assert store.end_command(first.id, result=result)
        assert store.open_commands("w2") == []
        [ended] = store.commands([first.id])
        assert ended.finished_at is not None
        assert ended.finished_at >= begun.started_at
        assert (ended.result, ended.error, ended.arguments) == (result, None, arguments)

    def test_one_that_cannot_be_carried_out(self, store: Store) -> None:
        [command] = store.order(DRAIN, ["w1"], by="ann")
        store.begin_command(command.id)
        assert store.end_command(command.id, error="no room for \0 it")
        [ended] = store.commands([command.id])
        assert (ended.result, ended.error) == (None, "no room for \ufffd it")

    def test_it_is_begun_once_and_ended_once(self, store: Store) -> None:
        [command] = store.order(UPDATE, ["w1"], by="ann")
        start = Barrier(4)

        def begin(_: int) -> bool:
            start.wait()
            return store.begin_command(command.id)

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(begin, range(4))) == [False, False, False, True]
        assert store.end_command(command.id, result={"n": 1})
        [ended] = store.commands([command.id])
        assert not store.end_command(command.id, error="too late")
        assert not store.begin_command(command.id)
        assert store.commands([command.id]) == [ended]

    def test_one_that_was_ended_is_not_begun(self, store: Store) -> None:
        [command] = store.order(UPDATE, ["w1"], by="ann")
        store.end_command(command.id, error="taken back")
        assert not store.begin_command(command.id)
        assert [each.started_at for each in store.commands([command.id])] == [None]

    def test_the_oldest_come_first(self, store: Store) -> None:
        ids = [store.order(UPDATE, ["w1"], arguments={"n": n}, by="ann")[0].id for n in range(20)]
        assert [command.id for command in store.open_commands("w1")] == ids
        assert [command.id for command in store.commands([*ids[::-1], "unknown"])] == ids
        assert (store.commands([]), store.order(DRAIN, [], by="ann")) == ([], [])

    def test_an_unknown_one(self, store: Store) -> None:
        assert not store.begin_command("nope")
        assert not store.end_command("nope", error="e")

    def test_names_that_no_database_takes(self, store: Store) -> None:
        for workers, by in ((["a\0"], "ann"), (["w1"], "\ud800")):
            with pytest.raises(UsageError):
                store.order(DRAIN, workers, by=by)
        assert store.open_commands("w1") == []

    def test_orders_to_cancel_a_request_are_none_of_them(self, store: Store) -> None:
        batch_id = submit(store, 1)
        claim(store, batch_id)
        store.cancel_request(batch_id, 0)
        [[its_id]] = list(store.select("SELECT id FROM commands")[1])
        assert store.commands([its_id]) == []
        assert not store.begin_command(its_id)
        assert not store.end_command(its_id, error="e")


class TestAWorkerThatStartsAgain:
    def test_what_was_begun_has_failed_and_the_rest_is_left_to_it(self, store: Store) -> None:
        register(store)
        [begun, waiting] = [store.order(UPDATE, ["w1"], by="ann")[0] for _ in range(2)]
        [foreign] = store.order(UPDATE, ["w2"], by="ann")
        for command in (begun, foreign):
            store.begin_command(command.id)
        register(store)
        assert store.settle_commands("w1", "v7") == 1
        assert store.settle_commands("w1", "v7") == 0
        [failed] = store.commands([begun.id])
        assert failed.error == "the worker ended while it carried this out; it runs version v7 now"
        assert failed.finished_at is not None
        assert store.open_commands("w1") == [waiting]
        assert [command.id for command in store.open_commands("w2")] == [foreign.id]

    @pytest.mark.parametrize("is_begun", [True, False])
    def test_a_drain_of_before_is_fulfilled_and_one_of_later_is_not(self, store: Store, is_begun: bool) -> None:
        register(store)
        [before] = store.order(DRAIN, ["w1"], by="ann")
        if is_begun:
            store.begin_command(before.id)
        register(store)
        [later] = store.order(DRAIN, ["w1"], by="ann")
        with store._database.writing() as connection:  # the clock of SQLite has milliseconds only
            connection.exec_driver_sql(
                f"UPDATE commands SET created_at = '9999-01-01T00:00:00.000000Z' WHERE id = '{later.id}'"
            )
        assert store.settle_commands("w1", "v1") == 1
        [ended] = store.commands([before.id])
        assert (ended.finished_at is not None, ended.error) == (True, None)
        assert [command.id for command in store.open_commands("w1")] == [later.id]


class TestOrders:
    def test_nothing(self, store: Store) -> None:
        lease = claim(store, submit(store, 1))
        assert store.orders("w1", []) == store.orders("w1", [lease]) == Orders()

    def test_everything_at_once(self, store: Store) -> None:
        cancelled, paused, both, untouched, foreign = (submit(store, 8, shard_size=2) for _ in range(5))
        leases = [claim(store, batch_id) for batch_id in (cancelled, paused, both, untouched)]
        leases.append(claim(store, untouched, 3))
        for batch_id in (paused, both, foreign):
            store.pause_batch(batch_id, by="ann", reason="r", release=True)
        for batch_id in (cancelled, both):
            store.cancel_batch(batch_id)
        claim(store, untouched, 1, worker="w2")
        for index in (1, 2, 6):  # the second one of a shard that somebody else holds
            store.cancel_request(untouched, index)
        store.pause_worker(None, by="bob")
        store.order(DRAIN, ["w2"], by="ann")
        [update] = store.order(UPDATE, ["w1"], by="ann")
        store.begin_command(update.id)

        orders = store.orders("w1", leases)
        assert orders.cancelled_batches == {cancelled, both}
        assert orders.cancelled_requests == {(untouched, 1), (untouched, 6)}
        assert orders.paused_batches == {paused: store.batch(paused).pause}
        assert orders.paused_batches[paused].release
        assert orders.pause == store.worker_pause("w1") is not None
        assert list(orders.commands) == store.open_commands("w1")
        assert [(each.id, each.started_at is None) for each in orders.commands] == [(update.id, False)]
        without = store.orders("w1", [])
        assert (without.cancelled_batches, without.cancelled_requests, without.paused_batches) == (set(), set(), {})
        assert (without.pause, without.commands) == (orders.pause, orders.commands)

    def test_they_take_three_statements_where_there_is_nothing(self, store: Store) -> None:
        leases = [claim(store, submit(store, 1)) for _ in range(5)]
        seen: list[str] = []
        sa.event.listen(store._database.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
        store.orders("w1", leases)
        assert len([statement for statement in seen if statement.startswith("SELECT")]) == 3, seen
        assert isinstance(store.order(DRAIN, ["w1"], by="ann")[0], Command)

    def test_commands_of_other_batches_are_not_read(self, store: Store) -> None:
        """Where the database knows that a batch with any has many."""
        old, held = submit(store, 1), claim(store, submit(store, 1))
        with store._database.writing() as connection:
            many = sa.insert(commands).values(kind="cancel_request", batch_id=old, created_at=STARTED)
            connection.execute(many, [{"id": str(n), "index": n} for n in range(3000)])
            connection.exec_driver_sql("ANALYZE")
        seen: list[tuple[str, Any]] = []
        sa.event.listen(store._database.engine, "before_cursor_execute", lambda *given: seen.append(given[2:4]))
        store.orders("w1", [held])
        [(statement, parameters)] = [each for each in seen if "pause_reason" in each[0]]
        explain = "EXPLAIN QUERY PLAN" if store._database.is_sqlite else "EXPLAIN"
        with store._database.reading() as connection:
            plan = str(connection.exec_driver_sql(f"{explain} {statement}", parameters).all())
        assert "COVERING INDEX" in plan if store._database.is_sqlite else "uq_commands_kind_batch_id_index" in plan
        assert "Seq Scan on commands" not in plan
        assert "SCAN commands" not in plan
