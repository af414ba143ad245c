"""``batchjobs retry``, and the earlier attempts in ``batchjobs show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchjobs import Client
from batchjobs.errors import UsageError
from batchjobs.types import ShardId
from tests.support.answers import answer, answer_all, failure
from tests.support.batches import FOREVER, progress
from tests.support.command_line import CommandLine, command_line

if TYPE_CHECKING:
    from pathlib import Path

    from batchjobs.types import Completion, Request

__all__ = ["command_line"]


def outcome(request: Request) -> Completion:
    prompt = str(request.body.get("prompt", ""))
    return failure(request) if prompt == "fail" else answer(request, prompt)


def ended(line: CommandLine, *prompts: str, options: tuple[object, ...] = ()) -> str:
    """The id of a batch in which the prompts "fail" have failed."""
    batch = line.submit(*({"prompt": prompt} for prompt in prompts), options=options)
    answer_again(line, batch, outcome)
    return batch


def answer_again(line: CommandLine, batch: str, make: object = answer) -> None:
    """Answers what is open. The command must have opened the batch already."""
    store = line.store()
    answer_all(store, batch, make)  # type: ignore[arg-type]
    store.close()


def counts(line: CommandLine, batch: str) -> dict[str, int]:
    return {name: count for name, count in line.json("status", batch)["counts"].items() if count}


def test_failed_requests_run_again_and_answers_stay(command_line: CommandLine) -> None:
    batch = ended(command_line, "a", "fail", "b", "fail", "c", options=("--shard-size", 2))
    before = {row["index"]: row for row in command_line.json_lines("results", batch)}
    command_line.queue.queued = 0
    done = command_line.run("retry", batch)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"batch {batch}: 2 requests run again\n"
    assert command_line.queue.queued == 2, "the shards of the two, and not the third"
    assert counts(command_line, batch) == {"total": 5, "queued": 2, "completed": 3}
    answer_again(command_line, batch)
    assert command_line.run("wait", batch).exit_code == 0
    after = {row["index"]: row for row in command_line.json_lines("results", batch)}
    assert {index: after[index] for index in (0, 2, 4)} == {index: before[index] for index in (0, 2, 4)}
    assert [after[index]["status"] for index in (1, 3)] == ["completed", "completed"]


def test_json_says_the_same(command_line: CommandLine) -> None:
    batch = ended(command_line, "fail", "a")
    made = command_line.json("retry", batch)
    assert made == {"id": batch, "retried": 1, "refused": 0, "held": 0, "queued": True}


def test_nothing_failed_is_no_error(command_line: CommandLine) -> None:
    batch = ended(command_line, "a")
    command_line.queue.queued = 0
    done = command_line.run("retry", batch)
    assert (done.exit_code, done.stderr) == (0, f"batch {batch}: no request has failed; nothing to run again\n")
    assert command_line.queue.queued == 0
    assert counts(command_line, batch) == {"total": 1, "completed": 1}


def test_refused_lines_never_run(command_line: CommandLine) -> None:
    lines = ({"prompt": "fail"}, {"prompt": "a", "temperature": -1}, {"prompt": 5})
    batch = command_line.submit(*lines, options=("--on-invalid", "skip"))
    answer_again(command_line, batch, outcome)
    done = command_line.run("retry", batch)
    assert done.stderr == (
        f"batch {batch}: 1 request runs again; 2 were refused lines, which can never run: mend and submit them anew\n"
    )
    assert counts(command_line, batch) == {"total": 3, "queued": 1, "failed": 2}
    answer_again(command_line, batch)
    again = command_line.run("retry", batch)
    assert again.exit_code == 0
    assert again.stderr.startswith(f"batch {batch}: nothing runs again; 2 were refused lines")


def test_what_a_worker_holds_is_left_for_later(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "fail"}, {"prompt": "a"})
    store = command_line.store()
    [lease] = store.claim([ShardId(batch, 0)], "w1", FOREVER)
    first, second = store.pending_requests(lease)
    store.record([(lease, failure(first))])
    done = command_line.run("retry", batch)
    assert done.exit_code == 0
    assert done.stderr == (
        f"batch {batch}: nothing runs again; 1 failed request left, because a worker holds its shard right now: "
        "give the command again later\n"
    )
    made = command_line.json("retry", batch)
    assert (made["held"], made["queued"]) == (1, False)
    store.record([(lease, answer(second))])
    store.close()
    assert command_line.json("retry", batch)["retried"] == 1


def test_without_redis_it_warns_and_the_requests_are_there(command_line: CommandLine) -> None:
    batch = ended(command_line, "fail")
    command_line.queue.broken = True
    done = command_line.run("retry", batch)
    assert done.exit_code == 0
    assert done.stderr == (
        "warning: the requests are set back, but not queued yet: the Redis at h cannot be reached. "
        f"They run once a worker reaches the queue\nbatch {batch}: 1 request runs again\n"
    )
    store = command_line.store()
    assert [shard for shard, _ in store.claimable(10)] == [ShardId(batch, 0)]
    store.close()


def test_only_shards_of_this_batch_are_queued(command_line: CommandLine) -> None:
    ended(command_line, "x")
    batch = ended(command_line, "fail")
    command_line.submit({"prompt": "y"}, {"prompt": "z"}, options=("--shard-size", 1))
    command_line.queue.queued = 0
    command_line.out("retry", batch)
    assert command_line.queue.queued == 1


def test_exit_codes(command_line: CommandLine, tmp_path: Path) -> None:
    batch = ended(command_line, "fail")
    unknown = command_line.run("retry", "01J8ZK3T5Q0000000000000000")
    assert unknown.exit_code == 4
    assert "no batch '01J8ZK3T5Q0000000000000000'" in unknown.stderr
    waiting = command_line.submit({"prompt": "a"})
    command_line.out("cancel", waiting, "--yes")
    refused = command_line.run("retry", waiting)
    assert refused.exit_code == 2
    assert "cancelled" in refused.stderr
    away = command_line.run("--database-url", "postgresql://u@127.0.0.1:1/db", "retry", batch)
    assert away.exit_code == 3
    assert "127.0.0.1:1" in away.stderr


def test_show_lists_earlier_attempts(command_line: CommandLine) -> None:
    batch = ended(command_line, "fail", "a")
    assert command_line.json("show", f"{batch}/0")["earlier_attempts"] == []
    command_line.out("retry", batch)
    waiting = [" ".join(line.split()) for line in command_line.out("show", f"{batch}/0").splitlines()]
    assert "status queued" in waiting
    assert "earlier attempt status ended by worker finished" in waiting
    assert any(line.startswith("1 failed context_length_exceeded: too long") for line in waiting)
    answer_again(command_line, batch)
    found = command_line.json("show", f"{batch}/0")
    assert found["status"] == "completed"
    (earlier,) = found["earlier_attempts"]
    assert (earlier["attempt"], earlier["choice"], earlier["status"]) == (1, 0, "failed")
    assert earlier["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert command_line.json("show", f"{batch}/1")["earlier_attempts"] == []
    assert "earlier attempt" not in command_line.out("show", f"{batch}/1")


def test_the_client_offers_it_too(command_line: CommandLine) -> None:
    batch_id = ended(command_line, "fail", "a")
    with Client() as client:
        batch = client.batch(batch_id)
        done = batch.retry_failed()
        assert (done.requests, done.refused, done.held, done.warning) == (1, 0, 0, None)
        assert batch.counts.queued == 1
        batch.cancel()
        with pytest.raises(UsageError):
            batch.retry_failed()


def test_the_client_warns_without_redis(command_line: CommandLine) -> None:
    batch_id = ended(command_line, "fail")
    command_line.queue.broken = True
    with Client() as client, pytest.warns(UserWarning, match="set back, but not queued yet"):
        assert client.batch(batch_id).retry_failed().requests == 1


def test_show_tells_how_far_a_request_is(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a long one", "n": 2, "temperature": 1}, {"prompt": "another"})
    store = command_line.store()
    (lease,) = store.claim([ShardId(batch, 0)], "w1", FOREVER)
    store.save_checkpoints([(lease, 0, (progress(2), progress(3, choice=1)))], "v1")
    store.close()
    shown = command_line.out("show", f"{batch}/0").splitlines()
    assert shown[-5:] == ["2 tokens so far of choice 0", " t0 t1", "", "3 tokens so far of choice 1", " t0 t1 t2"]
    assert command_line.json("show", f"{batch}/0")["so_far"] == [
        {"choice": 0, "tokens": 2, "text": " t0 t1", "version_spans": []},
        {"choice": 1, "tokens": 3, "text": " t0 t1 t2", "version_spans": []},
    ]
    assert command_line.json("show", f"{batch}/1")["so_far"] == []
