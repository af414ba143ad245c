"""``batchjobs submit``, ``status``, ``list``, ``wait`` and ``cancel``."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs import Client
from batchjobs.cli.run import why_idle
from batchjobs.store import WorkerFigures, WorkerInfo
from batchjobs.types import ShardId
from tests.support.answers import answer, answer_all, failure
from tests.support.batches import create, request
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line

if TYPE_CHECKING:
    from batchjobs.types import Completion, Request

__all__ = ["command_line"]

V1, V2 = ("sha256:" + digit * 16 for digit in "12")
GOOD = '{"prompt":"a","temperature":0}\n{"prompt":"b","temperature":0}\n'


def finish(line: CommandLine, batch: str, failing: int = 0) -> None:
    def make(request: Request) -> Completion:
        return failure(request) if request.index < failing else answer(request)

    store = line.store()
    answer_all(store, batch, make)
    store.close()


def write(path: Path, content: str = GOOD) -> Path:
    path.write_text(content)
    return path


def bodies(line: CommandLine, batch: str) -> list[Any]:
    store = line.store()
    try:
        return [row.request.body for row in store.results(batch)]
    finally:
        store.close()


# --------------------------------------------------------------------------------------------------------- submit


def test_submit_prints_the_id_alone(command_line: CommandLine, tmp_path: Path) -> None:
    done = command_line.run("submit", write(tmp_path / "in.jsonl"))
    assert done.exit_code == 0
    assert done.stderr == ""
    assert len(done.stdout) == 27
    status = command_line.json("status", done.stdout.strip())
    assert (status["name"], status["counts"]["total"], command_line.queue.queued) == ("in.jsonl", 2, 1)


@case("A-in-18")
def test_submit_takes_files_gzip_and_standard_input(command_line: CommandLine, tmp_path: Path) -> None:
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"custom_id":"x","prompt":"c"}\n'))
    batch = command_line.out(
        "submit", write(tmp_path / "a.jsonl"), packed, "-", stdin=b'{"custom_id":"y","prompt":"d"}\n'
    )
    assert [body["prompt"] for body in bodies(command_line, batch.strip())] == ["a", "b", "c", "d"]
    assert command_line.json_lines("list")[0]["name"] == "a.jsonl and 2 more"


def test_options_fill_what_lines_leave_open(command_line: CommandLine) -> None:
    options = ("--max-tokens", 5, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 3, "--seed", 7, "--stop", "X",
               "--stop", "Y", "--min-p", 0.1, "--n", 2, "--system", "Be brief")  # fmt: skip
    batch = command_line.submit(
        {"prompt": "a"}, {"prompt": "b", "max_tokens": 9, "seed": 1}, {"messages": [{"role": "user", "content": "c"}]},
        options=options,
    )  # fmt: skip
    rest = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 2, "stop": ["X", "Y"]}
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "c"}]
    assert bodies(command_line, batch) == [
        {"prompt": "a", "max_tokens": 5, "seed": 7, **rest},
        {"prompt": "b", "max_tokens": 9, "seed": 1, **rest},
        {"messages": chat, "max_tokens": 5, "seed": 7, **rest},
    ]


def test_lines_are_pinned_to_a_version(command_line: CommandLine) -> None:
    batch = command_line.submit(
        {"prompt": "a", "seed": 1}, {"prompt": "b", "seed": 1, "model_version": "sha256:bbbbbbbbbbbbbbbb"},
        options=("--model-version", "sha256:aaaaaaaaaaaaaaaa", "--key", "k"),
    )  # fmt: skip
    assert [body["model_version"] for body in bodies(command_line, batch)] == [
        "sha256:aaaaaaaaaaaaaaaa",
        "sha256:bbbbbbbbbbbbbbbb",
    ]
    line = json.dumps({"prompt": "a", "seed": 1}).encode()
    other = command_line.run("submit", "-", "--key", "k", "--model-version", V1, stdin=line)
    assert other.exit_code == 2
    assert "'k' was used for batch" in other.stderr
    long = command_line.run("submit", "-", "--model-version", "v" * 201, stdin=line)
    assert (long.exit_code, long.stdout) == (2, "")
    assert "cannot be used: model_version must be sha256: and 16 of the digits 0 to f" in long.stderr


def test_an_impossible_option_is_refused(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--temperature", 3, stdin=GOOD.encode())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "temperature must be from 0 to 2, not 3.0" in done.stderr


@case("A-cli-02")
def test_bad_lines_are_named_and_counted(command_line: CommandLine) -> None:
    content = b"".join(b'{"prompt":"a","x%d":1}\n' % number for number in range(25))
    done = command_line.run("submit", "-", stdin=content)
    assert (done.exit_code, done.stdout) == (2, "")
    shown = done.stderr.splitlines()
    assert shown[0].startswith('line 1: unknown field "x0"; accepted: best_of, ')
    assert shown[19].startswith('line 20: unknown field "x19"; ')
    assert shown[20:] == [
        "... and 5 more; --json prints all of them",
        "batchjobs: standard input: 25 invalid lines; nothing was stored",
    ]
    assert command_line.json_lines("list") == []


@case("A-cli-02")
def test_bad_lines_as_json_are_all_there(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--json", stdin=b"null\n" * 30)
    assert done.exit_code == 2
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [error["line"] for error in errors] == list(range(1, 31))
    assert errors[0] == {
        "line": 1,
        "message": "each line must be a JSON object, not null",
        "field": None,
        "custom_id": None,
        "code": "invalid_request",
        "source": None,
    }


def test_skipped_lines_are_told_and_become_failures(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--on-invalid", "skip", stdin=b'{"prompt":"a"}\nnull\n')
    assert done.exit_code == 0
    assert "line 2: each line must be a JSON object, not null\n" in done.stderr
    assert "1 of 2 lines were invalid; they are failed requests of the batch\n" in done.stderr
    status = command_line.json("status", done.stdout.strip())
    assert (status["counts"]["queued"], status["counts"]["failed"]) == (1, 1)
    assert status["failures"] == {"invalid_request": 1}


def test_submit_as_json(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--json", "--key", "k", stdin=GOOD.encode())
    made = json.loads(done.stdout)
    assert made == {"id": made["id"], "created": True, "requests": 2, "invalid": 0, "queued": True}
    again = command_line.run("submit", "-", "--json", "--key", "k", stdin=GOOD.encode())
    assert json.loads(again.stdout) == {**made, "created": False}


def test_an_unreachable_queue_is_a_warning(command_line: CommandLine) -> None:
    command_line.queue.broken = True
    done = command_line.run("submit", "-", stdin=GOOD.encode())
    assert (done.exit_code, len(done.stdout)) == (0, 27)
    assert done.stderr.startswith("warning: the batch is stored, but not queued yet: the Redis at h cannot be reached")


def test_a_key_with_other_content_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    first = command_line.out("submit", write(tmp_path / "1"), "--key", "k")
    assert command_line.out("submit", write(tmp_path / "2"), "--key", "k") == first
    done = command_line.run("submit", write(tmp_path / "3", GOOD * 2), "--key", "k")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'k' was used for batch" in done.stderr


@case("A-in-16")
def test_another_model_in_the_lines_is_noted(command_line: CommandLine) -> None:
    line = json.dumps({"prompt": "a", "model": "gpt-x"}).encode()
    done = command_line.run("submit", "-", "--model", "mine", stdin=line)
    assert done.stderr == 'note: the lines name the model "gpt-x"; the batch runs on mine\n'
    assert command_line.run("submit", "-", "--model", "gpt-x", stdin=line).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl",), "cannot read none.jsonl: No such file or directory"),
        ((".",), ". is a folder; name a file"),
        (("-", "-"), "standard input (-) can be read only once"),
        (("-", "--timeout", "5"), "--timeout needs --wait or --follow"),
    ],
)
def test_inputs_that_cannot_be_read(command_line: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    done = command_line.run("submit", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@case("A-in-08")
def test_no_requests_name_the_file(command_line: CommandLine, tmp_path: Path) -> None:
    done = command_line.run("submit", write(tmp_path / "in.jsonl", ""))
    assert done.exit_code == 2
    assert f"no requests in {tmp_path / 'in.jsonl'}" in done.stderr


def test_submit_and_wait_ends_like_wait(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--wait", "--timeout", "0.1", stdin=GOOD.encode())
    assert (done.exit_code, len(done.stdout)) == (124, 27)
    assert "did not end within 0.1 s: 2 requests left" in done.stderr


def test_submit_and_follow_shows_plain_lines(command_line: CommandLine) -> None:
    first = command_line.run("submit", "-", "--key", "k", stdin=GOOD.encode())
    finish(command_line, first.stdout.strip())
    done = command_line.run("submit", "-", "--key", "k", "--follow", stdin=GOOD.encode())
    assert (done.exit_code, done.stdout) == (0, first.stdout)
    assert re.fullmatch(r"2 of 2 done, 0 running, 10 tokens, [\d,]+\.\d tokens/s\n", done.stderr)


# --------------------------------------------------------------------------------------------- status, list, wait


def test_status_as_json(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"}, options=("--name", "n", "--queue", "low"))
    status = command_line.json("status", batch)
    assert list(status)[:5] == ["id", "status", "paused", "counts", "tokens"]
    assert (status["id"], status["status"], status["paused"]) == (batch, "queued", False)
    assert status["counts"] == {
        "total": 2, "queued": 2, "running": 0, "completed": 0, "failed": 0, "cancelled": 0, "expired": 0,
    }  # fmt: skip
    assert (status["name"], status["queue"], status["created_at"][-1]) == ("n", "low", "Z")
    finish(command_line, batch, failing=1)
    status = command_line.json("status", batch)
    assert status["status"] == "completed"
    assert status["tokens"] == {"prompt": 10, "completion": 5, "in_progress": 0}
    assert status["failures"] == {"context_length_exceeded": 1}


def test_status_for_people(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    shown = command_line.out("status", batch).splitlines()
    assert shown[0].split() == ["batch", batch]
    assert "requests   2: 2 queued" in shown


def test_while_a_batch_runs_its_speed_is_that_of_the_busy_workers(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    store = command_line.store()
    for name, state, speed in (("w1", "busy", 1000.25), ("w2", "busy", 34.5), ("w3", "idle", 7.0), ("w4", "busy", 5.0)):
        store.register_worker(
            WorkerInfo(name=name, host="h", pid=5, device="cpu", dtype="float32", model="tiny", model_version="v")
        )
        store.beat(name, WorkerFigures(state=state, tokens_per_second=speed))
    with store._database.writing() as connection:
        connection.exec_driver_sql("UPDATE workers SET heartbeat_at = heartbeat_at - 100 WHERE name = 'w4'")
    assert command_line.json("status", batch)["tokens_per_second"] is None
    store.claim([ShardId(batch, 0)], "w1", 3600)
    assert command_line.json("status", batch)["tokens_per_second"] == 1034.8
    assert "speed      1,034.8 tokens/s" in command_line.out("status", batch).splitlines()
    assert [row["tokens_per_second"] for row in command_line.json_lines("list")] == [1034.8]
    for name in ("w1", "w2"):
        store.retire_worker(name, "stopped")
    assert command_line.json("status", batch)["tokens_per_second"] is None
    store.close()


def test_list_shows_the_newest_first(command_line: CommandLine) -> None:
    done = command_line.run("list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no batches yet" in done.stderr
    made = [command_line.submit({"prompt": "a"}) for _ in range(3)]
    assert [status["id"] for status in command_line.json_lines("list")] == made[::-1]
    assert [status["id"] for status in command_line.json_lines("list", "--limit", 1)] == made[2:]
    assert command_line.out("list").count("queued") == 3


@pytest.mark.parametrize(("failing", "code"), [(0, 0), (1, 5)])
@case("A-ctx-01")
def test_wait_tells_failures_by_its_exit_code(command_line: CommandLine, failing: int, code: int) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    finish(command_line, batch, failing)
    done = command_line.run("wait", batch)
    assert (done.exit_code, done.stdout) == (code, "")
    assert ("1 request of 2 failed: 1 context_length_exceeded" in done.stderr) == bool(failing)


def test_wait_ends_in_time(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"})
    assert command_line.run("wait", batch, "--timeout", "0").exit_code == 124


# --------------------------------------------------------------------------------------------------------- cancel


def test_a_cancelled_batch_ends_with_6(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    done = command_line.run("cancel", batch, "--yes")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"batch {batch}: 2 cancelled, 0 completed\n"
    assert command_line.queue.woken == 1
    waited = command_line.run("wait", batch)
    assert waited.exit_code == 6
    assert "was cancelled" in waited.stderr
    assert command_line.json("cancel", batch, "--yes")["status"] == "cancelled"


def test_what_was_never_submitted_in_full_is_discarded(command_line: CommandLine) -> None:
    with Client(home=command_line.home) as client:
        batch = create(client.store)
        client.store.add_requests(batch, [request(0), request(1)])
    done = command_line.run("cancel", batch, "--yes", "--json")
    said = f"batch {batch} was never submitted in full: 2 requests arrived; it is discarded, nothing of it ran\n"
    assert (done.exit_code, json.loads(done.stdout)["status"], done.stderr) == (0, "discarded", said)
    assert command_line.run("status", batch).exit_code == 4


def test_one_request_is_cancelled(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"custom_id": "q", "prompt": "b"})
    made = command_line.json("cancel", "--request", f"{batch}/1", "--yes")
    assert made == {"batch_id": batch, "index": 1, "custom_id": "q", "status": "cancelled"}
    assert command_line.json("status", batch)["counts"]["queued"] == 1
    assert command_line.run("cancel", "--request", batch).exit_code == 2
    assert command_line.run("cancel", batch, "--request", f"{batch}/1").exit_code == 2


@case("A-eng-06")
def test_a_request_that_had_ended_is_told_to_be_too_late(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    assert command_line.run("cancel", "--request", f"{batch}/0", "--yes").stderr == f"request {batch}/0: cancelled\n"
    again = command_line.run("cancel", "--request", f"{batch}/0", "--yes")
    assert (again.exit_code, again.stderr) == (0, f"request {batch}/0: it was cancelled before\n")
    finish(command_line, batch)
    late = command_line.run("cancel", "--request", f"{batch}/1", "--yes")
    assert late.stderr == f"request {batch}/1: too late to cancel, it had ended before: completed\n"
    assert command_line.json("cancel", "--request", f"{batch}/1", "--yes")["status"] == "completed"


@case("A-eng-06")
def test_cancel_waits_for_what_the_worker_makes_of_it(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the order or the answer came first, the store decides, and the command says it."""
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"}, options=("--shard-size", 1))
    store = command_line.store()
    leases = store.claim([ShardId(batch, 0), ShardId(batch, 1)], "w1", 3600)
    held = "; it is still with a worker, which ends it within seconds if it lives\n"
    assert command_line.run("cancel", "--request", f"{batch}/0").stderr == f"request {batch}/0: running{held}"
    store.register_worker(
        WorkerInfo(name="w1", host="h", pid=5, device="cpu", dtype="float32", model="m", model_version="v")
    )

    def woken() -> None:
        for lease in leases:
            store.record([(lease, answer(request)) for request in store.pending_requests(lease)][:1])

    monkeypatch.setattr(command_line.queue, "wake", woken)
    late = command_line.run("cancel", "--request", f"{batch}/0")
    assert late.stderr == f"request {batch}/0: too late to cancel, it had ended before: completed\n"
    assert command_line.run("cancel", batch).stderr == f"batch {batch}: 0 cancelled, 2 completed\n"
    store.close()


