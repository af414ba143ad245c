"""``batchjobs results`` in a process of its own: pipes that close, files that fill a disk, and lines that come one by
one while the batch runs."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from batchjobs.cli import formats
from tests.support.batches import answer, claim, create, failure, finish, request, submit
from tests.support.cases import case
from tests.support.odd_answers import odd_batch
from tests.support.running import sqlite
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.store import Store

ROOT = Path(__file__).parents[2]
FORMS = ("jsonl", "csv", "parquet", "table")
pytestmark = sqlite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def big(store: Store) -> str:
    """A finished batch whose results take about 6 MB as lines, with texts that can hardly be compressed."""
    noise = random.Random(1)
    batch_id = create(store, shard_size=2000)
    store.add_requests(batch_id, [request(index) for index in range(2000)])
    store.open_batch(batch_id)
    lease = claim(store, batch_id)
    store.record([(lease, answer(index, tokens=60, text=noise.randbytes(40).hex())) for index in range(2000)])
    return batch_id


@contextmanager
def results(
    store: Store, *arguments: object, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which is killed if it has not ended in time."""
    own = {"BATCHJOBS_DATABASE_URL": store.url_without_password, "PYTHONUNBUFFERED": "1"}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, **options}
    command = [sys.executable, "-m", "batchjobs", "results", *map(str, arguments)]
    with subprocess.Popen(command, env={**os.environ, **own, **(environment or {})}, **given) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def line_of(stream: IO[bytes] | None) -> dict[str, Any]:
    assert stream is not None
    found: dict[str, Any] = json.loads(stream.readline())
    return found


def head(process: subprocess.Popen[bytes]) -> bytes:
    """Reads a line, closes the pipe, and returns the line; as `head -1` does."""
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    return line


@case("A-cli-01")
@pytest.mark.parametrize("form", FORMS)
def test_whoever_has_read_enough_closes_the_pipe(store: Store, big: str, form: str) -> None:
    with results(store, big, "--format", form) as process:
        line = head(process)
        said = process.stderr.read() if process.stderr else b""
        assert (process.wait(30), said) == (141, b"")
    assert line.startswith({"csv": b"custom_id,", "parquet": b"PAR1", "table": b"index"}.get(form, b'{"'))
    assert line.count(b"\n") <= 1


@case("A-out-04")
@pytest.mark.parametrize(
    ("options", "most"),
    [(("--format", "csv", "-o"), 100_000), (("--format", "parquet", "-o"), 40_000), (("--sqlite",), 600_000)],
)
def test_a_full_disk_leaves_the_old_file_and_no_litter(
    store: Store, big: str, folder: Path, options: tuple[str, ...], most: int
) -> None:
    target = folder / "answers"
    target.write_text("old")
    limit = (most, resource.RLIM_INFINITY)  # stands for a disk
    with results(
        store, big, *options, target, "--force", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    ) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.startswith(f"batchjobs: {target}: ".encode())
    assert b"Traceback" not in said
    assert [path.name for path in folder.iterdir()] == ["answers"]
    assert target.read_text() == "old"


def test_what_stdout_goes_to_is_no_file_for_failures(store: Store, folder: Path) -> None:
    batch_id = submit(store, 1)
    with open(folder / "out", "wb") as out, results(store, batch_id, "--errors", folder / "out", stdout=out) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert b"is where standard output goes; choose another name for the failures" in said


def test_lines_are_the_same_in_every_locale(store: Store) -> None:
    batch_id = odd_batch(store)
    wanted = io.BytesIO()
    formats.write(store.results(batch_id), "jsonl", wanted)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with results(store, batch_id, environment=plain) as process:
        found, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert found == wanted.getvalue()
    assert "☃" in found.decode()


def test_a_named_pipe_is_written_to(store: Store, folder: Path) -> None:
    batch_id = submit(store, 2)
    finish(store, claim(store, batch_id))
    os.mkfifo(folder / "pipe")
    with results(store, batch_id, "-o", folder / "pipe") as process:
        lines = (folder / "pipe").read_text().splitlines()
        assert process.wait(30) == 0
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    assert (folder / "pipe").is_fifo()


