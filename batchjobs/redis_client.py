"""A connection to Redis that sends nothing twice, and errors that say what to do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from batchjobs.errors import ConnectionFailed, UsageError
from batchjobs.redis_binary import OLDEST_SERVER
from batchjobs.text import has_stray_at, hide_password, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_SECONDS = 5
REPLY_SECONDS = 10


def connect(url: str) -> Redis:
    """A client with a pool of its own, because RQ changes the timeouts of the pool it is given.

    Nothing is sent twice: a command that was cut may have run, and repeating an LMOVE would strand a shard.

    Raises:
        UsageError: The URL is not one of a Redis.
    """
    if has_stray_at(url):
        raise UsageError("BATCHJOBS_REDIS_URL has more than one @; write each @ of the user or password as %40")
    try:
        pool = ConnectionPool.from_url(
            url, socket_timeout=REPLY_SECONDS, socket_connect_timeout=CONNECT_SECONDS, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise UsageError(
            f"{hide_password(url)} is not the URL of a Redis; BATCHJOBS_REDIS_URL starts with redis://, rediss:// or unix://"
        ) from error
    return Redis(connection_pool=pool)


@contextlib.contextmanager
def redis_errors(url: str) -> Iterator[None]:
    """Turns redis-py's errors into :class:`ConnectionFailed`, with a sentence that never holds the password."""
    try:
        yield
    except RedisError as error:
        raise ConnectionFailed(_explain(error, hide_password(url))) from error


def _explain(error: RedisError, where: str) -> str:
    said = visible(str(error))
    match error:
        case OutOfMemoryError():
            return (
                f"the Redis at {where} is full. Nothing is lost: raise its maxmemory, or let workers drain the queue, "
                "and what is missing is queued again"
            )
        case ReadOnlyError():
            return f"the Redis at {where} is a read-only replica; point BATCHJOBS_REDIS_URL at its primary"
        case RedisTimeoutError() | RedisConnectionError():
            return f"the Redis at {where} cannot be reached ({said}). Check that it runs, and BATCHJOBS_REDIS_URL"
        case _:
            return f"the Redis at {where} refused a command ({said})"


def check_server(connection: Redis, where: str) -> None:
    """Refuses a Redis that is too old, or that drops keys when its memory is full.

    Raises:
        UsageError: It does; the message says how to change that.
    """
    server = connection.info("server")
    version = tuple(int(part) for part in str(server["redis_version"]).split(".")[:2])
    if version < OLDEST_SERVER:
        raise UsageError(f"the Redis at {where} is version {server['redis_version']}; 6.2 or later is needed")
    try:
        policy = connection.info("memory").get("maxmemory_policy", "noeviction")
    except ResponseError:  # a managed Redis may hide it
        return
    if policy != "noeviction":
        raise UsageError(
            f"the Redis at {where} would drop queued work when its memory is full (maxmemory-policy {policy}). "
            "Run `redis-cli CONFIG SET maxmemory-policy noeviction`, and put `maxmemory-policy noeviction` into its "
            "redis.conf"
        )
