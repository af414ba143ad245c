"""What RQ's books say when everything is over: nothing waits, nothing is started, nobody who died is a worker."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing

from rq import Queue, Worker
from rq.serializers import JSONSerializer

from batchjobs.queue import QUEUE_NAMES
from tests.chaos.cluster import Cluster


def left_in_redis(cluster: Cluster, seconds: float) -> list[str]:
    """What is still there after so long, in words. Workers go on meanwhile."""
    deadline = time.monotonic() + seconds
    said: list[str] = []
    while (left := unfinished_shards(cluster)) and time.monotonic() < deadline:
        if left != said:
            cluster.say("; ".join(left))
        said = left
        cluster.look_after()
        time.sleep(0.2)
    return left


def known_workers(cluster: Cluster, ended: Collection[str]) -> list[str]:
    """Those of these workers, which ended in good order while Redis was there, that it still knows."""
    with closing(cluster.redis.client()) as connection:
        names = sorted({worker.name for worker in Worker.all(connection=connection)} & set(ended))
    return [f"Redis knows a worker that has ended: {name}" for name in names]


def unfinished_shards(cluster: Cluster) -> list[str]:
    left = []
    with closing(cluster.redis.client()) as connection:
        for name in QUEUE_NAMES.values():
            queue = Queue(name, connection=connection, serializer=JSONSerializer)
            counts = {  # in this order: RQ puts what a dead worker had started back into the queue when it counts
                "started": queue.started_job_registry.count,
                "failed": queue.failed_job_registry.count,
                "popped and not claimed": connection.llen(queue.intermediate_queue_key),
                "queued": queue.count,
            }
            left += [f"Redis has {count} shards {what} in {name}" for what, count in counts.items() if count]
    return left
