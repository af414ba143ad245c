"""The public Python names: Client, Batch, and the package's own list of them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import batchjobs
from batchjobs import BatchjobsError, Client, InvalidInput, NotFound, UsageError, WaitTimeout, following
from batchjobs.database import Database
from batchjobs.errors import ConnectionFailed
from batchjobs.types import BatchStatus, FinishReason, Priority, RequestStatus, ShardId
from tests.support.answers import answer, answer_all, failure
from tests.support.cases import case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.types import Completion, Request

ROOT = Path(__file__).parents[2]


class Queue:
    """Stands in for the queue."""

    woken = 0
    queued = 0
    dropped = ""

    def enqueue(self, shards: object) -> int:
        self.queued += len(list(shards))  # type: ignore[call-overload]
        return self.queued

    def drop_batch(self, batch_id: str) -> int:
        self.dropped = batch_id
        return 1

    def wake(self) -> None:
        self.woken += 1

    def close(self) -> None:
        pass


class Clock:
    """Stands in for ``time``: something happens instead of each pause."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.sleep = lambda seconds: happens()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr("batchjobs.client.connect_queue", lambda settings: queue)
    return queue


@pytest.fixture
def client(tmp_path: Path, queue: Queue) -> Iterator[Client]:
    with Client(home=tmp_path / "home") as client:
        yield client


def test_from_submission_to_results(client: Client, queue: Queue) -> None:
    batch = client.submit([{"prompt": "a"}, {"custom_id": "q", "prompt": "b"}], max_tokens=5, name="n", queue="high")
    assert (batch.status, batch.counts.total, batch.info.queue) == (BatchStatus.QUEUED, 2, Priority.HIGH)
    assert queue.queued == 1
    assert list(batch.results()) == []

    def half(request: Request) -> Completion:
        return answer(request, "Hi") if request.index else failure(request)

    answer_all(client.store, batch.id, half)
    assert batch.wait(timeout=0).status == BatchStatus.COMPLETED
    failed, good = batch.results()
    assert failed.error is not None
    assert (failed.status, failed.error.code, failed.text) == ("failed", "context_length_exceeded", "")
    assert (good.custom_id, good.text, good.finish_reason) == ("q", "Hi", FinishReason.STOP)
    assert good.logprobs == (0.0, -0.5)
    assert good.token_times == (0.25, 0.5)
    assert len(good.token_ids) == len(good.tokens) == good.completion_tokens == 2
    assert batch.failures() == {"context_length_exceeded": 1}


def test_every_choice_is_there(client: Client) -> None:
    batch = client.submit([{"prompt": "a"}, {"prompt": "b", "n": 1}], n=2)
    (lease,) = client.store.claim([shard for shard, _ in client.store.claimable(1)], "w1", 60)
    two, one = client.store.pending_requests(lease)
    second = replace(answer(two, "No"), choice=1)
    client.store.record([(lease, answer(two, "Yes")), (lease, second), (lease, answer(one, "Hi"))])
    first, last = batch.results()
    assert (first.n, first.text, [choice.text for choice in first.choices]) == (2, "Yes", ["Yes", "No"])
    assert first.choices[1].logprobs == (0.0, -0.5)
    assert (last.n, last.text, [choice.text for choice in last.choices]) == (1, "Hi", ["Hi"])
    assert batch.counts.completed == 2


def test_an_earlier_batch_is_found_by_its_id(client: Client) -> None:
    made = client.submit([{"prompt": "a"}])
    assert client.batch(made.id).counts.total == 1
    assert [info.id for info in client.batches()] == [made.id]
    with pytest.raises(NotFound):
        client.batch("nothing")


def test_one_request_by_its_index_or_its_custom_id(client: Client) -> None:
    batch = client.submit([{"prompt": "a"}, {"custom_id": "1", "prompt": "b"}])
    assert (batch.result(0).custom_id, batch.result(0).status) == ("request-0", "queued")
    answer_all(client.store, batch.id, lambda request: answer(request, f"to {request.custom_id}"))
    assert [batch.result(1).text, batch.result("1").text] == ["to 1", "to 1"]
    assert batch.result("1") == list(batch.results())[1]
    for wrong in (2, -1, "2"):
        with pytest.raises(NotFound, match="has no request"):
            batch.result(wrong)


