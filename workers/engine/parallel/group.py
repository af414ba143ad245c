"""The processes among which a model is split: this one drives, the others follow.

What it keeps true:
- A follower lives as long as its driver: it ends when its socket's other end is gone, whatever it is doing.
- A follower that died breaks the group. Whoever computes next, or waits for a result, gets :class:`GroupBroken` with
  the reason, and no result is given out from then on. Where nobody can be told, because a device waits for the one that
  is gone or because nothing is asked of the engine, the process ends itself after a while.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from batchjobs.errors import BatchjobsError, UsageError
from workers.engine.models import load_model
from workers.engine.parallel.loading import Split, refuse_unsplittable
from workers.engine.parallel.messages import Begin, Failed, Here, Load, Message, messages, send
from workers.engine.parallel.ranks import devices_from, join

if TYPE_CHECKING:
    import torch

    from workers.engine.config import EngineConfig
    from workers.engine.models import LoadedModel

log = logging.getLogger("batchjobs.engine")

EXIT_SECONDS = 10.0
"""How long a broken group may go unnoticed before the process ends itself."""

_NOTICE_SECONDS = 5.0  # from an exchange that failed until the socket of whoever caused it is found closed
_OWN_SECONDS = 1.0  # the same, where this process has a reason of its own
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_FOLLOWER = [sys.executable, "-m", "workers.engine.parallel.follower"]  # and the number of its end of the socket


class GroupBroken(BatchjobsError):
    """A process of the group has ended, so no step can be computed any more."""


class Follower:
    """A process that this one drives, as this one sees it."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*_FOLLOWER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the driver
            )

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.device} (process {self.process.pid})"

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def end(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Group:
    """Made by the process that drives; one at a time in a process. It can have one model after the other.

    Raises:
        UsageError: There are too few devices, or a group exists already.
        GroupBroken: A follower ended before it could join.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        devices = devices_from(device, size)
        if dist.is_initialized():
            raise UsageError("this process drives a model that is split over several devices already")
        self.split = Split(0, size, devices[0])
        self._reason: Failed | None = None
        self._broken, self._is_closed = threading.Event(), False
        self._arrived = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._exit: threading.Timer | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="batchjobs-ranks-"))  # for this user alone
        self._followers: list[Follower] = []
        self._watchers: list[threading.Thread] = []
        atexit.register(self._end_followers)
        try:
            for rank in range(1, size):
                self._start(rank, devices[rank])
            for _ in self._followers:
                self._await_one()
            with self.watched():
                join(self.split, self._store)
        except BaseException:
            self.close()
            raise

    def load(self, model: str, config: EngineConfig, revision: str | None = None) -> LoadedModel:
        """This rank's part of a model, while the others load theirs; a runner is to be made of it next.

        Raises:
            UsageError: The model cannot be split so, or cannot be loaded.
            GroupBroken: A follower ended.
        """
        refuse_unsplittable(model, self.split.size, revision)
        self.tell(Load(model, revision, asdict(config)))
        with self.watched():
            device, dtype = self.split.device, config.dtype
            return load_model(model, device=device, dtype=dtype, revision=revision, split=self.split)

    @property
    def _store(self) -> Path:
        """The file by which the ranks find each other."""
        return self._folder / "store"

    def _start(self, rank: int, device: torch.device) -> None:
        follower = Follower(rank, device)
        self._followers.append(follower)
        watcher = threading.Thread(target=self._watch, args=(follower,), name=f"rank {rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)
        self._send(follower, Begin(rank, self.split.size, str(device), str(self._store)))
        log.info("%s has a part of the model", follower.name)

    def _await_one(self) -> None:
        """Joining waits for all, so it is not begun before all are there. Raises GroupBroken."""
        while not self._arrived.acquire(timeout=_LOOK_SECONDS):
            self.check()

    # Telling and hearing

    def tell(self, message: Message) -> None:
        """All followers. Raises GroupBroken."""
        self.check()
        for follower in self._followers:
            self._send(follower, message)

    def _send(self, follower: Follower, message: Message) -> None:
        try:
            send(follower.socket, message)
        except OSError as error:
            self._broken.wait(_NOTICE_SECONDS)
            raise self._error() from error

    def check(self) -> None:
        """Raises what broke the group, if anything did."""
        if self._broken.is_set():
            raise self._error()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What fails in it because a follower is gone raises GroupBroken, or UsageError where that one refused."""
        try:
            yield
        except Exception as error:
            if self._broken.wait(_OWN_SECONDS if isinstance(error, BatchjobsError) else _NOTICE_SECONDS):
                raise self._error() from error
            raise
        self.check()

    def _error(self) -> BatchjobsError:
        """What broke the group, to be raised: somebody knows of it then, so the process need not end itself."""
        with self._lock:
            if self._exit is not None:
                self._exit.cancel()
            reason = self._reason or Failed("a process of the group does not answer any more", is_refusal=False)
        return (UsageError if reason.is_refusal else GroupBroken)(reason.reason)

    def _watch(self, follower: Follower) -> None:
        """Until it is gone, which must not be before the group is closed."""
        said: Failed | None = None
        for message in messages(follower.socket):
            if isinstance(message, Failed):
                said = message
            elif isinstance(message, Here):
                self._arrived.release()
        if not self._is_closed:
            how = f"{follower.name} {follower.how_it_ended()}, and the model's other parts cannot go on without it"
            self._break(said or Failed(how, is_refusal=False))

    def _break(self, reason: Failed) -> None:
        with self._lock:
            if self._broken.is_set() or self._is_closed:
                return
            self._reason = reason
            self._exit = threading.Timer(EXIT_SECONDS, _end_process, [reason.reason, self._folder])
            self._exit.daemon = True
            self._exit.start()
            self._broken.set()

    # The end

    def close(self) -> None:
        """Ends the followers and leaves them. May be called again."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._exit is not None:
                self._exit.cancel()
        if was_closed:
            return
        atexit.unregister(self._end_followers)
        self._end_followers()
        for watcher in self._watchers:
            watcher.join(_END_SECONDS)
        for follower in self._followers:
            follower.socket.close()
        if dist.is_initialized():
            leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)  # it may wait for who is gone
            leaving.start()
            leaving.join(_END_SECONDS)

    def _end_followers(self) -> None:
        self._is_closed = True
        for follower in self._followers:
            follower.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_process(reason: str, folder: Path) -> None:
    log.error("%s; this process ends, and another worker takes over when its leases run out", reason)
    shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    os._exit(1)