# --------------------------------------------------------------------------------------------------------- --follow


@case("A-out-01")
def test_lines_come_one_by_one_in_input_order(store: Store) -> None:
    """What ended before its turn waits for it. The exit code is that of `wait`."""
    batch_id = submit(store, 4, shard_size=2)
    first, second = claim(store, batch_id, 0), claim(store, batch_id, 1)
    store.record([(first, answer(0))])
    finish(store, second)
    with results(store, batch_id, "--follow") as process:
        assert line_of(process.stdout)["index"] == 0
        assert process.poll() is None
        store.record([(first, failure(1))])
        assert [line_of(process.stdout)["index"] for _ in range(3)] == [1, 2, 3]
        rest, said = process.communicate(timeout=30)
    assert (process.returncode, rest) == (5, b"")
    assert said.decode().splitlines() == [
        "note: no worker is running; `batchjobs worker` starts one",
        "batchjobs: 1 request of 4 failed: 1 context_length_exceeded",
    ]


@case("A-cli-01")
def test_a_reader_that_goes_is_noticed_before_the_next_line(store: Store) -> None:
    batch_id = submit(store, 2)
    store.record([(claim(store, batch_id), answer(0))])
    with results(store, batch_id, "--follow") as process:
        assert head(process).startswith(b'{"custom_id":"request-0"')
        assert process.wait(30) == 141


def test_ctrl_c_ends_the_following_and_leaves_the_batch_alone(store: Store, folder: Path) -> None:
    batch_id = submit(store, 2)
    store.pause_batch(batch_id, by="ann@desk", reason="lunch")
    with results(store, batch_id, "--follow", "-o", folder / "answers") as process:
        assert process.stderr is not None
        assert b"the batch is paused by ann@desk" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert b"Traceback" not in process.stderr.read()
    assert list(folder.iterdir()) == []
    assert store.batch(batch_id).counts.queued == 2


@case("A-out-02")
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_followed_file_appears_whole_at_the_end(store: Store, folder: Path, form: str) -> None:
    batch_id = submit(store, 2)
    lease = claim(store, batch_id)
    store.record([(lease, answer(0))])
    with results(store, batch_id, "--follow", "--format", form, "-o", folder / "answers") as process:
        eventually(lambda: list(folder.glob(".answers*.part")), "it has begun", 30)
        assert not (folder / "answers").exists()
        store.record([(lease, answer(1))])
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert [path.name for path in folder.iterdir()] == ["answers"]
    assert (folder / "answers").read_bytes()[:4] in (b"cust", b"PAR1")


def test_a_cancelled_batch_ends_it(store: Store) -> None:
    batch_id = submit(store, 2)
    store.cancel_batch(batch_id)
    with results(store, batch_id, "--follow", "--format", "openai") as process:
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (6, b"")
    assert "2 requests without an answer left out; --errors FILE writes them" in said.decode()
    assert "was cancelled; 0 requests completed before" in said.decode()


@pytest.mark.parametrize(
    ("closed", "expected"),
    [(">&-", (1, b"", b"batchjobs: standard output: Bad file descriptor\n")), ("2>&-", (0, None, b""))],
)
def test_a_stream_that_the_shell_closed(store: Store, closed: str, expected: tuple[int, bytes | None, bytes]) -> None:
    """No traceback; and no message gets among the data in the place of the stream that is not there."""
    batch_id = submit(store, 2)
    store.record([(claim(store, batch_id), answer(0))])  # one is left, so that a note is due on stderr
    command = f'exec "$@" {closed}'
    program = [sys.executable, "-m", "batchjobs", "results", batch_id, "--format", "csv"]
    own = os.environ | {"BATCHJOBS_DATABASE_URL": store.url_without_password}
    done = subprocess.run(["bash", "-c", command, "bash", *program], env=own, cwd=ROOT, capture_output=True)
    code, out, err = expected
    assert (done.returncode, done.stderr) == (code, err)
    assert done.stdout == out if out is not None else done.stdout.startswith(b"custom_id,index")
    assert done.stdout.count(b"\n") == (0 if out is not None else 2)
