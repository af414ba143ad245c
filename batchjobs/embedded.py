"""The private Redis server of one home folder, shared by every process that uses that home.

What holds at all times, whoever is killed at whatever instant:
- ``server.lock`` is held by the server itself, through a descriptor it inherited: it is free exactly when no server is
  alive. So there is never a second server on the same append-only file, and a process id is never trusted.
- ``users.lock`` is held, shared, by each process that uses the server. Who gets it exclusively is alone and may stop
  the server; who waits for it shared cannot be surprised by a stop.
- ``start.lock`` is held while a server is being started, so that many processes starting at once get one server.
The kernel drops all three when their holder dies. Losing this server loses no work: SQL is the truth.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.retry import Retry

from batchjobs.errors import ConnectionFailed
from batchjobs.folders import own_folder, private_folder
from batchjobs.redis_binary import find_server
from batchjobs.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` holds 108 bytes, the closing NUL included."""

START_SECONDS = 30.0
STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01


class EmbeddedRedis:
    """One process's share in the server of ``home``. Starts the server where none is running.

    Raises:
        ConnectionFailed: There is no usable ``redis-server``, or it does not start or answer.
    """

    def __init__(self, home: Path, *, start_seconds: float = START_SECONDS) -> None:
        self.folder = private_folder(own_folder(home.expanduser().absolute()) / "redis")
        self.socket_path = socket_path_for(self.folder)
        self._start_seconds = start_seconds
        self._client = Redis(
            unix_socket_path=str(self.socket_path),
            socket_timeout=2,
            socket_connect_timeout=2,
            retry=Retry(NoBackoff(), 0),
        )
        self._pid = os.getpid()
        self._users: int | None = self._open("users.lock")
        try:
            self._lock(self._users, fcntl.LOCK_SH)
            self.ensure_running()
        except BaseException:
            self._forget()
            raise
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """What redis-py and ``rq info --url`` take."""
        return f"unix://{self.socket_path}"

    def ensure_running(self) -> None:
        """Starts the server again if it died; its append-only file brings the queue back."""
        if self._answers():
            return
        with self._held("start.lock"):
            if self._answers():  # somebody else started it while we waited
                return
            if self._is_alive() and not self._comes_round():
                self._end_unreachable()
            if not self._is_alive():
                self._start()

    def close(self) -> None:
        """Leaves the server; the last user stops it, unless work is queued. May be called again."""
        if self._users is None:
            return
        atexit.unregister(self.close)
        try:
            # A forked child shares its parent's lock and must not turn it into an exclusive one.
            if os.getpid() == self._pid and self._is_last_user() and not self._has_work():
                self._stop()
        except OSError:
            pass  # the folder is gone
        finally:
            self._forget()

    # Being alive

    def _answers(self) -> bool:
        # The file too: an old connection outlives it, while nobody can make a new one.
        try:
            return self.socket_path.exists() and bool(self._client.ping())
        except ResponseError:  # it refuses, for want of disk space perhaps: that is an answer
            return True
        except RedisError:
            return False

    def _is_alive(self) -> bool:
        """Whether a server process exists, answering or not."""
        descriptor = self._open("server.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _is_loading(self) -> bool:
        """Whether it still reads its append-only file, which may take long."""
        try:
            self._client.ping()
        except BusyLoadingError:
            return True
        except RedisError:
            pass
        return False

    def _comes_round(self) -> bool:
        """Waits for a server that is alive but not answering (yet). False: its socket is gone, or it died meanwhile."""
        deadline = time.monotonic() + self._start_seconds
        missing_since: float | None = None
        while time.monotonic() < deadline:
            if self._answers():
                return True
            if not self._is_alive():
                return False
            if self._is_loading():
                deadline = time.monotonic() + self._start_seconds
            # Somebody tidied the temporary folder: nobody can reach this server any more.
            present = self.socket_path.exists()
            missing_since = None if present else missing_since or time.monotonic()
            if missing_since and time.monotonic() - missing_since > 2:
                return False
            time.sleep(_POLL_SECONDS)
        raise ConnectionFailed(
            f"the embedded Redis in {self.folder} runs but has not answered for {self._start_seconds:.0f} s. "
            f"Look at {self.folder / 'redis.log'}; its process id is in {self.folder / 'redis.pid'}"
        )

    # Starting and stopping

    def _start(self) -> None:
        binary = find_server()
        guard = self._open("server.lock")
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                self.socket_path.unlink()  # left behind by a server that was killed
            subprocess.run(
                self._command(binary),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(guard,),
                umask=0o077,
                start_new_session=True,  # a Ctrl-C in this terminal is not meant for the server
                check=True,
                timeout=self._start_seconds,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConnectionFailed(f"{binary} could not be started: {error}{self._last_words()}") from error
        finally:
            os.close(guard)  # the server has its own descriptor of the same lock
        if not self._comes_round():
            raise ConnectionFailed(f"the embedded Redis in {self.folder} ended while it started{self._last_words()}")

    def _command(self, binary: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "hash-max-ziplist-value": "128",  # an RQ job takes 0.6 KB instead of 2 KB
            "logfile": str(self.folder / "redis.log"),
            "pidfile": str(self.folder / "redis.pid"),
            "daemonize": "yes",
        }
        return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]

    def _stop(self) -> None:
        with contextlib.suppress(RedisError):
            self._client.shutdown()
        deadline = time.monotonic() + STOP_SECONDS
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _end_unreachable(self) -> None:
        """Ends a live server whose socket file is gone; everything it acknowledged is in its append-only file."""
        with contextlib.suppress(OSError, ValueError):
            # The lock says that our server lives, so the id it wrote is its own.
            os.kill(int((self.folder / "redis.pid").read_text()), signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _has_work(self) -> bool:
        """Whether shards wait in any queue. Unknown counts as yes: an idle server costs less than a lost queue."""
        from rq import Queue  # here, because joining a server needs no RQ

        try:
            lists = [key for q in Queue.all(self._client) for key in (q.key, q.intermediate_queue_key)]
            return any(self._client.llen(key) for key in lists)
        except RedisError:
            return self._is_alive()

    def _last_words(self) -> str:
        """The last line of the server's log, if there is one, as the end of a sentence."""
        try:
            lines = (self.folder / "redis.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        if not lines:
            return ""
        return (
            f'. The last line of {self.folder / "redis.log"} is: "{visible(lines[-1])}". If its append-only file is '
            f"broken, delete {self.folder}: the queue is rebuilt from the database"
        )

    # Locks

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _lock(self, descriptor: int, kind: int) -> None:
        deadline = time.monotonic() + 2 * self._start_seconds
        while True:
            try:
                return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConnectionFailed(
                        f"another process has been starting or stopping the embedded Redis in {self.folder} for "
                        f"{2 * self._start_seconds:.0f} s; end it, or set BATCHJOBS_REDIS_URL"
                    ) from None
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[None]:
        descriptor = self._open(name)
        try:
            self._lock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _is_last_user(self) -> bool:
        # Turning a shared lock into an exclusive one is not atomic, but we are leaving: losing it is what we want.
        assert self._users is not None
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _forget(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None
        self._client.close()


def socket_path_for(folder: Path) -> Path:
    """Where the socket of the server in ``folder`` is: inside it, or, where that path is too long for a socket, in a
    short private folder under the temporary folder, always the same one for the same home and user."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    name = f"batchjobs-{os.getuid()}-{digest}"
    places = [Path(place, name) for place in (tempfile.gettempdir(), "/tmp")]  # noqa: S108 - made private
    short = next((p for p in places if len(os.fsencode(p / "redis.sock")) <= MAX_SOCKET_PATH_BYTES), places[0])
    return private_folder(short) / "redis.sock"