def test_results_are_followed_in_input_order(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "time", Clock(lambda: answer_shard(0)))
    batch = client.submit([{"prompt": str(number)} for number in range(4)], shard_size=2)

    def answer_shard(number: int) -> None:
        for lease in client.store.claim([ShardId(batch.id, number)], "w1", 60):
            client.store.record([(lease, answer(request)) for request in client.store.pending_requests(lease)])

    answer_shard(1)
    assert [result.index for result in batch.results()] == [2, 3]
    assert [result.index for result in batch.results(follow=True)] == [0, 1, 2, 3]


def test_a_generator_of_any_length_is_a_stream(client: Client) -> None:
    """What was yielded is stored before much more is asked for."""
    stored: list[int] = []
    ahead: list[int] = []

    def lines() -> Iterator[dict[str, Any]]:
        for number in range(5000):
            ahead.append(number - (stored[-1] if stored else 0))
            yield {"prompt": f"prompt {number}"}

    batch = client.submit(lines(), progress=stored.append)
    assert batch.counts.total == stored[-1] == 5000
    assert max(ahead) <= 1000


def test_rows_of_a_query_are_dicts(client: Client) -> None:
    client.submit([{"custom_id": name, "prompt": name} for name in "abc"])
    sql = 'SELECT custom_id, "index" + 0.5 AS place FROM requests ORDER BY custom_id'
    rows = client.query(sql)
    assert next(rows) == {"custom_id": "a", "place": 0.5}
    assert [row["custom_id"] for row in rows] == ["b", "c"]
    assert list(client.query(sql, limit=1)) == [{"custom_id": "a", "place": 0.5}]
    with pytest.raises(UsageError, match="several columns one name: custom_id"):
        client.query("SELECT custom_id, custom_id FROM requests")
    with pytest.raises(UsageError, match="only reading is possible"):
        client.query("DELETE FROM requests")


def test_waiting_ends_in_time(client: Client) -> None:
    batch = client.submit([{"prompt": "a"}, {"prompt": "b"}])
    seen: list[int] = []
    with pytest.raises(WaitTimeout, match="2 requests left; it goes on"):
        batch.wait(timeout=0.1, seen=lambda info: seen.append(info.counts.queued))
    assert set(seen) == {2}


@case("A-eng-07")
def test_cancelling_keeps_what_is_finished(client: Client, queue: Queue) -> None:
    batch = client.submit([{"prompt": str(number)} for number in range(4)], shard_size=2)
    (lease,) = client.store.claim([shard for shard, _ in client.store.claimable(1)], "w1", 60)
    client.store.record([(lease, answer(request)) for request in client.store.pending_requests(lease)])
    counts = batch.cancel()
    assert (counts.completed, counts.cancelled) == (2, 2)
    assert batch.cancel() == counts
    assert queue.woken == 2
    assert queue.dropped == batch.id
    assert batch.status == BatchStatus.CANCELLED
    assert [result.status for result in batch.results()] == ["completed", "completed", "cancelled", "cancelled"]
    client.cancel_request(batch.id, 0)
    assert client.store.result(batch.id, 0).state == RequestStatus.COMPLETED


def test_what_a_dead_worker_held_is_cancelled_by_whoever_waits(client: Client) -> None:
    batch = client.submit([{"prompt": "a"}, {"prompt": "b"}])
    client.store.claim([ShardId(batch.id, 0)], "dead", 0.2)
    assert batch.cancel().cancelled == 0
    assert batch.status == BatchStatus.CANCELLING
    assert batch.wait(timeout=30).status == BatchStatus.CANCELLED
    assert batch.counts.cancelled == 2


