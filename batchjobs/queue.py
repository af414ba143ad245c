"""The producers' side of the queue: shards go in as RQ jobs, ids only. SQL knows the rest, and remains the truth.

One RQ job per shard, its id ``str(ShardId)``, in one of three RQ queues. An id waits at most once. Everything here may
be lost or repeated without harm: a worker runs what SQL lets it claim, and :func:`batchjobs.reconcile.reconcile` puts
back what SQL says is unfinished.
"""

from __future__ import annotations

import contextlib
import uuid
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from redis.exceptions import RedisError
from rq import Queue
from rq import Retry as JobRetry
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import as_text
from rq.worker import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS, clean_worker_registry

from batchjobs.errors import BatchjobsError
from batchjobs.redis_client import check_server, connect, redis_errors
from batchjobs.text import hide_password
from batchjobs.types import Priority, ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rq.queue import EnqueueData

    from batchjobs.embedded import EmbeddedRedis

QUEUE_NAMES = {priority: f"batchjobs-{priority}" for priority in Priority}
WAKE_CHANNEL = "batchjobs:wake"
"""A message here tells waiting workers to look at once. It may be lost: they look every second or so anyway."""

NOTE_FIELD = "batchjobs_note"
"""In a worker's hash: what it waits for, empty when it works."""

RQ_GRACE_SECONDS = 60
"""What RQ itself adds to the time after which it gives a silent worker up."""

JOB_FUNCTION = "batchjobs.queue.run_shard"
ENQUEUE_CHUNK = 500
RESULT_TTL_SECONDS = 300
"""For how long a finished shard stays visible in RQ's registries."""

ABANDONED_RETRIES = 10
"""How often RQ's clean-up may requeue a shard whose worker fell silent. SQL decides whether it really runs again."""

STRANDED_SECONDS = 10
"""A shard that was popped this long ago, and that SQL still gives away, was popped by a worker that died."""

_SEEN_TTL_SECONDS = 3600
_RECONCILE_LOCK = "batchjobs:reconcile"
_RECONCILE_LOCK_MS = 10_000
"""Whoever dies with the lock must not keep the others from it for long; two at once do no harm."""

_PAGE = 10_000

# What is left of an id's earlier life goes before it is queued again: its entry in the lists, a hash that may be about
# to expire, executions of a dead worker. It runs in the MULTI that queues the id, so an id never waits twice.
# KEYS: queue, intermediate list, started, failed and finished registry. ARGV: three key prefixes, then the ids.
_FORGET = """
for i = 4, #ARGV do
  local id = ARGV[i]
  redis.call('LREM', KEYS[2], 0, id)
  redis.call('DEL', KEYS[2] .. ':first_seen:' .. id)
  if redis.call('DEL', ARGV[1] .. id) == 1 then
    redis.call('LREM', KEYS[1], 0, id)
    redis.call('ZREM', KEYS[4], id)
    redis.call('ZREM', KEYS[5], id)
    for _, execution in ipairs(redis.call('ZRANGE', ARGV[2] .. id, 0, -1)) do
      redis.call('ZREM', KEYS[3], id .. ':' .. execution)
      redis.call('DEL', ARGV[3] .. id .. ':' .. execution)
    end
    redis.call('DEL', ARGV[2] .. id)
  end
end
"""

# Takes the jobs of one batch out of a list, in one pass and at once. KEYS: queue. ARGV: ids' prefix, job keys' prefix.
_DROP = """
local dropped = 0
local kept = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if string.sub(id, 1, #ARGV[1]) == ARGV[1] then
    redis.call('DEL', ARGV[2] .. id)
    dropped = dropped + 1
  else
    kept[#kept + 1] = id
  end
end
if dropped > 0 then
  redis.call('DEL', KEYS[1])
  for _, id in ipairs(kept) do redis.call('RPUSH', KEYS[1], id) end
end
return dropped
"""

_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def run_shard(batch_id: str, shard_no: int) -> NoReturn:
    """What the RQ jobs point at. It refuses: only `batchjobs worker` can run a shard."""
    raise BatchjobsError(
        f"shard {shard_no} of batch {batch_id} was taken by a plain `rq worker`, which cannot run it. "
        "Stop that worker, and start `batchjobs worker` instead; the shard is put back by itself"
    )


