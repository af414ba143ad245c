"""Stores every few seconds how far unfinished answers are, so that a crash costs seconds of work and not the answer.

What was stored under a lease is what its next holder goes on from, on any worker with the same model. An answer that
has not grown since the last time is not written again.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from batchjobs.failpoints import reach
from workers.engine.loop import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Hashable

    from batchjobs.store import Store
    from batchjobs.types import Lease, Progress
    from workers.engine.loop import EngineLoop
    from workers.holdings import Holdings

log = logging.getLogger("batchjobs.worker")

MAX_TOKENS_AT_ONCE = 50_000
"""Tokens in one transaction, so that no outcome waits long behind a checkpoint."""


class Checkpointer:
    """For one thread at a time."""

    def __init__(self, store: Store, loop: EngineLoop, holdings: Holdings) -> None:
        self._store = store
        self._loop = loop
        self._holdings = holdings
        self._stored: dict[Hashable, int] = {}  # tokens of each unfinished request when it was stored last

    def save(self, timeout: float | None = None) -> int:
        """Stores what has grown; the number of requests stored.

        Args:
            timeout: Seconds to wait for the engine's step in progress.

        Raises:
            ConnectionFailed: The database cannot be reached. The next call stores all of it.
        """
        with contextlib.suppress(EngineStopped, TimeoutError):
            progress = self._loop.progress(timeout)
            reach("before_checkpoint")
            saved = sum(map(self._write, _portions(self._grown(progress))))
            self._stored = {request_id: _tokens(choices) for request_id, choices in progress.items()}
            reach("after_checkpoint")
            return saved
        return 0

    def _grown(self, progress: dict[Hashable, tuple[Progress, ...]]) -> list[tuple[Lease, int, tuple[Progress, ...]]]:
        held = self._holdings.held_requests(progress)
        return [
            (*held[request_id], choices)
            for request_id, choices in progress.items()
            if request_id in held and _tokens(choices) > self._stored.get(request_id, 0)
        ]

    def _write(self, records: list[tuple[Lease, int, tuple[Progress, ...]]]) -> int:
        lost = set(self._store.save_checkpoints(records, self._loop.engine.model_version))
        for lease in {lease for lease, _, _ in records if lease.shard in lost}:
            self._holdings.lose_unless_finished(lease)
        return sum(lease.shard not in lost for lease, _, _ in records)


def _tokens(choices: tuple[Progress, ...]) -> int:
    return sum(len(choice.token_ids) for choice in choices)


def _portions(
    records: list[tuple[Lease, int, tuple[Progress, ...]]],
) -> list[list[tuple[Lease, int, tuple[Progress, ...]]]]:
    """The records in order, cut where so many tokens come together."""
    portions: list[list[tuple[Lease, int, tuple[Progress, ...]]]] = []
    room = 0
    for record in records:
        room -= _tokens(record[2])
        if room < 0 or not portions:
            portions.append([])
            room = MAX_TOKENS_AT_ONCE - _tokens(record[2])
        portions[-1].append(record)
    return portions
