"""What operators do to running work: cancel, pause, update models, drain. The part of the client that gives orders.

Every order is a row in SQL first, and the workers look there every second. The message over Redis only wakes them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from batchjobs.errors import ConnectionFailed, NotFound, UsageError
from batchjobs.fields import listed
from batchjobs.models import asked_for
from batchjobs.store.pauses import ALL_WORKERS
from batchjobs.types import Command, CommandKind, Inflight
from batchjobs.waiting import wait_for_commands, wait_for_request

if TYPE_CHECKING:
    from batchjobs.queue import JobQueue
    from batchjobs.store import ModelVersion, Store, StoredResult
    from batchjobs.types import Counts

Seen = Callable[[Command], None]


class Control:
    """The orders of a :class:`batchjobs.Client`. Each is given in the name of user@host, and may be given again."""

    @property
    def store(self) -> Store:
        raise NotImplementedError

    @property
    def queue(self) -> JobQueue:
        raise NotImplementedError

    # Cancelling

    def cancel_batch(self, batch_id: str) -> Counts:
        """Cancels what has not ended. Raises NotFound."""
        counts = self.store.cancel_batch(batch_id)
        with contextlib.suppress(ConnectionFailed):  # workers drop its shards when they come up
            self.queue.drop_batch(batch_id)
        self._wake_workers()
        return counts

    def cancel_request(self, batch_id: str, index: int) -> None:
        """Cancels one request, unless it has ended. Raises NotFound."""
        self.store.cancel_request(batch_id, index)
        self._wake_workers()

    def request_outcome(self, batch_id: str, index: int, timeout: float) -> StoredResult:
        """A request once it has ended, or as it is after ``timeout`` seconds. Raises NotFound."""
        return wait_for_request(self.store, batch_id, index, timeout)

    # Pausing

    def pause_batch(self, batch_id: str, reason: str | None = None, release: bool = False) -> bool:
        """Lets no more token be made for a batch, from the workers' next step on.

        Its running requests keep their place and their cache; with ``release`` they are stored as far as they are and
        go back to the queue. False: it was paused already, which stays as it is (but ``release`` is taken over), or
        it has ended. Raises NotFound.
        """
        paused = self.store.pause_batch(batch_id, by=_who(), reason=reason, release=release)
        self._wake_workers()
        return paused

    def resume_batch(self, batch_id: str) -> bool:
        """Lets a paused batch go on. False: it was not paused. Raises NotFound."""
        resumed = self.store.resume_batch(batch_id)
        self._wake_workers()
        return resumed

    def pause_workers(
        self, workers: str | Sequence[str] | None = None, *, reason: str | None = None, release: bool = False
    ) -> list[str]:
        """Lets workers make no more token and claim nothing, from their next step on, until somebody resumes them.

        Args:
            workers: Their names; None means all, those that start later included. A pause is kept by name: it holds for
                a worker that starts again, too.
            reason: Shown in ``status`` and ``workers``.
            release: What was running goes back to the queue, instead of keeping its place, its cache and its lease.

        Returns:
            The names that had not been paused before; ``*`` for all.

        Raises:
            NotFound: No worker of the last day has that name; then none is paused.
        """
        names = self._names(workers)
        new = [
            name or ALL_WORKERS
            for name in names
            if self.store.pause_worker(name, by=_who(), reason=reason, release=release)
        ]
        self._wake_workers()
        return new

    def resume_workers(self, workers: str | Sequence[str] | None = None) -> list[str]:
        """Lifts the pauses of these workers, or with None every pause of workers there is.

        A worker that is paused by name, and with all others, goes on when both are lifted. Returns the names that were
        lifted, ``*`` for the pause of all. Raises NotFound as :meth:`pause_workers` does.
        """
        names = self._names(workers)
        lifted = [name for each in names for name in self.store.resume_worker(each)]
        self._wake_workers()
        return lifted

    def _names(self, workers: str | Sequence[str] | None) -> Sequence[str | None]:
        """Each name once; None for all. Raises NotFound for one that nobody knows."""
        if workers is None:
            return [None]
        names = list(dict.fromkeys([workers] if isinstance(workers, str) else workers))
        if not names:
            raise UsageError("no worker is named; leave the names out for all workers")
        known = {row.name for row in self.store.workers()} | self.store.worker_pauses().keys()
        if missing := [name for name in names if name not in known]:
            raise NotFound(f"no worker {listed(missing)}; `batchjobs workers` lists those of the last day")
        return names

    # Commands

    def update_model(
        self,
        model: str,
        *,
        revision: str | None = None,
        workers: str | Sequence[str] | None = None,
        inflight: Inflight | str = Inflight.RECOMPUTE,
        dry_run: bool = False,
        wait: bool = True,
        timeout: float | None = None,
        seen: Seen | None = None,
    ) -> list[Command]:
        """Has workers change to another model: each all or nothing, checked in full before its first change.

        Args:
            model: Folder, hub id or ``.gguf`` file, as the workers' machines know it.
            revision: Branch, tag or commit of a model from a hub.
            workers: The names of living workers; None means all that live now.
            inflight: What becomes of unfinished answers, see :class:`batchjobs.Inflight`.
            dry_run: Load and check only, and say what would happen.
            wait: Return when every worker has done it or refused. Else at once, with the orders as they were given.
            timeout: Seconds to wait at most; None waits as long as it takes.
            seen: Called with each command as it ends.

        Returns:
            One command a worker, in the order of their names. ``error`` says why a worker did not change; then it goes
            on with the old model. Else ``result`` has ``old_version``, ``new_version``, ``paused_seconds`` and more,
            see ``docs/control.md``. A worker that died or ended meanwhile has that as its error.

        Raises:
            NotFound: No such living worker, or none at all; then nobody was told.
            UsageError: ``inflight`` is none of the four.
            WaitTimeout: The time ran out; the orders stand.
        """
        arguments = {
            "model": asked_for(model),
            "revision": revision,
            "inflight": str(_inflight(inflight)),
            "dry_run": dry_run,
        }
        return self._order(CommandKind.UPDATE_MODEL, self.living_workers(workers), arguments, wait, timeout, seen)

    def drain(self, worker: str, *, release: bool = False, wait: bool = True, timeout: float | None = None) -> Command:
        """Has a worker claim nothing more, finish what it has begun, and end; with ``release`` it gives that back.

        Returns the command once the worker has ended, or at once without ``wait``. Its ``result`` says how many
        requests were ``finished`` and ``given_back``. Raises NotFound, or WaitTimeout: the order stands.
        """
        names = self.living_workers(worker)
        (ended,) = self._order(CommandKind.DRAIN, names, {"release": release}, wait, timeout)
        return ended

    def model_versions(self) -> list[ModelVersion]:
        """Every version of a model that a worker has ever served here, the newest first."""
        return self.store.model_versions()

    def living_workers(self, workers: str | Sequence[str] | None = None) -> list[str]:
        """The names of these workers, or with None of all that live now, each once, in order. Raises NotFound for one
        that does not live, or where none does."""
        living = sorted(row.name for row in self.store.workers() if row.is_alive)
        if workers is None:
            if not living:
                raise NotFound("no worker lives that could be told; `batchjobs worker --model MODEL` starts one")
            return living
        names = sorted({workers} if isinstance(workers, str) else set(workers))
        if missing := [name for name in names if name not in living]:
            alive = f"; those that live: {listed(living)}" if living else "; none lives"
            raise NotFound(f"no living worker {listed(missing)}{alive}")
        if not names:
            raise UsageError("no worker is named; leave the names out for all workers")
        return names

    def _order(
        self,
        kind: CommandKind,
        workers: Sequence[str],
        arguments: dict[str, Any],
        wait: bool,
        timeout: float | None,
        seen: Seen | None = None,
    ) -> list[Command]:
        given = self.store.order(kind, workers, arguments=arguments, by=_who())
        self._wake_workers()
        if wait:
            given = wait_for_commands(self.store, given, timeout, seen or (lambda command: None))
        return sorted(given, key=lambda command: command.worker)

    def _wake_workers(self) -> None:
        # Workers look into SQL every second or two by themselves.
        with contextlib.suppress(ConnectionFailed):
            self.queue.wake()


def _inflight(value: Inflight | str) -> Inflight:
    try:
        return Inflight(value)
    except ValueError:
        raise UsageError(f"inflight must be {', '.join(Inflight)}, not {value!r}") from None


def _who() -> str:
    """user@host, as the pauses and commands show it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