def job_data(shard: ShardId, at_front: bool = False) -> EnqueueData:
    """The RQ job of a shard: no text, no time limit (waiting in an engine is not hanging), a short life when done."""
    return Queue.prepare_data(
        JOB_FUNCTION,
        args=(shard.batch_id, shard.shard_no),
        job_id=str(shard),
        timeout=-1,
        result_ttl=RESULT_TTL_SECONDS,
        description=f"shard {shard}",
        retry=JobRetry(max=ABANDONED_RETRIES),
        at_front=at_front,
    )


class JobQueue:
    """The three queues of one Redis. Safe to share between threads.

    Args:
        url: As redis-py takes it.
        embedded: The server behind ``url`` when it is our own: started again when it died, left at :meth:`close`.

    Raises:
        ConnectionFailed: Redis cannot be reached.
        UsageError: It is too old, or set to evict keys, which would lose shards.
    """

    def __init__(self, url: str, *, embedded: EmbeddedRedis | None = None) -> None:
        self.url = url
        self._embedded = embedded
        self.connection = connect(url)
        self.queues = {
            priority: Queue(name, connection=self.connection, serializer=JSONSerializer)
            for priority, name in QUEUE_NAMES.items()
        }
        with self._errors():
            check_server(self.connection, hide_password(url))

    @property
    def url_without_password(self) -> str:
        return hide_password(self.url)

    def revive(self) -> None:
        """Makes sure that Redis answers; an embedded server that died is started again.

        Raises:
            ConnectionFailed: It does not.
        """
        if self._embedded is not None:
            self._embedded.ensure_running()
        with self._errors():
            self.connection.ping()

    def close(self) -> None:
        self.connection.close()
        if self._embedded is not None:
            self._embedded.close()

    # Putting in

    def enqueue(self, shards: Iterable[tuple[ShardId, Priority]], at_front: bool = False) -> int:
        """Queues shards in their order, behind the others or in front of them; those that wait already stay in place
        (with ``at_front`` they move to the front). Returns how many were put in.

        Raises:
            ConnectionFailed: Redis could not take them all. What is missing is queued later, from SQL.
        """
        if self._embedded is not None:
            self._embedded.ensure_running()
        waiting: dict[Priority, set[str]] = {}
        added = 0
        stream = iter(reversed(list(shards)) if at_front else shards)
        with self._errors():
            while chunk := list(islice(stream, ENQUEUE_CHUNK)):
                for priority in Priority:
                    ids = list(dict.fromkeys(str(shard) for shard, wanted in chunk if wanted == priority))
                    if not at_front:
                        ids = self._not_waiting(priority, ids, waiting)
                    added += self._push(priority, ids, at_front)
            if added:
                self.wake()
        return added

    def _not_waiting(self, priority: Priority, ids: list[str], waiting: dict[Priority, set[str]]) -> list[str]:
        # An id that waits has a hash. New ids, the common case, have none, and the list need not be read.
        known = self._pipelined("exists", [Job.key_for(i) for i in ids])
        if not any(known):
            return ids
        if priority not in waiting:
            waiting[priority] = self._ids_in(self.queues[priority].key)
        return [i for i, exists in zip(ids, known, strict=True) if not exists or i not in waiting[priority]]

    def _push(self, priority: Priority, ids: Sequence[str], at_front: bool) -> int:
        if not ids:
            return 0
        queue = self.queues[priority]
        registries = (queue.started_job_registry, queue.failed_job_registry, queue.finished_job_registry)
        keys = [queue.key, queue.intermediate_queue_key, *(registry.key for registry in registries)]
        prefixes = [
            Job.key_for(""),
            ExecutionRegistry.key_template.format(""),
            Execution("", "", self.connection).key.removesuffix(":"),
        ]
        with self.connection.pipeline() as pipe:
            pipe.eval(_FORGET, len(keys), *keys, *prefixes, *ids)
            queue.enqueue_many([job_data(ShardId.parse(i), at_front) for i in ids], pipeline=pipe)
            pipe.execute()
        return len(ids)

    def drop_batch(self, batch_id: str) -> int:
        """Takes the waiting shards of a cancelled batch out of the queues; returns how many it were. Those that workers
        hold are left to them.

        Raises:
            ConnectionFailed: Redis cannot be reached. Workers drop the shards when they come up.
        """
        prefix = str(ShardId(batch_id, 0)).removesuffix("0")
        with self._errors():
            return sum(
                int(self.connection.eval(_DROP, 1, queue.key, prefix, Job.key_for("")))
                for queue in self.queues.values()
            )

    def wake(self) -> None:
        """Tells idle workers to look at the queue, and all of them to look for orders, now."""
        with self._errors():
            self.connection.publish(WAKE_CHANNEL, "")

    # Looking

    def depths(self) -> dict[Priority, int]:
        """Shards that wait, by queue."""
        with self._errors():
            counts = self._pipelined("llen", [queue.key for queue in self.queues.values()])
        return dict(zip(self.queues, counts, strict=True))

    def missing(
        self, shards: Sequence[tuple[ShardId, Priority]], *, among_first: int | None = None
    ) -> list[tuple[ShardId, Priority]]:
        """Those that do not wait in their queue, or not among its first ones. One that was popped a moment ago is about
        to be claimed and counts as waiting; one that was popped and never claimed is missing."""
        with self._errors():
            present = {priority: self._ids_in(queue.key, among_first) for priority, queue in self.queues.items()}
            for priority in self.queues:
                present[priority] |= self._freshly_popped(priority)
        return [(shard, priority) for shard, priority in shards if str(shard) not in present[priority]]

    def _freshly_popped(self, priority: Priority) -> set[str]:
        intermediate = self.queues[priority].intermediate_queue
        ids = sorted(self._ids_in(intermediate.key))
        with self.connection.pipeline(transaction=False) as pipe:
            for key in (intermediate.get_first_seen_key(i) for i in ids):
                pipe.set(key, 1, nx=True, ex=_SEEN_TTL_SECONDS)
                pipe.ttl(key)  # its age by Redis's own clock: those of two reconciling hosts may differ
            lifetimes = pipe.execute()[1::2]
        youngest = _SEEN_TTL_SECONDS - STRANDED_SECONDS
        return {i for i, left in zip(ids, lifetimes, strict=True) if left > youngest}

    def _ids_in(self, key: str, first: int | None = None) -> set[str]:
        """The ids of a list, or its first ones, read in pages. Ids that move meanwhile may be overlooked; that only
        queues them once more."""
        found: set[str] = set()
        length = self.connection.llen(key)
        wanted = length if first is None else min(first, length)
        for start in range(0, wanted, _PAGE):
            last = min(start + _PAGE, wanted) - 1
            found.update(as_text(i) for i in self.connection.lrange(key, start, last))
        return found

    def worker_notes(self) -> dict[str, str]:
        """What workers say that they wait for, by name: those that said so with their last heartbeat."""
        with self._errors(), self.connection.pipeline(transaction=False) as pipe:
            keys = sorted(as_text(key) for key in self.connection.smembers(REDIS_WORKER_KEYS))
            for key in keys:
                pipe.hget(key, NOTE_FIELD)
                pipe.ttl(key)
            replies = pipe.execute()
        prefix = BaseWorker.redis_worker_namespace_prefix
        said = zip(keys, replies[::2], replies[1::2], strict=True)
        return {key.removeprefix(prefix): as_text(note) for key, note, ttl in said if note and ttl > RQ_GRACE_SECONDS}

    # Keeping in order

    @contextlib.contextmanager
    def reconciling(self) -> Iterator[bool]:
        """Whether this process may reconcile now: one at a time does. Yields False at once when another is at it."""
        token = uuid.uuid4().hex
        with self._errors():
            mine = bool(self.connection.set(_RECONCILE_LOCK, token, nx=True, px=_RECONCILE_LOCK_MS))
        try:
            yield mine
        finally:
            if mine:
                with contextlib.suppress(RedisError):  # it expires by itself
                    self.connection.eval(_UNLOCK, 1, _RECONCILE_LOCK, token)

    def tidy(self) -> None:
        """Clears away what dead workers left: registry entries that expired, the workers, and see :meth:`unstrand`."""
        with self._errors():
            for queue in self.queues.values():
                clean_registries(queue)
                clean_worker_registry(queue)
        self.unstrand()

    def unstrand(self) -> None:
        """Clears away shards that were popped and never claimed; they count as :meth:`missing`."""
        with self._errors():
            for priority, queue in self.queues.items():
                key = queue.intermediate_queue_key
                for stranded in self._ids_in(key) - self._freshly_popped(priority):
                    self.connection.lrem(key, 0, stranded)

    def _pipelined(self, command: str, keys: Sequence[str]) -> list[int]:
        with self.connection.pipeline(transaction=False) as pipe:
            for key in keys:
                getattr(pipe, command)(key)
            return [int(reply) for reply in pipe.execute()]

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return redis_errors(self.url)
