"""The worker as RQ sees it. With ``rq_states`` the only place that knows RQ's internals, guarded by contract tests.

RQ's own workers fork for each job, or run one at a time. This one never forks, because a CUDA context does not survive
it, and holds many shards at once. What `rq info` and RQ's dashboards show stays true: a shard is queued, started or
finished, the worker idle, busy or suspended. None of it decides anything: SQL has the lease.

Who calls what: the intake thread :meth:`look`, :meth:`pop`, :meth:`start`, :meth:`adopt` and :meth:`drop`; any thread
:meth:`end`, which only notes; one thread of its own :meth:`flush` and :meth:`beat`, so that neither undoes the other;
the main thread :meth:`open`, and when the others are done, :meth:`give_back` and :meth:`close`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue as queues
import socket
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from redis.exceptions import OutOfMemoryError, RedisError
from rq import Queue
from rq.executions import ExecutionRegistry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, register

from batchjobs.errors import UsageError
from batchjobs.queue import (
    NOTE_FIELD,
    QUEUE_NAMES,
    RESULT_TTL_SECONDS,
    RQ_GRACE_SECONDS,
    WAKE_CHANNEL,
    job_data,
)
from batchjobs.redis_client import REPLY_SECONDS, connect, redis_errors
from batchjobs.types import Priority, ShardId
from workers.command_listener import CommandListener, Message, MessageKind
from workers.queue_view import QueueView, is_shard, shares
from workers.rq_states import Ending, HeldJob, leave_intermediate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

log = logging.getLogger("batchjobs.worker")

MAX_PENDING_ENDINGS = 10_000
"""Endings kept while Redis is away. Older ones are dropped: their executions expire by themselves."""

_MIN_EXECUTION_TTL_SECONDS = 10


class RqWorker(BaseWorker):
    """One worker in RQ's books. Methods that talk to Redis raise ConnectionFailed when they cannot.

    Args:
        url: Of the Redis.
        name: Unique among the living workers.
        lease_seconds: RQ takes the shards of a silent worker to be abandoned after twice this, and forgets the worker
            itself after a minute more.
    """

    def __init__(self, url: str, name: str, *, lease_seconds: float) -> None:
        self.url = url
        # Not a SimpleQueue: the main thread waits here with a timeout, and a signal's handler that runs for longer than
        # what is left of it makes that one wait for ever (CPython 3.11).
        self.messages: queues.Queue[Message] = queues.Queue()
        self._popped: dict[ShardId, tuple[Job, Queue]] = {}
        self._held: dict[ShardId, HeldJob] = {}
        self._ended: dict[HeldJob, None] = {}  # in the order in which they ended
        self.note = ""
        """What the worker waits for; told with each heartbeat, as SQL may be the very thing."""
        self.is_paused = False
        """Whether an operator has paused the worker: RQ shows it as suspended then, whatever it holds."""
        self._suspended = False
        self._lock = threading.Lock()  # over the three books; never held while talking to Redis
        self._listener: CommandListener | None = None
        connection = connect(url)
        with self._errors():
            super().__init__(
                [Queue(each, connection=connection, serializer=JSONSerializer) for each in QUEUE_NAMES.values()],
                name=name,
                connection=connection,
                worker_ttl=math.ceil(lease_seconds),
                job_monitoring_interval=math.ceil(lease_seconds),
                default_result_ttl=RESULT_TTL_SECONDS,
                serializer=JSONSerializer,
            )
        self._execution_ttl = max(_MIN_EXECUTION_TTL_SECONDS, math.ceil(2 * lease_seconds))

    @property
    def connection_timeout(self) -> int:
        """RQ lengthens the pool's timeout to this, for its blocking pop. We never block."""
        return REPLY_SECONDS

    def work(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RQ's loop, with its signal handlers. The daemon has its own."""
        raise NotImplementedError("workers.daemon.Daemon runs the loop")

    def _errors(self) -> AbstractContextManager[None]:
        return redis_errors(self.url)

    # Birth and death

    def open(self) -> None:
        """Registers the worker and listens for commands.

        Raises:
            UsageError: A living worker has this name.
        """
        with self._errors():
            self._bury_namesake()
            try:
                self.register_birth()  # type: ignore[no-untyped-call]
            except ValueError:
                raise UsageError(f"a worker named {self.name!r} runs already; give this one another --name") from None
            self.set_state(WorkerStatus.IDLE)
            self.connection.sadd(Queue.redis_queues_keys, *self.queue_keys())  # `rq info` shows empty ones too
        channels = [self.pubsub_channel_name, WAKE_CHANNEL]
        self._listener = CommandListener(connect(self.url), channels, self.handle_payload)
        self._listener.start()

    def close(self) -> None:
        """Unregisters the worker."""
        if self._listener is not None:
            self._listener.close()
        try:
            with self._errors():
                self.register_death()  # type: ignore[no-untyped-call]
        finally:
            self.connection.close()

    def _bury_namesake(self) -> None:
        """Removes an earlier worker of this name that died without a word, rather than wait for it to expire."""
        fields = self.connection.hmget(self.key, "hostname", "pid", "last_heartbeat")
        host, pid, beat = (as_text(value or b"") for value in fields)
        gone_here = host == socket.gethostname() and pid.isdigit() and not _is_running(int(pid))
        if beat and (gone_here or self.connection.ttl(self.key) < RQ_GRACE_SECONDS):
            self.connection.delete(self.key)

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Runs in the listener's thread: only notes the message, for the daemon to read."""
        if as_text(message["channel"]) == WAKE_CHANNEL:
            self.messages.put(Message(MessageKind.WAKE))
            return
        try:
            payload = json.loads(message["data"])
            kind = payload["command"]
        except (ValueError, TypeError, KeyError):
            log.warning("ignored a command that is not RQ's: %r", message["data"])
            return
        if kind == "shutdown":
            self.messages.put(Message(MessageKind.SHUTDOWN))
        elif kind in ("stop-job", "stop-execution"):
            with self._lock:
                shard = next((s for s in self._held if str(s) == payload.get("job_id")), None)
            if shard is not None:
                self.messages.put(Message(MessageKind.STOP_SHARD, shard))
        else:
            log.warning("ignored RQ's command %s: this worker has no process of its own for a shard", kind)

    def resubscribe(self) -> None:
        """Makes the listener connect anew: its connection may be dead without knowing it."""
        if self._listener is not None:
            self._listener.renew()

    @property
    def is_suspended(self) -> bool:
        """Whether `rq suspend` was in force at the last look."""
        return self._suspended

    # Taking

    def look(self) -> QueueView:
        """One look at the queues, before anything is popped. Shows `rq suspend` in the worker's state."""
        with self._errors(), self.connection.pipeline(transaction=False) as pipe:
            pipe.exists(WORKERS_SUSPENDED)
            pipe.smembers(WORKERS_BY_QUEUE_KEY % self.queues[0].name)
            for queue in self.queues:
                pipe.llen(queue.key)
            suspended, workers, *depths = pipe.execute()
            others = [key for key in workers if as_text(key) != self.key]
            for key in others:
                pipe.hget(key, "state")
            states = pipe.execute() if others else []
            if bool(suspended) != self._suspended:
                self._suspended = bool(suspended)
                self.set_state(self._state_now())
        idle = sum(state is not None and as_text(state) == WorkerStatus.IDLE for state in states)
        return QueueView(depths=tuple(depths), idle_others=idle, suspended=bool(suspended))

    def pop(self, count: int, view: QueueView) -> list[ShardId]:
        """Takes up to ``count`` shards, in order of priority, into the intermediate lists, and reads their jobs.
        What is no shard, or has no job any more, is dropped."""
        takes = shares(count, view.depths)
        sources = [queue for queue, take in zip(self.queues, takes, strict=True) for _ in range(take)]
        with self._errors(), self.connection.pipeline(transaction=False) as pipe:
            for queue in sources:
                pipe.lmove(queue.key, queue.intermediate_queue_key)
            taken = {as_text(i): q for i, q in zip(pipe.execute(), sources, strict=True) if i is not None}
            jobs = self._fetch(list(taken))
            self._clear([(queue, job_id) for job_id, queue in taken.items() if job_id not in jobs])
        found = {ShardId.parse(job_id): (job, taken[job_id]) for job_id, job in jobs.items()}
        with self._lock:
            self._popped.update(found)
        return list(found)

    def _fetch(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """The jobs that are whole, not cancelled, and shards."""
        shards = [job_id for job_id in job_ids if is_shard(job_id)]
        for other in set(job_ids) - set(shards):
            log.warning("dropped the job %r from the queue: it is not a shard", other)
        try:
            jobs = Job.fetch_many(shards, connection=self.connection, serializer=JSONSerializer)
        except RedisError:
            raise
        except Exception:  # noqa: BLE001  one broken hash, in whatever way, must not spoil the others
            jobs = [self._fetch_one(job_id) for job_id in shards]
        whole = [(job_id, job) for job_id, job in zip(shards, jobs, strict=True) if job is not None]
        return {job_id: job for job_id, job in whole if job.get_status(refresh=False) != JobStatus.CANCELED}

    def _fetch_one(self, job_id: str) -> Job | None:
        try:
            return Job.fetch(job_id, connection=self.connection, serializer=JSONSerializer)
        except RedisError:
            raise
        except Exception as error:  # noqa: BLE001
            log.warning("dropped the broken job %r from the queue: %s", job_id, error)
            return None

    def put_back(self, shards: Iterable[ShardId], *, at_front: bool = True) -> None:
        """Undoes :meth:`pop`: the shards stand in front of their queues again, or at the end, in their order."""
        popped = self._take_popped(shards)
        if not popped:
            return
        with self._errors(), self.connection.pipeline() as pipe:
            for job, queue in reversed(popped) if at_front else popped:
                leave_intermediate(pipe, queue, job.id)
                (pipe.lpush if at_front else pipe.rpush)(queue.key, job.id)
            pipe.execute()

    def drop(self, shards: Iterable[ShardId]) -> None:
        """Lets go of popped shards that SQL refused: they are done, cancelled, or somebody else's."""
        popped = self._take_popped(shards)
        if not popped:
            return
        with self._errors():
            self._clear([(queue, job.id) for job, queue in popped])
            with self.connection.pipeline(transaction=False) as pipe:
                for job, _ in popped:
                    pipe.zcard(ExecutionRegistry.key_template.format(job.id))
                for (job, _), executions in zip(popped, pipe.execute(), strict=True):
                    if not executions and job.get_status(refresh=False) != JobStatus.FINISHED:
                        pipe.delete(job.key)
                pipe.execute()

    def _clear(self, entries: Iterable[tuple[Queue, str]]) -> None:
        with self.connection.pipeline() as pipe:
            for queue, job_id in entries:
                leave_intermediate(pipe, queue, job_id)
            pipe.execute()

    def _take_popped(self, shards: Iterable[ShardId]) -> list[tuple[Job, Queue]]:
        with self._lock:
            return [found for shard in shards if (found := self._popped.pop(shard, None)) is not None]

    # Holding

    def start(self, shards: Iterable[ShardId]) -> None:
        """Shows popped shards, now leased, as started: one MULTI. If that fails they are held all the same, and
        :meth:`beat` shows them later."""
        self._show_started(self._hold(self._take_popped(shards)))

    def adopt(self, shards: Iterable[tuple[ShardId, Priority]]) -> None:
        """Holds shards that were leased without Redis; :meth:`beat` shows them when it is back."""
        jobs = []
        for shard, priority in shards:
            queue = next(q for q in self.queues if q.name == QUEUE_NAMES[priority])
            data = job_data(shard)._asdict()
            del data["at_front"]
            jobs.append((queue.create_job(**data), queue))
        self._hold(jobs)

    def _hold(self, jobs: Iterable[tuple[Job, Queue]]) -> list[HeldJob]:
        held = [HeldJob(job, queue, self.name) for job, queue in jobs]
        with self._lock:
            self._held.update((ShardId.parse(one.job.id), one) for one in held)
        return held

    def _show_started(self, held: Sequence[HeldJob], *, whole: bool = False) -> None:
        if not held:
            return
        with self._errors(), self.connection.pipeline() as pipe:
            for one in held:
                one.started(pipe, self._execution_ttl, whole=whole)
            self.set_state(self._state_now(), pipeline=pipe)
            self.heartbeat(pipeline=pipe)
            pipe.execute()
        for one in held:
            one.written = True

    def beat(self) -> None:
        """Renews the worker and everything it holds, in one pipeline; writes again what Redis has lost."""
        with self._lock:
            held = list(self._held.values())
        shown = [one for one in held if one.written]
        with self._errors(), self.connection.pipeline() as pipe:
            self.heartbeat(pipeline=pipe)
            where = [one.renewed(pipe, self._execution_ttl) for one in shown]
            self.set_state(self._state_now(), pipeline=pipe)
            pipe.hset(self.key, NOTE_FIELD, self.note)
            pipe.hexists(self.key, "birth")
            *replies, is_known = pipe.execute()
        for one, indices in zip(shown, where, strict=True):
            one.written = not any(replies[i] for i in indices)
        if not is_known:  # other writes than the birth may have made its hash anew since it was lost
            self._register_again()
        self._show_started([one for one in held if not one.written], whole=True)

    def _state_now(self) -> WorkerStatus:
        if self.is_paused:
            return WorkerStatus.SUSPENDED
        if self._held:
            return WorkerStatus.BUSY
        return WorkerStatus.SUSPENDED if self._suspended else WorkerStatus.IDLE

    def _register_again(self) -> None:
        with self._errors(), self.connection.pipeline() as pipe:
            pipe.hset(self.key, mapping={**self.serialize(), "state": self._state_now()})
            register(self, pipe)
            pipe.sadd(Queue.redis_queues_keys, *self.queue_keys())
            self.heartbeat(pipeline=pipe)
            pipe.execute()

    # Ending

    def end(self, shard: ShardId, ending: Ending) -> None:
        """Notes that this worker is done with a shard; :meth:`flush` tells Redis. SQL must know already."""
        with self._lock:
            held = self._held.pop(shard, None)
            if held is None:
                return
            held.end(ending)
            self._ended[held] = None
            while len(self._ended) > MAX_PENDING_ENDINGS:
                del self._ended[next(iter(self._ended))]

    def flush(self) -> int:
        """Tells Redis of the shards that ended, in one MULTI. What could not be told is kept for the next time.
        Returns how many it were."""
        with self._lock:
            ended = list(self._ended)
        if not ended:
            return 0
        with self._errors():
            try:
                self._tell(ended)
            except OutOfMemoryError:
                with self.connection.pipeline(transaction=False) as pipe:  # full, it refuses every MULTI
                    for one in ended:
                        one.erased(pipe)
                    pipe.execute()
        with self._lock:
            for one in ended:
                self._ended.pop(one, None)
        return len(ended)

    def _tell(self, ended: Sequence[HeldJob]) -> None:
        with self.connection.pipeline() as pipe:
            for one in ended:
                one.ended(pipe)
                if one.ending == Ending.SUCCESS:
                    self.increment_successful_job_count(pipe)
                elif one.ending == Ending.STOPPED:
                    self.increment_failed_job_count(pipe)
                assert one.job.ended_at is not None
                self.increment_total_working_time(one.job.ended_at - one.execution.created_at, pipe)
            self.set_state(self._state_now(), pipeline=pipe)
            pipe.execute()

    def give_back(self, shards: Iterable[ShardId] | None = None) -> int:
        """Puts these shards, or all that are held, to the front of their queues, in order. Their leases must have been
        released. Returns how many it were."""
        with self._lock:
            chosen = list(self._held) if shards is None else list(shards)
            held = [one for shard in chosen if (one := self._held.pop(shard, None)) is not None]
        with self._errors(), self.connection.pipeline() as pipe:
            for one in reversed(held):
                one.requeued(pipe)
            self.set_state(self._state_now(), pipeline=pipe)
            pipe.execute()
        return len(held)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():  # a namesake in another container, or an earlier worker of this very process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's, but it runs
        pass
    return True