def test_cancel_says_what_a_worker_still_holds(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"}, options=("--shard-size", 1))
    store = command_line.store()
    store.claim([ShardId(batch, 0)], "w1", 3600)
    store.close()
    assert command_line.run("cancel", batch).stderr == (
        f"batch {batch}: 1 cancelled, 0 completed; 1 request is still with a worker, which ends it within seconds "
        "if it lives\n"
    )


def test_nothing_is_asked_where_nobody_can_answer(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"})
    assert command_line.run("cancel", batch).exit_code == 0


def test_on_a_terminal_cancel_asks_first(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.cli.asking.is_asked", lambda: True)
    batch = command_line.submit({"prompt": "a"})
    refused = command_line.run("cancel", batch, stdin=b"n\n")
    assert refused.exit_code == 130
    assert f"Cancel 1 request of batch {batch}?" in refused.stderr
    assert command_line.json("status", batch)["status"] == "queued"
    assert command_line.run("cancel", batch, stdin=b"y\n").exit_code == 0
    assert command_line.json("status", batch)["status"] == "cancelled"


def test_an_empty_key_is_refused(command_line: CommandLine) -> None:
    done = command_line.run("submit", "-", "--key", "", stdin=GOOD.encode())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "batchjobs: --key must not be empty; leave it out for a batch without a key\n"


def test_status_says_when_nobody_can_work_on_a_batch(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, options=("--model", "/models/big.gguf"))
    assert command_line.json("status", batch)["note"] == "no worker is running; `batchjobs worker` starts one"
    store = command_line.store()
    shown = {"host": "h", "pid": 5, "device": "cpu", "dtype": "float32", "model_version": "v"}
    store.register_worker(WorkerInfo(name="w1", model="small", **shown))  # type: ignore[arg-type]
    store.register_worker(WorkerInfo(name="w2", model="big", serves=("big", "/other/big.gguf"), **shown))  # type: ignore[arg-type]
    missing = "note: no living worker has the model that the batch asks for, /models/big.gguf (there is "
    assert f"{missing}/other/big.gguf, big, small); `batchjobs worker --model` or" in (
        command_line.run("status", batch).stderr
    )
    store.register_worker(WorkerInfo(name="w3", model="big", serves=("big", "/models/big.gguf"), **shown))  # type: ignore[arg-type]
    assert command_line.json("status", batch)["note"] is None
    store.close()


def test_run_says_when_its_worker_leaves_the_batch_alone(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, options=("--model-version", V2))
    with Client(home=command_line.home) as client:
        info = client.store.batch(batch)
        assert why_idle(client, info) is None, "its worker may be loading still"
        client.store.register_worker(
            WorkerInfo(name="w1", host="h", pid=5, device="cpu", dtype="float32", model="m", model_version=V1)
        )
        assert str(why_idle(client, info)).startswith(f"requests of the batch are pinned to version {V2} of the model")
        client.store.claim([ShardId(batch, 0)], "w1", 60)
        assert why_idle(client, client.store.batch(batch)) is None


def test_status_says_which_pinned_version_is_missing(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b", "model_version": V2})
    store = command_line.store()
    shown = {"host": "h", "pid": 5, "device": "cpu", "dtype": "float32", "model": "m"}
    store.register_worker(WorkerInfo(name="w1", model_version=V1, **shown))  # type: ignore[arg-type]
    assert command_line.json("status", batch)["note"] == (
        f"requests of the batch are pinned to version {V2} of the model, and no living worker has it (there is {V1}); "
        "`batchjobs model list` says what it was loaded from"
    )
    store.register_worker(WorkerInfo(name="w2", model_version=V2, **shown))  # type: ignore[arg-type]
    assert command_line.json("status", batch)["note"] is None
    store.pause_worker("w2", by="ada@n1", reason="rest")
    note = command_line.json("status", batch)["note"]
    assert note.startswith("the worker that could go on with it is paused (w2), by ada@n1 since ")
    assert note.endswith("Z: rest; `batchjobs resume --worker w2` lifts that")
    store.resume_worker("w2")
    assert command_line.json("status", batch)["note"] is None
    store.close()
