"""Messages that reach a worker over Redis' pub/sub. They may get lost, so each of them is only a shortcut."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis import Redis

    from batchjobs.types import ShardId

_LISTEN_SECONDS = 0.1
_RECONNECT_SECONDS = 0.5
_SUBSCRIBE_SECONDS = 5


class MessageKind(StrEnum):
    """What a worker can be told in this way."""

    SHUTDOWN = "shutdown"
    STOP_SHARD = "stop-shard"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class Message:
    """One of them. ``shard`` is set for STOP_SHARD."""

    kind: MessageKind
    shard: ShardId | None = None


class CommandListener(threading.Thread):
    """Hears what is published on ``channels``, and subscribes again whenever its connection was lost.

    ``handle`` gets redis-py's message dict, runs in this thread and must be quick.
    """

    def __init__(self, connection: Redis, channels: Sequence[str], handle: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="commands", daemon=True)
        self._connection = connection
        self._channels = channels
        self._handle = handle
        self._closing = threading.Event()
        self._stale = threading.Event()
        self._subscribed = threading.Event()

    def start(self) -> None:
        """Starts listening, and returns when it does: what is published from now on is heard."""
        super().start()
        self._subscribed.wait(_SUBSCRIBE_SECONDS)

    def run(self) -> None:
        while not self._closing.is_set():
            self._stale.clear()
            try:
                self._listen()
            except (RedisError, OSError):
                self._closing.wait(_RECONNECT_SECONDS)
        self._connection.close()

    def _listen(self) -> None:
        with self._connection.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(*self._channels)
            while not (self._closing.is_set() or self._stale.is_set()):
                message = pubsub.get_message(timeout=_LISTEN_SECONDS)
                if message is None:
                    continue
                if message["type"] == "message":
                    self._handle(message)
                elif message["type"] == "subscribe" and message["data"] == len(self._channels):
                    self._subscribed.set()

    def renew(self) -> None:
        """Connects anew: a connection that the network dropped does not know that it is dead."""
        self._stale.set()

    def close(self) -> None:
        self._closing.set()
        self.join(timeout=2)
