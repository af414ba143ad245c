"""Every SQL statement of batchjobs, behind one class.

| module | what |
| --- | --- |
| batches | how a batch comes in: create, add requests, open, discard |
| progress | how far batches are |
| counting | how much there is to do, over all batches |
| leases | who may work on a shard: claim, renew, release |
| outcomes | record: completions, exactly once |
| checkpoints | how far unfinished requests are |
| cancelling | what nobody holds is cancelled at once |
| pauses | batches and workers that shall stand still |
| commands | orders to single workers, and what came of them |
| orders | all that a worker has to hear, in one reading |
| pins | requests that only one version of a model may answer |
| splitting | a shard is replaced by one for each of its requests |
| isolation | requests that kill their workers are parted from the others |
| retrying | failed requests run again |
| reading | results as a stream, single requests, free queries |
| extract | one batch in a SQLite file of its own |
| workers | workers, their clocks and model versions |
"""

from __future__ import annotations

from batchjobs import schema
from batchjobs.database import Database
from batchjobs.store.batches import BatchPart
from batchjobs.store.cancelling import CancelPart
from batchjobs.store.checkpoints import CheckpointPart
from batchjobs.store.commands import CommandPart
from batchjobs.store.counting import CountingPart
from batchjobs.store.errors import DuplicateCustomId
from batchjobs.store.isolation import IsolationPart
from batchjobs.store.leases import LeasePart
from batchjobs.store.orders import OrderPart
from batchjobs.store.outcomes import OutcomePart
from batchjobs.store.pauses import PausePart
from batchjobs.store.progress import ProgressPart
from batchjobs.store.reading import ReadingPart
from batchjobs.store.records import (
    Isolated,
    ModelVersion,
    Orders,
    Recorded,
    Retried,
    StoredResult,
    WorkerFigures,
    WorkerInfo,
    WorkerRow,
)
from batchjobs.store.retrying import RetryPart
from batchjobs.store.workers import WorkerPart

__all__ = [
    "DuplicateCustomId",
    "Isolated",
    "ModelVersion",
    "Orders",
    "Recorded",
    "Retried",
    "Store",
    "StoredResult",
    "WorkerFigures",
    "WorkerInfo",
    "WorkerRow",
]


class Store(
    BatchPart,
    ProgressPart,
    CountingPart,
    LeasePart,
    OutcomePart,
    CheckpointPart,
    CancelPart,
    PausePart,
    CommandPart,
    OrderPart,
    IsolationPart,
    RetryPart,
    ReadingPart,
    WorkerPart,
):
    """The store of batches, requests and outcomes, on SQLite or PostgreSQL. Thread-safe.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user:password@host:port/name``. Opened at the first use.

    Raises:
        UsageError: The address is of no use.
        ConnectionFailed: From any method: the database cannot be reached, or went away; the call may be made again.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    @property
    def url_without_password(self) -> str:
        return self._database.url_without_password

    def prepare(self) -> None:
        """Makes the tables where there are none, upgrades a SQLite file, and refuses a database of another version."""
        schema.prepare(self._database)

    def close(self) -> None:
        self._database.close()

    def __repr__(self) -> str:
        return f"Store({self.url_without_password!r})"
