"""How each fault is done to a cluster. A method returns what it did in words, None where there was nothing to do."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from batchjobs.database import Database
from batchjobs.errors import ConnectionFailed
from tests.chaos.audit import rows_of
from tests.chaos.cluster import Cluster, Slot
from tests.chaos.producers import Producers
from tests.chaos.schedule import Fault, Kind
from tests.chaos.servers import Postgres, Sqlite

_COMMIT_SECONDS = 10.0
"""For so long a connection is looked for whose COMMIT can be cut."""

_HOLDER_SECONDS = 8.0
"""For so long a worker is looked for that has something to lose."""

_COPIED = b"COPY completions"


class Faults:
    """Does them, from any thread. ``done`` and ``missed`` count by kind, ``errors`` holds what must not happen."""

    def __init__(self, cluster: Cluster, producers: Producers, database: Database) -> None:
        self.done: Counter[Kind] = Counter()
        self.missed: Counter[Kind] = Counter()
        self.errors: list[str] = []
        self._cluster = cluster
        self._database = database
        self._redis_lock = threading.Lock()
        self._sql_lock = threading.Lock()
        self._ways: dict[Kind, Callable[[Fault], str | None]] = {
            Kind.KILL_WORKER: self._kill_worker,
            Kind.STOP_WORKER: self._stop_worker,
            Kind.TERMINATE_WORKER: self._terminate_worker,
            Kind.RESTART_REDIS: self._restart_redis,
            Kind.FLUSH_REDIS: self._flush_redis,
            Kind.CUT_REDIS: self._cut_redis,
            Kind.STALL_REDIS: self._stall_redis,
            Kind.REDIS_AWAY: self._redis_away,
            Kind.CUT_SQL: self._cut_sql,
            Kind.STALL_SQL: self._stall_sql,
            Kind.CUT_COMMIT: self._cut_commit,
            Kind.SQL_AWAY: self._sql_away,
            Kind.RESTART_SQL: self._restart_sql,
            Kind.LOCK_SQLITE: self._lock_sqlite,
            Kind.SUBMIT_TWICE: lambda fault: producers.submit_twice(),
            Kind.KILL_SUBMIT: lambda fault: producers.kill_submit(),
            Kind.CANCEL_BATCH: lambda fault: producers.cancel_batch(fault.lot),
            Kind.CANCEL_REQUESTS: lambda fault: producers.cancel_requests(fault.lot),
        }

    def do(self, fault: Fault) -> None:
        """Does it, and returns when it is over. What goes wrong with it is noted."""
        self._cluster.say(f"fault: {fault.kind}")
        try:
            what = self._ways[fault.kind](fault)
        except Exception as error:  # noqa: BLE001  it fails the run, which goes on to its audit
            self.errors.append(f"{fault.kind}: {type(error).__name__}: {error}")
            self._cluster.say(f"failed: {self.errors[-1]}")
            return
        (self.missed if what is None else self.done)[fault.kind] += 1
        self._cluster.say(f"over: {fault.kind}: {what or 'there was nothing to do it to'}")

    # Workers

    def _victims(self, fault: Fault) -> list[Slot]:
        """All slots, the chosen one first."""
        slots = self._cluster.slots
        first = int(fault.lot * len(slots))
        return slots[first:] + slots[:first]

    def _kill_worker(self, fault: Fault) -> str | None:
        """One that holds shards, if there is one within some seconds."""
        slots = self._victims(fault)
        deadline = time.monotonic() + _HOLDER_SECONDS
        while (chosen := self._holder(slots)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return next((name for slot in (chosen or slots[0], *slots) if (name := self._cluster.kill(slot))), None)

    def _holder(self, slots: Sequence[Slot]) -> Slot | None:
        query = "SELECT DISTINCT owner FROM shards WHERE state = 'leased'"
        try:
            owners = {row.owner for row in rows_of(self._database, query)}
        except ConnectionFailed:
            return None
        return next((slot for slot in slots if slot.worker is not None and slot.worker.name in owners), None)

    def _terminate_worker(self, fault: Fault) -> str | None:
        return next((name for slot in self._victims(fault) if (name := self._cluster.terminate(slot))), None)

    def _stop_worker(self, fault: Fault) -> str | None:
        slot = self._victims(fault)[0]
        worker = slot.worker
        if worker is None:
            return None
        seconds = slot.settings.lease_seconds + fault.seconds / 2
        worker.send(signal.SIGSTOP)
        time.sleep(seconds)
        worker.send(signal.SIGCONT)
        return f"{worker.name} for {seconds:.1f} s"

    # Redis

    def _restart_redis(self, fault: Fault) -> str:
        with self._redis_lock:
            self._cluster.redis.kill()
            time.sleep(fault.lot)
            self._cluster.redis.start()
        return f"after {fault.lot:.1f} s"

    def _flush_redis(self, fault: Fault) -> str:
        with self._redis_lock:
            self._cluster.redis.flush()
        return "flushed"

    def _cut_redis(self, fault: Fault) -> str:
        slots = self._some(fault)
        for slot in slots:
            slot.redis.cut()
        return f"of {len(slots)}"

    def _stall_redis(self, fault: Fault) -> str:
        proxy = self._victims(fault)[0].redis
        proxy.stall()
        time.sleep(fault.seconds)
        proxy.restore()
        return f"for {fault.seconds:.1f} s"

    def _redis_away(self, fault: Fault) -> str:
        for slot in self._cluster.ways:
            slot.redis.refuse()
        time.sleep(fault.seconds)
        for slot in self._cluster.ways:
            slot.redis.restore()
        return f"for {fault.seconds:.1f} s"

    def _some(self, fault: Fault) -> list[Slot]:
        """Everybody, or one."""
        return self._cluster.ways if fault.lot < 0.5 else self._victims(fault)[:1]

    # The database

    def _cut_sql(self, fault: Fault) -> str:
        slots = self._some(fault)
        for slot in slots:
            assert slot.sql is not None
            slot.sql.cut()
        return f"of {len(slots)}"

    def _stall_sql(self, fault: Fault) -> str:
        proxy = self._victims(fault)[0].sql
        assert proxy is not None
        proxy.stall()
        time.sleep(fault.seconds)
        proxy.restore()
        return f"for {fault.seconds:.1f} s"

    def _cut_commit(self, fault: Fault) -> str | None:
        """Mostly of outcomes, else of whatever comes next: a claim, a renewal, a checkpoint, a chunk of a batch."""
        is_any = fault.lot < 0.3
        slots = self._cluster.ways if is_any else self._cluster.slots
        proxies = [slot.sql for slot in slots if slot.sql is not None]
        proxy = proxies[int(1000 * fault.lot) % len(proxies)]
        before = proxy.cut_commits
        proxy.cut_after_commit(b"" if is_any else _COPIED)
        deadline = time.monotonic() + _COMMIT_SECONDS
        while proxy.cut_commits == before and time.monotonic() < deadline:
            time.sleep(0.02)
        proxy.forget_commits()
        return None if proxy.cut_commits == before else ("of anything" if is_any else "of outcomes")

    def _sql_away(self, fault: Fault) -> str:
        proxies = [slot.sql for slot in self._cluster.ways if slot.sql is not None]
        for proxy in proxies:
            proxy.refuse()
        time.sleep(fault.seconds)
        for proxy in proxies:
            proxy.restore()
        return f"for {fault.seconds:.1f} s"

    def _restart_sql(self, fault: Fault) -> str:
        server = self._cluster.sql
        assert isinstance(server, Postgres)
        with self._sql_lock:
            server.kill()
            time.sleep(fault.lot)
            server.revive()
        return f"after {fault.lot:.1f} s"

    def _lock_sqlite(self, fault: Fault) -> str:
        server = self._cluster.sql
        assert isinstance(server, Sqlite)
        holder = server.lock(fault.seconds)
        if holder.wait() != 0:
            raise RuntimeError("the process that was to hold the lock failed")
        return f"for {fault.seconds:.1f} s"
