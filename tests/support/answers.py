"""Answers whose tokens are the characters of a known text, recorded as a worker would."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from batchjobs.types import ShardId
from tests.support import batches
from tests.support.batches import STARTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchjobs.store import Store
    from batchjobs.types import Completion, Request


def answer(request: Request, text: str = "Hello", **changes: Any) -> Completion:
    """A completed request; each character of ``text`` is a token, 0.25 s after the one before."""
    made = replace(
        batches.answer(request.index),
        text=text,
        tokens=tuple(text),
        token_ids=tuple(map(ord, text)),
        logprobs=tuple(-0.5 * position for position in range(len(text))),
        token_times=tuple(0.25 * (position + 1) for position in range(len(text))),
        finished_at=STARTED + timedelta(seconds=0.25 * len(text)),
    )
    return replace(made, **changes)


def failure(request: Request, code: str = "context_length_exceeded", message: str = "too long") -> Completion:
    return batches.failure(request.index, code, message)


def answer_all(store: Store, batch_id: str, make: Callable[[Request], Completion] = answer) -> None:
    """Claims every shard of an open batch and records an outcome for each request in it."""
    shards = [ShardId(batch_id, number) for number in range(store.open_batch(batch_id))]
    for lease in store.claim(shards, "w1", batches.FOREVER):
        store.record([(lease, make(request)) for request in store.pending_requests(lease)])
