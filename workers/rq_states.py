"""The states of one RQ job, each as the commands that bring it about in a pipeline. With ``rq_worker`` the only place
that knows how RQ stores things."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.utils import now, utcformat

from batchjobs.queue import RESULT_TTL_SECONDS

if TYPE_CHECKING:
    from redis.client import Pipeline
    from rq import Queue


class Ending(StrEnum):
    """How a worker's part in a shard ended."""

    SUCCESS = "success"
    STOPPED = "stopped"
    LOST = "lost"


class HeldJob:
    """A job that this worker executes. ``written`` says whether Redis shows it so."""

    def __init__(self, job: Job, queue: Queue, worker_name: str) -> None:
        self.job = job
        self.queue = queue
        self.execution = Execution(uuid4().hex, job.id, job.connection, worker_name)
        self.execution._job = job
        self.ending: Ending | None = None
        self.written = False

    def end(self, ending: Ending) -> None:
        self.ending = ending
        self.job.ended_at = now()

    def started(self, pipe: Pipeline, ttl: int, *, whole: bool) -> None:
        """Queued or unknown -> started. ``whole`` writes the job's hash from memory, for a Redis that lost it."""
        if whole:
            self.job.save(pipeline=pipe)
        self.execution.save(ttl=ttl, pipeline=pipe)
        self._register(pipe, ttl)
        pipe.sadd(self.execution.worker_executions_key, self.execution.composite_key)
        self.job.prepare_for_execution(self.execution.worker_name, pipeline=pipe)
        pipe.persist(self.job.key)
        leave_intermediate(pipe, self.queue, self.job.id)

    def renewed(self, pipe: Pipeline, ttl: int) -> tuple[int, int]:
        """Stays started. Returns which replies count the fields that were not there: any means that Redis lost it."""
        execution_reply = len(pipe)
        self.execution.heartbeat(self.job.started_job_registry, ttl, pipe)
        self._register(pipe, ttl)
        job_reply = len(pipe)
        # Somebody may have queued the shard again meanwhile: it is started all the same.
        status: dict[Any, Any] = {
            "status": JobStatus.STARTED,
            "worker_name": self.execution.worker_name,
            "last_heartbeat": utcformat(now()),
        }
        pipe.hset(self.job.key, mapping=status)
        return execution_reply, job_reply

    def _register(self, pipe: Pipeline, ttl: int) -> None:
        # Also on renewal: whoever looked after a late heartbeat may have cleaned the entries away.
        self.job.started_job_registry.add_execution(self.execution, pipeline=pipe, ttl=ttl)
        registry = ExecutionRegistry(job_id=self.job.id, connection=self.job.connection)
        registry.add(self.execution, ttl=ttl, pipeline=pipe)

    def ended(self, pipe: Pipeline) -> None:
        """Started -> finished, stopped, or (a lost lease) whatever its new owner makes of it."""
        if self.ending == Ending.SUCCESS:
            self._finished(pipe)
        elif self.ending == Ending.STOPPED:
            self._stopped(pipe)
        self.execution.delete(job=self.job, pipeline=pipe)

    def _finished(self, pipe: Pipeline) -> None:
        """As RQ's own success, but for its stream of results: a shard's are in SQL, and an empty one takes 5 KB."""
        self.job.set_status(JobStatus.FINISHED, pipeline=pipe)
        self.job.save(pipeline=pipe, include_meta=False, include_result=False)
        self.job.finished_job_registry.add(self.job, RESULT_TTL_SECONDS, pipe)
        self.job.cleanup(RESULT_TTL_SECONDS, pipeline=pipe, remove_from_queue=False)

    def _stopped(self, pipe: Pipeline) -> None:
        self.job.failure_ttl = RESULT_TTL_SECONDS
        self.job.set_status(JobStatus.STOPPED, pipeline=pipe)
        self.job._handle_failure(
            "stopped by a command",
            pipeline=pipe,
            worker_name=self.execution.worker_name,
            execution_id=self.execution.id,
            execution_started_at=self.execution.created_at,
            execution_ended_at=self.job.ended_at,
        )

    def erased(self, pipe: Pipeline) -> None:
        """Started -> gone, by deleting alone: all that a full Redis allows, and it makes room."""
        self.execution.delete(job=self.job, pipeline=pipe)
        if self.ending != Ending.LOST:
            pipe.lrem(self.queue.key, 0, self.job.id)
            pipe.delete(self.job.key)

    def requeued(self, pipe: Pipeline) -> None:
        """Started -> queued, in front of all others."""
        self.execution.delete(job=self.job, pipeline=pipe)
        pipe.lrem(self.queue.key, 0, self.job.id)
        self.job.worker_name = self.job.started_at = self.job.last_heartbeat = None
        self.queue._enqueue_job(self.job, pipeline=pipe, at_front=True)


def leave_intermediate(pipe: Pipeline, queue: Queue, job_id: str) -> None:
    """The job is no longer between the queue and its execution."""
    pipe.lrem(queue.intermediate_queue_key, 0, job_id)
    pipe.delete(queue.intermediate_queue.get_first_seen_key(job_id))
