"""Places where a test can stop a process dead, or do something else, in the middle of what must survive it.

In normal use nothing is armed, and reaching a point costs one look into an empty dict. In a process of its own a point
is armed by ``BATCHJOBS_FAILPOINTS=before_record``: there the process ends at once, as if it had been killed; with
``before_record:3`` when it comes there the third time. Within a test :func:`armed` takes any action.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

KILLED = 86
"""Exit code of a process that ended at a failpoint."""

POINTS = {
    "submit_after_chunk": "some requests of a batch are stored, not all",
    "submit_before_open": "all requests are stored, the batch is not open",
    "submit_after_open": "the batch is open, Redis does not know it",
    "submit_after_enqueue": "Redis knows the batch, the producer has said nothing yet",
    "after_pop": "shards left their queue, SQL knows nothing of it",
    "after_claim": "shards are leased in SQL, and only popped in Redis",
    "after_start": "shards are leased in SQL and started in Redis",
    "after_read": "a shard's requests are read, none is in the engine",
    "before_record": "answers are finished, SQL has none of them",
    "inside_record": "answers are written, the transaction is open",
    "after_commit_before_ack": "SQL has the answers, Redis does not know",
    "after_ack": "SQL and Redis know that the shard is done",
    "before_checkpoint": "progress was read from the engine, SQL does not have it",
    "after_checkpoint": "SQL has the progress",
    "before_release": "a shutdown has stored what was finished, the leases are held",
    "after_release": "the leases are given back in SQL, Redis still shows the shards as started",
}
"""Every point, and how things stand there."""

_armed: dict[str, Callable[[], None]] = {}


def reach(point: str) -> None:
    """The process has come to this point."""
    if _armed and (action := _armed.get(point)):
        action()


@contextmanager
def armed(actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Within it, these actions are called when their points are reached, in whatever thread that is."""
    for point in actions:
        _check(point)
    _armed.update(actions)
    try:
        yield
    finally:
        for point in actions:
            _armed.pop(point, None)


def _check(point: str) -> None:
    if point not in POINTS:
        raise UsageError(f"there is no failpoint {point!r}; there are {', '.join(POINTS)}")


def _die_at(number: int) -> Callable[[], None]:
    reached = 0

    def die() -> None:
        nonlocal reached
        reached += 1
        if reached >= number:
            os._exit(KILLED)

    return die


def _arm_from_environment() -> None:
    for entry in filter(None, os.environ.get("BATCHJOBS_FAILPOINTS", "").split(",")):
        point, _, number = entry.partition(":")
        _check(point)
        _armed[point] = _die_at(int(number or 1))


_arm_from_environment()
