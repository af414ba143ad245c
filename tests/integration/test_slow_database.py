"""A database that takes its time holds up the recorder, and nobody else until the buffer is full."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.support.batches import submit
from tests.support.running import completions, enqueue, is_complete, queue, settings, sqlite, start
from tests.support.stub_engine import expected_text
from tests.support.waiting import eventually
from workers import intake

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from batchjobs.queue import JobQueue
    from batchjobs.store import Store
    from tests.support.workers import ThreadWorker

__all__ = ["queue", "settings", "start"]

BACKLOG = 40
REQUESTS = 200
HELD = 8 + 16 + 4
"""At most: what runs, what waits, and the rest of the shard that was claimed last."""


@sqlite
def test_while_a_write_takes_for_ever_steps_go_on_until_the_buffer_is_full(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BACKLOG", BACKLOG)
    record, is_written, writes = store.record, threading.Event(), []

    def record_slowly(records: Any) -> Any:
        writes.append(len(records))
        assert is_written.wait(30)
        return record(records)

    monkeypatch.setattr(store, "record", record_slowly)
    batch_id = submit(store, REQUESTS)
    enqueue(store, queue)
    worker = start()
    recorder = worker.daemon._recorder

    def is_held_up() -> bool:
        return worker.daemon._intake._backlog.is_full and not worker.daemon._holdings.unfinished

    eventually(is_held_up, "it goes on while the first write lasts")
    eventually(lambda: writes, "what came first is on its way to the database")
    assert BACKLOG < recorder.backlog <= BACKLOG + HELD, "and what waits for it is bounded"
    assert store.batch(batch_id).counts.done == 0
    assert len(writes) == 1
    made = worker.loop.stats().generated_tokens
    assert made == 8 * recorder.backlog, "each of them was finished"

    is_written.set()
    eventually(lambda: is_complete(store, batch_id), "what was held up is stored, and the rest is made", 30)
    texts = [completion.text for completion in completions(store, batch_id)]
    assert texts == [expected_text(f"prompt {index}", 8) for index in range(REQUESTS)]
