"""Stores every few seconds how far unfinished answers are, so that a crash costs seconds of work and not the answer.

What was stored under a lease is what its next holder goes on from, on any worker with the same model. An answer that
has not grown since the last time is not written again, unless the model was updated meanwhile.

What is looked at under one version of the model is written under that version, whatever the engine runs by then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from batchjobs.failpoints import reach
from workers.engine.outbox import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from batchjobs.store import Store
    from batchjobs.types import Lease, Progress
    from workers.engine.loop import EngineLoop
    from workers.holdings import Holdings

log = logging.getLogger("batchjobs.worker")

MAX_TOKENS_AT_ONCE = 50_000
"""Tokens in one transaction, so that no outcome waits long behind a checkpoint."""


Found = dict["Hashable", tuple["Progress", ...]]


class Checkpointer:
    """Thread-safe: one look is written after the other."""

    def __init__(self, store: Store, loop: EngineLoop, holdings: Holdings) -> None:
        self._store = store
        self._loop = loop
        self._holdings = holdings
        # Of each unfinished request when it was stored last: the version, and how many tokens there were.
        self._stored: dict[Hashable, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def save(
        self, timeout: float | None = None, of: Collection[Lease] | None = None, *, begun_anew: bool = False
    ) -> int:
        """Stores what has grown; the number of requests stored.

        Args:
            timeout: Seconds to wait for the engine's step in progress.
            of: Only requests of these leases. None: of all that are held.
            begun_anew: All of them were. Of those without a token what was stored before goes too.

        Raises:
            ConnectionFailed: The database cannot be reached. The next call stores all of it.
        """
        with self._lock, contextlib.suppress(EngineStopped, TimeoutError):
            version, progress = self._look(timeout)
            reach("before_checkpoint")
            held = self._holdings.held_requests(None if begun_anew else progress)
            progress = {each: progress.get(each, ()) for each in (*progress, *held)}
            if of is not None:
                held = {request_id: found for request_id, found in held.items() if found[0] in of}
            now = {each: (version, _tokens(progress[each])) for each in held}
            grown = [(*held[each], progress[each]) for each in held if begun_anew or self._has_grown(each, now[each])]
            saved = sum(self._write(portion, version) for portion in _portions(grown))
            kept = {each: stored for each, stored in self._stored.items() if each in progress}
            self._stored = kept | now
            reach("after_checkpoint")
            return saved
        return 0

    def forget(self, of: Collection[Lease]) -> None:
        """Nothing is stored any more of the unfinished requests of these leases: whoever gets them begins anew.

        Raises:
            ConnectionFailed: The database cannot be reached.
        """
        with self._lock:
            held = {each: found for each, found in self._holdings.held_requests().items() if found[0] in of}
            self._write([(*found, ()) for found in held.values()], self._loop.engine.model_version)
            self._stored = {each: stored for each, stored in self._stored.items() if each not in held}

    def _look(self, timeout: float | None) -> tuple[str, Found]:
        """The progress of all requests, and the version of the model at that very time."""
        while True:
            version = self._loop.engine.model_version
            progress = self._loop.progress(timeout)
            if self._loop.engine.model_version == version:
                return version, progress

    def _has_grown(self, request_id: Hashable, now: tuple[str, int]) -> bool:
        """Since it was stored. Under another version it is written anew whatever its length."""
        version, tokens = self._stored.get(request_id, (now[0], 0))
        return version != now[0] or tokens < now[1]

    def _write(self, records: list[tuple[Lease, int, tuple[Progress, ...]]], version: str) -> int:
        lost = set(self._store.save_checkpoints(records, version))
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
