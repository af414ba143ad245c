"""The shards that this worker holds, and what follows in the engine and in RQ when that changes.

A request is *unfinished* until its outcome went to the recorder. A lease is held until its shard is done, given back or
lost; outcomes under a lease that is not held (any more) are dropped, because another worker may be making them again.
Sizes are counted in choices, as the engine counts what runs and waits there: a request with ``n`` of them is as much
work as ``n`` requests.

Shards of paused batches are *suspended*: they keep their leases and their place in the engine, and get no token. What
runs and waits is counted without them, so that other batches go on.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workers.held import Held, ids, request_id
from workers.rq_states import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from batchjobs.types import Lease, ShardId
    from workers.engine.loop import EngineLoop
    from workers.rq_worker import RqWorker

log = logging.getLogger("batchjobs.worker")


class Holdings:
    """Thread-safe. ``unread_size`` is the guess for the size of a shard whose requests have not been read yet."""

    def __init__(self, loop: EngineLoop, rq: RqWorker, *, unread_size: int) -> None:
        self._loop = loop
        self._rq = rq
        self._unread_size = unread_size
        self.on_end: Callable[[], None] = lambda: None
        """Called when a shard is held no more, for whoever tells Redis."""
        self.finished = 0
        """Requests that got their outcome here."""
        self._held: dict[ShardId, Held] = {}
        self._paused: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        # Over adding, suspending, resuming and letting go in the engine, in this order. The engine's thread never waits
        # for it.
        self._pausing = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def leases(self) -> list[Lease]:
        with self._lock:
            return [held.lease for held in self._held.values()]

    @property
    def suspended(self) -> list[Lease]:
        """Those of paused batches."""
        with self._lock:
            return [held.lease for held in self._held.values() if self._is_paused(held)]

    @property
    def active(self) -> int:
        """How many shards are held that are not suspended."""
        with self._lock:
            return sum(not self._is_paused(held) for held in self._held.values())

    @property
    def unfinished(self) -> int:
        """Choices of the requests that the engine has or will have; of those it has, some may have ended."""
        with self._lock:
            return sum(self._size(held) for held in self._held.values() if not self._is_paused(held))

    @property
    def unfinished_requests(self) -> int:
        """Requests without an outcome, suspended or not, of shards that have been read."""
        with self._lock:
            return sum(len(held.unfinished or ()) for held in self._held.values())

    @property
    def unread(self) -> int:
        """Choices, at a guess, of the requests that have not been read yet."""
        with self._lock:
            unread = [held for held in self._held.values() if held.unfinished is None and not self._is_paused(held)]
            return sum(map(self._size, unread))

    def for_other_versions(self, version: str) -> list[Lease]:
        """Those whose requests only another version of the model may answer."""
        with self._lock:
            return [held.lease for held in self._held.values() if held.lease.model_version not in (None, version)]

    def _size(self, held: Held) -> int:
        return self._unread_size if held.unfinished is None else sum(held.unfinished.values())

    # Taking and finishing

    def take(self, lease: Lease) -> None:
        """A claim succeeded. If this worker held the shard before, under a lease that ran out, that one is lost."""
        with self._lock:
            former = self._held.get(lease.shard)
        if former is not None:
            self.lose(former.lease)
        with self._lock:
            self._held[lease.shard] = Held(lease)

    def fill(self, lease: Lease, choices: Mapping[int, int]) -> None:
        """The shard's requests without an outcome have been read: by index, how many choices each asks for."""
        with self._lock:
            if held := self._find(lease):
                held.unfinished = dict(choices)
                held.size = len(held.unfinished)
                if held.is_leaving:
                    held.held_back = set(choices)

    def holds(self, shard: ShardId) -> bool:
        """Whether under this lease or another, and whether it has run out or not."""
        return shard in self._held

    def has(self, lease: Lease) -> bool:
        with self._lock:
            return self._find(lease) is not None

    def held_requests(self, request_ids: Iterable[Hashable] | None = None) -> dict[Hashable, tuple[Lease, int]]:
        """Of these requests of the engine, or of all, those that still need an outcome from here, each with its lease
        and index."""
        with self._lock:
            unfinished = {
                request_id(held.lease, index): (held.lease, index)
                for held in self._held.values()
                for index in held.unfinished or ()
            }
        return (
            unfinished
            if request_ids is None
            else {each: unfinished[each] for each in request_ids if each in unfinished}
        )

    def wants(self, lease: Lease, index: int) -> bool:
        """Whether the request is still to be run; False once it was cancelled or its lease lost."""
        with self._lock:
            held = self._find(lease)
            return held is not None and not held.is_cancelled and index not in held.cancelled

    def finish(self, lease: Lease, index: int) -> bool:
        """A request has its outcome. False: nobody wants it, the lease is lost."""
        with self._lock:
            held = self._find(lease)
            if held is None or held.unfinished is None or index not in held.unfinished:
                return False
            del held.unfinished[index]
            self.finished += 1
            return True

    def done(self, shard: ShardId) -> None:
        """SQL has every outcome of the shard."""
        with self._lock:
            held = self._held.pop(shard, None)
        if held is not None:
            self._rq.end(shard, Ending.STOPPED if held.is_stopped else Ending.SUCCESS)
            self.on_end()
            log.info("finished shard %s", shard, extra=ids(shard))

    def lose(self, lease: Lease) -> None:
        """Somebody else may hold the shard by now: its sequences end, and nothing of them is written."""
        with self._lock:
            held = self._find(lease)
            if held is None:
                return
            del self._held[lease.shard]
        for index in held.unfinished or ():
            self._loop.cancel(request_id(lease, index))
        self._rq.end(lease.shard, Ending.LOST)
        self.on_end()
        log.warning("lost the lease of shard %s (attempt %d)", lease.shard, lease.attempt, extra=ids(lease.shard))

    def lose_unless_finished(self, lease: Lease) -> None:
        """A renewal was refused. With all outcomes made, the recorder will learn whether the shard is done or lost."""
        with self._lock:
            held = self._find(lease)
            finished = held is not None and held.unfinished is not None and not held.unfinished
        if not finished:
            self.lose(lease)

    def spare(self, waiting: int) -> Lease | None:
        """Lets go of the shard taken last, if the engine, which begins with the oldest, has not begun any of it:
        ``waiting`` is the number of choices that it has not begun. The caller releases the lease."""
        with self._lock:
            held = next((held for held in reversed(self._held.values()) if not self._is_paused(held)), None)
            if held is None or not held.unfinished or len(held.unfinished) < held.size or self._size(held) > waiting:
                return None
            del self._held[held.lease.shard]
        for index in held.unfinished:
            self._loop.cancel(request_id(held.lease, index))
        return held.lease

    def give_back(self) -> list[Lease]:
        """Lets go of everything; the caller releases the leases."""
        with self._lock:
            leases = [held.lease for held in self._held.values()]
            self._held.clear()
        return leases

    def let_go(self, leases: Iterable[Lease]) -> dict[Lease, int]:
        """Lets go of those of these leases that are held, each with the number of its unfinished requests: they leave
        the engine without an outcome. Of one that was not read yet the number is 0. The caller releases them."""
        with self._pausing:  # what is added in this moment is in the engine before it is cancelled there
            with self._lock:
                found = self._found(leases)
                for held in found:
                    del self._held[held.lease.shard]
            for held in found:
                for name in held.names():
                    self._loop.cancel(name)
        return {held.lease: len(held.unfinished or ()) for held in found}

    # Pausing

    def pause(self, batch_ids: Collection[str]) -> None:
        """These batches are paused and no others, as far as they are held. Again with the same: no change."""
        with self._pausing:
            with self._lock:
                before, self._paused = self._paused, frozenset(batch_ids)
                held = list(self._held.values())
                stopping = [name for each in held if self._is_paused(each) for name in each.names()]
                resumed = [each for each in held if each.lease.shard.batch_id in before and not self._is_paused(each)]
                going = [name for each in resumed for name in each.names(set(each.unfinished or ()) - each.held_back)]
            self._tell(stopping, going)

    @contextmanager
    def adding(self, lease: Lease, index: int) -> Iterator[bool | None]:
        """Within it a request is added to the engine: whether as a suspended one, the caller is told; None: not at all,
        it is not held any more. Nobody suspends, resumes or lets go meanwhile."""
        with self._pausing:
            with self._lock:
                held = self._find(lease)
                is_suspended = None if held is None else self._is_paused(held) or index in held.held_back
            yield is_suspended

    def hold_back(self, leases: Collection[Lease], *, but: Collection[Hashable] = ()) -> None:
        """The unfinished requests of these leases get no more tokens, but those that the engine knows as ``but``.
        Without these, the requests of what has not been read yet are held back too when they are."""
        with self._pausing:
            stopping: list[Hashable] = []
            with self._lock:
                for held in self._found(leases):
                    chosen = {i for i in held.unfinished or () if request_id(held.lease, i) not in but}
                    held.held_back |= chosen
                    held.is_leaving = not but
                    stopping += held.names(chosen)
            self._tell(stopping, [])

    def let_on(self, leases: Collection[Lease]) -> None:
        """Undoes :meth:`hold_back`."""
        with self._pausing:
            going: list[Hashable] = []
            with self._lock:
                for held in self._found(leases):
                    chosen, held.held_back = held.held_back & set(held.unfinished or ()), set()
                    held.is_leaving = False
                    going += [] if self._is_paused(held) else held.names(chosen)
            self._tell([], going)

    def _tell(self, suspended: list[Hashable], resumed: list[Hashable]) -> None:
        if suspended:
            self._loop.suspend(suspended)
        if resumed:
            self._loop.resume(resumed)

    def _is_paused(self, held: Held) -> bool:
        return held.lease.shard.batch_id in self._paused

    def _found(self, leases: Iterable[Lease]) -> list[Held]:
        return [held for lease in leases if (held := self._find(lease)) is not None]

    # Cancelling

    def cancel(self, batch_ids: set[str], requests: set[tuple[str, int]]) -> None:
        """Ends what was asked to be cancelled. Called again with the same, it cancels what slipped through."""
        cancelled: list[Hashable] = []
        with self._lock:
            for held in self._held.values():
                batch_id = held.lease.shard.batch_id
                unfinished = set(held.unfinished or ())
                held.is_cancelled |= batch_id in batch_ids
                held.cancelled |= {index for batch, index in requests if batch == batch_id}
                ending = unfinished if held.is_cancelled else unfinished & held.cancelled
                cancelled += [request_id(held.lease, index) for index in ending]
        for each in cancelled:
            self._loop.cancel(each)

    def stop(self, shard: ShardId) -> None:
        """RQ's command to stop a job: its unfinished requests are cancelled."""
        with self._lock:
            held = self._held.get(shard)
            if held is None:
                return
            held.is_cancelled = held.is_stopped = True
            unfinished = set(held.unfinished or ())
        log.info("stopping shard %s by a command", shard, extra=ids(shard))
        for index in unfinished:
            self._loop.cancel(request_id(held.lease, index))

    def _find(self, lease: Lease) -> Held | None:
        held = self._held.get(lease.shard)
        return held if held is not None and (held.lease is lease or held.lease == lease) else None
