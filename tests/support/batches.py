"""Batches with made-up requests and answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from batchjobs.types import (
    Completion,
    Endpoint,
    FinishReason,
    Lease,
    Priority,
    Progress,
    Request,
    RequestError,
    RequestStatus,
    ShardId,
)

if TYPE_CHECKING:
    from batchjobs.store import Recorded, Store

STARTED = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
FOREVER = 3600.0
"""Time to live of a lease that outlasts its test."""
GONE = -1.0
"""Time to live of a lease that has run out from the beginning."""


def request(index: int, **body: Any) -> Request:
    filled = body or {"prompt": f"prompt {index}", "max_tokens": 8}
    return Request(index=index, custom_id=f"request-{index}", endpoint=Endpoint.COMPLETIONS, body=filled)


def create(store: Store, *, shard_size: int = 4, **values: Any) -> str:
    """A batch that is loading."""
    given: dict[str, Any] = {
        "name": None,
        "key": None,
        "fingerprint": "f",
        "model": None,
        "queue": Priority.DEFAULT,
        "source": None,
        "defaults": {},
        **values,
    }
    return store.create_batch(shard_size=shard_size, **given)[0]


def submit(store: Store, count: int, *, shard_size: int = 4, **values: Any) -> str:
    """A batch of ``count`` requests, open."""
    batch_id = create(store, shard_size=shard_size, **values)
    store.add_requests(batch_id, [request(index) for index in range(count)])
    store.open_batch(batch_id)
    return batch_id


def claim(store: Store, batch_id: str, shard_no: int = 0, *, ttl: float = FOREVER, worker: str = "w1") -> Lease:
    [lease] = store.claim([ShardId(batch_id, shard_no)], worker, ttl)
    return lease


def answer(index: int, *, tokens: int = 3, **values: Any) -> Completion:
    """A completed request of ``tokens`` tokens and a prompt of 10; other fields as given."""
    given: dict[str, Any] = {
        "status": RequestStatus.COMPLETED,
        "finish_reason": FinishReason.STOP,
        "text": f"answer {index}",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "token_ids": tuple(range(100, 100 + tokens)),
        "tokens": tuple(f" t{n}" for n in range(tokens)),
        "logprobs": tuple(-0.5 * n for n in range(tokens)),
        "token_times": tuple(0.25 * (n + 1) for n in range(tokens)),
        "model": "tiny",
        "model_version": "v1",
        "worker": "w1",
        "attempt": 1,
        "started_at": STARTED,
        "first_token_at": STARTED + timedelta(seconds=0.25),
        "finished_at": STARTED + timedelta(seconds=0.25 * tokens),
        **values,
    }
    return Completion(index=index, **given)


def failure(index: int, code: str = "context_length_exceeded", message: str = "too long") -> Completion:
    return Completion(
        index=index,
        status=RequestStatus.FAILED,
        finish_reason=FinishReason.ERROR,
        error=RequestError(code=code, message=message),
        attempt=1,
    )


def progress(count: int = 2, *, choice: int = 0, **values: Any) -> Progress:
    """So far ``count`` tokens of what :func:`answer` has; other fields as given."""
    given: dict[str, Any] = {
        "token_ids": tuple(range(100, 100 + count)),
        "tokens": tuple(f" t{n}" for n in range(count)),
        "logprobs": tuple(-0.5 * n for n in range(count)),
        "token_times": tuple(0.25 * (n + 1) for n in range(count)),
        "started_at": STARTED,
        **values,
    }
    return Progress(choice=choice, **given)


def crash(store: Store, batch_id: str, shard_no: int = 0, *, times: int = 1, worker: str = "w1") -> Lease:
    """Workers that take the shard and die, one after the other. The lease of the last one."""
    return [claim(store, batch_id, shard_no, ttl=GONE, worker=worker) for _ in range(times)][-1]


def finish(store: Store, lease: Lease) -> Recorded:
    """Answers all that the lease has left."""
    return store.record([(lease, answer(pending.index)) for pending in store.pending_requests(lease)])


def select(store: Store, query: str) -> list[tuple[Any, ...]]:
    """All that a query gives."""
    return [tuple(row) for row in store.select(query, 100_000)[1]]
