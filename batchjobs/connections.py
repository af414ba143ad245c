"""From settings to a store and a queue that answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchjobs.folders import own_folder
from batchjobs.store import Store

if TYPE_CHECKING:
    from batchjobs.queue import JobQueue
    from batchjobs.settings import Settings


def connect_store(settings: Settings) -> Store:
    """The database, ready for use: an empty one and any SQLite file are brought to the latest schema.

    Raises:
        ConnectionFailed: It cannot be reached.
        BatchjobsError: Its schema is out of date; the message says how to upgrade it.
    """
    if settings.database_url is None:
        own_folder(settings.home)
    store = Store(settings.store_url)
    try:
        store.prepare()
    except BaseException:
        store.close()
        raise
    return store


def connect_queue(settings: Settings) -> JobQueue:
    """The Redis of BATCHJOBS_REDIS_URL, or without one the private server of the home folder, started if need be.

    Raises:
        ConnectionFailed: It cannot be reached or started.
        UsageError: It is too old, or set to evict keys.
    """
    from batchjobs.queue import JobQueue  # here, because commands that only read need neither redis nor rq

    if settings.redis_url is not None:
        return JobQueue(settings.redis_url)
    from batchjobs.embedded import EmbeddedRedis

    server = EmbeddedRedis(settings.home)
    try:
        return JobQueue(server.url, embedded=server)
    except BaseException:
        server.close()
        raise
