"""The client for asyncio: it blocks no loop, holds no thread while it waits, and is cancelled at once."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import (
    AsyncBatch,
    AsyncClient,
    Batch,
    BatchjobsError,
    BatchStatus,
    Client,
    InvalidInput,
    NotFound,
    WaitTimeout,
)
from batchjobs.store import Store
from batchjobs.types import ShardId
from tests.support.answers import answer, answer_all
from tests.support.batches import FOREVER
from tests.support.command_line import StandInQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from batchjobs.types import BatchInfo

PATIENCE = 20.0


class HeldQueue(StandInQueue):
    """Takes nothing in until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.let = threading.Event()
        self.let.set()

    def enqueue(self, shards: Any) -> int:
        self.reached.set()
        assert self.let.wait(PATIENCE)
        return super().enqueue(shards)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> HeldQueue:
    queue = HeldQueue()
    monkeypatch.setattr("batchjobs.client.connect_queue", queue.connect)
    return queue


@pytest.fixture
def run(tmp_path: Path, queue: HeldQueue) -> Callable[[Callable[[AsyncClient], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine with a client, in a loop of its own."""

    async def with_client(work: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async with asyncio.timeout(60), AsyncClient(home=tmp_path / "home") as client:
            return await work(client)

    return lambda work: asyncio.run(with_client(work))


async def reached(event: threading.Event) -> None:
    """Waits for a thread, while the loop goes on."""
    assert await asyncio.to_thread(event.wait, PATIENCE)


def test_several_submissions_at_once(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        files = [[{"prompt": f"{file}-{n}"} for n in range(40)] for file in range(5)]
        batches = await asyncio.gather(*(client.submit(lines, max_tokens=5) for lines in files))
        assert len({batch.id for batch in batches}) == 5
        for batch in batches:
            await asyncio.to_thread(answer_all, client.sync.store, batch.id, lambda r: answer(r, r.body["prompt"]))
        ended = await asyncio.gather(*(batch.wait(timeout=5) for batch in batches))
        assert [(info.status, info.counts.completed) for info in ended] == [(BatchStatus.COMPLETED, 40)] * 5
        for lines, batch in zip(files, batches, strict=True):
            assert [result.text async for result in batch.results()] == [line["prompt"] for line in lines]
        assert [info.id for info in await client.batches()] == sorted((b.id for b in batches), reverse=True)

    run(work)


def test_what_else_there_is_of_a_batch(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        made = await client.submit([{"prompt": "a"}, {"custom_id": "q", "prompt": "b"}])
        batch = await client.batch(made.id)
        assert (repr(batch), (await batch.info()).counts.total) == (f"AsyncBatch('{made.id}')", 2)
        assert (await batch.result(1)).custom_id == (await batch.result("q")).custom_id == "q"
        assert await batch.pause("why")
        assert (await batch.info()).paused
        assert await batch.resume()
        assert await client.query("SELECT custom_id FROM requests ORDER BY 1") == [
            {"custom_id": "q"},
            {"custom_id": "request-0"},
        ]
        assert (await batch.cancel()).cancelled == 2
        assert await batch.failures() == {}
        assert await client.workers() == []
        with pytest.raises(NotFound):
            await client.batch("nothing")
        with pytest.raises(InvalidInput, match="1 invalid line"):
            await client.submit([{"prompt": ""}])

    run(work)


# --------------------------------------------------------------------------------------------------------- waiting


def test_more_waiting_tasks_than_threads(run: Any) -> None:
    """Else they would keep the one that ends the batch from its thread."""

    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}])
        waiting = [asyncio.create_task(batch.wait(timeout=PATIENCE)) for _ in range(64)]
        await asyncio.sleep(0)
        await asyncio.to_thread(answer_all, client.sync.store, batch.id)
        assert {info.counts.completed for info in await asyncio.gather(*waiting)} == {1}

    run(work)


def test_waiting_ends_in_time_and_can_be_cancelled(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}])
        seen: list[BatchInfo] = []
        with pytest.raises(WaitTimeout, match=r"did not end within 0\.1 s: 1 request left"):
            await batch.wait(timeout=0.1, seen=seen.append)
        assert [info.id for info in seen] == [batch.id] * len(seen) != []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batch.wait(), 0.1)

    run(work)


# --------------------------------------------------------------------------------------------------------- results


def test_results_are_read_while_the_loop_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started, let, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(self: Batch) -> Iterator[str]:
        started.set()
        assert let.wait(PATIENCE), "the loop was blocked"
        yield from map(str, range(100))
        ended.set()

    monkeypatch.setattr(Batch, "results", slowly)

    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}])

        async def read() -> list[Any]:
            return [result async for result in batch.results()]

        reading = asyncio.create_task(read())
        await reached(started)
        let.set()
        assert await reading == [str(number) for number in range(100)]
        ended.clear()
        async with aclosing(batch.results()) as results:
            async for result in results:
                assert result == "0"
                break
        assert not ended.is_set(), "a page and the next one were read, no more"

    run(work)


def test_an_error_in_the_middle_comes_where_it_is(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batch) -> Iterator[int]:
        yield from range(32)
        raise NotFound("gone")

    monkeypatch.setattr(Batch, "results", broken)

    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}])
        found: list[Any] = []

        async def read() -> None:
            async for result in batch.results():
                found.append(result)

        with pytest.raises(NotFound, match="gone"):
            await read()
        assert found == list(range(32))

    run(work)


def test_results_are_followed_as_they_come(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.aio._LONGEST_PAUSE_SECONDS", 0.01)

    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": str(number)} for number in range(6)], shard_size=2)
        store = client.sync.store

        def answer_shard(number: int) -> None:
            (lease,) = store.claim([ShardId(batch.id, number)], "w1", FOREVER)
            store.record([(lease, answer(request)) for request in store.pending_requests(lease)])

        found = []
        await asyncio.to_thread(answer_shard, 2)  # a later one ends first
        await asyncio.to_thread(answer_shard, 0)
        async for result in batch.results(follow=True):
            found.append(result.index)
            if result.index == 1:
                await asyncio.to_thread(answer_shard, 1)
        assert found == [0, 1, 2, 3, 4, 5]

    run(work)


def test_a_follower_is_cancelled_at_once(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}])

        async def follow() -> list[Any]:
            return [result async for result in batch.results(follow=True)]

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(follow(), 0.1)

    run(work)


# -------------------------------------------------------------------------------------------------- giving up


class SilentSource:
    """Gives its first item, and others only when it is let: so many, or without end."""

    def __init__(self, others: float = math.inf) -> None:
        self.reached = threading.Event()
        self.let = threading.Event()
        self._others = others

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"prompt": "first"}
        self.reached.set()
        assert self.let.wait(PATIENCE)
        while self._others > 0:
            self._others -= 1
            yield {"prompt": "more"}


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left_submissions_ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "batchjobs-submission":
            await asyncio.to_thread(thread.join, PATIENCE)
            assert not thread.is_alive()


@pytest.mark.parametrize("others", [0, math.inf])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_submission_is_cancelled_while_its_source_is_silent_and_taken_back_later(
    run: Any, monkeypatch: pytest.MonkeyPatch, key: str | None, others: float
) -> None:
    source = SilentSource(others)
    monkeypatch.setattr(Store, "add_requests", lambda *_: pytest.fail("more was stored"))

    async def work(client: AsyncClient) -> None:
        submitting = asyncio.create_task(client.submit(source, key=key))
        await reached(source.reached)
        await cancelled(submitting)
        assert len(await client.batches()) == (1 if key is None else 0), "its thread is in the source"
        source.let.set()
        await left_submissions_ended()
        assert await client.batches() == []

    run(work)


def test_closing_waits_a_moment_for_submissions_that_are_taken_back(
    tmp_path: Path, queue: HeldQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, silent = SilentSource(), SilentSource()
    joined = threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        source.let.set()
        joined(thread, timeout)

    async def work() -> None:
        async with AsyncClient(home=tmp_path / "home") as client:
            submitting = asyncio.create_task(client.submit(source))
            await reached(source.reached)
            await cancelled(submitting)
            monkeypatch.setattr(threading.Thread, "join", join)
        async with AsyncClient(home=tmp_path / "home") as client:
            assert await client.batches() == []
            monkeypatch.setattr("batchjobs.aio._PARTING_SECONDS", 0.05)
            submitting = asyncio.create_task(client.submit(silent))
            await reached(silent.reached)
            await cancelled(submitting)
        assert not silent.let.is_set(), "it is not waited for without end"
        silent.let.set()
        await left_submissions_ended()
        async with AsyncClient(home=tmp_path / "home") as client:
            assert await client.batches() == [], "taken back after the client was closed"

    asyncio.run(work())


def test_one_that_is_cancelled_too_late_is_cancelled_in_the_store(run: Any, queue: HeldQueue) -> None:
    async def work(client: AsyncClient, **options: Any) -> tuple[BatchStatus, int]:
        queue.reached.clear()
        queue.let.clear()
        submitting = asyncio.create_task(client.submit([{"prompt": "a"}, {"prompt": "b"}], **options))
        await reached(queue.reached)
        await cancelled(submitting)
        queue.let.set()
        await left_submissions_ended()
        newest, *_ = await client.batches()
        return newest.status, newest.counts.cancelled

    assert run(work) == (BatchStatus.CANCELLED, 2)
    with_key = run(lambda client: work(client, key="k"))
    assert with_key == (BatchStatus.QUEUED, 0), "the same submission later finds it by its key"


def test_one_that_is_cancelled_as_it_is_made_is_cancelled_in_the_store(run: Any) -> None:
    async def work(client: AsyncClient) -> None:
        submitting = asyncio.create_task(client.submit([{"prompt": "a"}]))
        await asyncio.sleep(0)  # it has begun; the loop hears of its end only after this
        for thread in threading.enumerate():
            if thread.name == "batchjobs-submission":
                thread.join(PATIENCE)
        await cancelled(submitting)
        assert [info.status for info in await client.batches()] == [BatchStatus.CANCELLED]

    run(work)


def test_what_has_not_begun_is_cancelled_at_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are all busy keep nobody, and submissions take none of them."""
    monkeypatch.setattr("batchjobs.aio._THREADS", 1)
    begun, let, asked = threading.Event(), threading.Event(), threading.Event()

    def slowly(self: Client, batch_id: str) -> Batch:
        begun.set()
        assert let.wait(PATIENCE)
        return Batch(self, batch_id)

    monkeypatch.setattr(Client, "batch", slowly)
    monkeypatch.setattr(Client, "query", lambda *_, **__: asked.set())

    async def work(client: AsyncClient) -> None:
        source = SilentSource()
        submitting = asyncio.create_task(client.submit(source))
        await reached(source.reached)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.submit([{"prompt": "its turn does not come"}]), 0.05)
        assert len(await client.batches()) == 1
        busy = asyncio.create_task(client.batch("b"))
        await reached(begun)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.query("SELECT 1"), 0.05)
        assert not busy.done()
        let.set()
        await busy
        await cancelled(submitting)
        source.let.set()
        assert not asked.is_set()

    run(work)


def test_a_closed_client_is_not_opened_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.aio._LONGEST_PAUSE_SECONDS", 0.01)

    async def work(client: AsyncClient) -> None:
        batch = await client.submit([{"prompt": "a"}, {"prompt": "b"}], shard_size=1)
        (lease,) = client.sync.store.claim([ShardId(batch.id, 0)], "w1", FOREVER)
        client.sync.store.record([(lease, answer(request)) for request in client.sync.store.pending_requests(lease)])
        looked = asyncio.Event()
        waiting = asyncio.create_task(batch.wait(seen=lambda info: looked.set()))
        await looked.wait()
        following = batch.results(follow=True)
        assert (await anext(following)).index == 0
        await client.close()
        for use in (waiting, anext(following), batch.info(), anext(batch.results()), client.submit([{"prompt": "c"}])):
            with pytest.raises(BatchjobsError, match="this client was closed; make a new one"):
                await use
        await client.close()

    run(work)


def test_progress_of_a_submission(run: Any) -> None:
    seen: list[int] = []
    run(lambda client: client.submit(({"prompt": str(n)} for n in range(2500)), progress=seen.append))
    assert seen == [1000, 2000, 2500]


def test_it_is_a_layer_and_no_more() -> None:
    for layer, sync in ((AsyncClient, Client), (AsyncBatch, Batch)):
        own = [name for name in vars(layer) if not name.startswith("_") and name != "id"]
        assert len(own) >= 8
        assert [name for name in own if not hasattr(sync, name)] == []
        assert [name for name in own if not getattr(layer, name).__doc__] == []