def test_submitting_with_a_key_twice_gives_one_batch(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a"}\n')
    assert client.submit(path, key="k").id == client.submit(str(path), key="k").id


def test_errors_name_lines_and_values(client: Client) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.submit([{"prompt": "a"}, {"prompt": ""}])
    assert [error.line for error in caught.value.errors] == [2]
    with pytest.raises(UsageError, match="queue must be high, default, low, not 'urgent'"):
        client.submit([{"prompt": "a"}], queue="urgent")
    with pytest.raises(UsageError, match='unknown sampling field "max_token"'):
        client.submit([{"prompt": "a"}], max_token=5)
    with pytest.raises(UsageError, match="on_invalid must be reject or skip"):
        client.submit([{"prompt": "a"}], on_invalid="ignore")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='unknown setting "hom"; did you mean home'):
        Client(hom="x")


def test_an_unreachable_queue_is_a_warning(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: object) -> None:
        raise ConnectionFailed("the Redis at h cannot be reached")

    monkeypatch.setattr("batchjobs.client.connect_queue", refuse)
    with pytest.warns(UserWarning, match="stored, but not queued yet"):
        batch = client.submit([{"prompt": "a"}])
    assert batch.cancel().cancelled == 1


# -------------------------------------------------------------------------------------------------------- closing


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Database]:
    """Databases that are open: those that had a connection since they were last closed."""
    opened: list[Database] = []
    reading, close = Database.reading, Database.close

    def read(database: Database) -> Any:
        opened.append(database)
        return reading(database)

    def leave(database: Database) -> None:
        close(database)
        opened[:] = [other for other in opened if other is not database]

    monkeypatch.setattr(Database, "reading", read)
    monkeypatch.setattr(Database, "close", leave)
    return opened


CLOSED = "this client was closed; make a new one"


def test_a_follower_of_a_closed_client_ends(
    client: Client, connections: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[None] = []

    def close() -> None:
        assert not pauses, "it looked again"
        pauses.append(client.close())

    monkeypatch.setattr(following, "time", Clock(close))
    batch = client.submit([{"prompt": "a"}])
    with pytest.raises(BatchjobsError, match=CLOSED):
        next(batch.results(follow=True))
    assert len(pauses) == 1
    assert connections == []


def test_iterators_that_are_under_way_end_when_the_client_is_closed(
    client: Client, connections: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = client.submit([{"prompt": str(number)} for number in range(100)])
    answer_all(client.store, batch.id)
    under_way = [batch.results(), batch.results(follow=True), client.query("SELECT * FROM requests")]
    for rows in under_way:
        next(rows)
    client.close()
    for rows in under_way:
        with pytest.raises(BatchjobsError, match=CLOSED):
            next(rows)
    assert connections == []


def test_a_closed_client_stays_closed(client: Client, connections: list[Database]) -> None:
    batch = client.submit([{"prompt": "a"}])
    client.close()
    client.close()
    for use in (
        lambda: batch.wait(0),
        batch.cancel,
        client.batches,
        client.workers,
        lambda: client.submit([{"prompt": "b"}]),
    ):
        with pytest.raises(BatchjobsError, match=CLOSED):
            use()
    with pytest.raises(BatchjobsError, match=CLOSED):
        _ = client.queue
    assert connections == []


def test_a_submission_that_outlives_its_client_is_closed_again(client: Client, connections: list[Database]) -> None:
    def lines() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        client.close()
        yield {"prompt": "b"}

    with pytest.warns(UserWarning, match="stored, but not queued yet: this client was closed"):
        client.submit(lines())
    assert connections == []


# --------------------------------------------------------------------------------------------------- public names


def test_every_public_name_exists_and_is_documented() -> None:
    for name in batchjobs.__all__:
        value = getattr(batchjobs, name)
        assert name == "__version__" or value.__doc__, name
    assert sorted(batchjobs.__all__) == batchjobs.__all__ == dir(batchjobs)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = batchjobs.nothing


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert batchjobs.__version__ == project["version"]


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, batchjobs; print([m for m in sys.modules if m.startswith('batchjobs.')])"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
