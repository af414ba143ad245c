"""One shard that this worker holds, the engine's names for its requests, and how the log says what it is about."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchjobs.types import Lease, ShardId


@dataclass(slots=True)
class Held:
    lease: Lease
    unfinished: dict[int, int] | None = None  # index -> choices; None until its requests have been read
    size: int = 0  # requests
    cancelled: set[int] = field(default_factory=set)
    held_back: set[int] = field(default_factory=set)  # requests to be given back: they get no more tokens
    is_leaving: bool = False  # all of it is held back, what has not been read yet too
    is_cancelled: bool = False
    is_stopped: bool = False

    def names(self, indexes: Iterable[int] | None = None) -> list[Hashable]:
        """The engine's, of these requests or of all unfinished ones."""
        return [request_id(self.lease, index) for index in (self.unfinished or () if indexes is None else indexes)]


def request_id(lease: Lease, index: int) -> Hashable:
    """The engine's name for a request. The fence makes a second claim of the same shard a different one."""
    return (lease.shard.batch_id, lease.shard.shard_no, lease.fence, index)


def ids(shard: ShardId, index: int | None = None) -> dict[str, str | int]:
    """What a line of the log is about, for logs that keep it in fields of its own."""
    fields: dict[str, str | int] = {"batch": shard.batch_id, "shard": shard.shard_no}
    return fields if index is None else fields | {"request": index}
