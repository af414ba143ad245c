"""``batchjobs pause``, ``resume``, ``model``, ``drain`` and ``workers``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.cli.model import update_sentence
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line
from tests.support.orders import UPDATED, VERSION, answer_orders, carried_out, drained, register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.store import Store
    from batchjobs.types import Command

__all__ = ["command_line"]


@pytest.fixture
def store(command_line: CommandLine) -> Iterator[Store]:
    store = command_line.store()
    yield store
    store.close()


# -------------------------------------------------------------------------------------------------- pause, resume


@case("A-eng-03")
def test_a_batch_is_paused_and_resumed(command_line: CommandLine, store: Store) -> None:
    """Status shows who paused it, when and why."""
    register(store, "w1")
    batch = command_line.submit({"prompt": "a"})
    done = command_line.run("pause", batch, "--reason", "new weights\x1b[2J")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"batch {batch} is paused until `batchjobs resume {batch}`\n"
    assert command_line.queue.woken == 1
    status = command_line.json("status", batch)
    assert status["paused"] is True
    assert (status["pause"]["reason"], status["pause"]["release"]) == ("new weights\x1b[2J", False)
    assert status["pause"]["at"].endswith("Z")
    shown = [" ".join(line.split()) for line in command_line.out("status", batch).splitlines()]
    assert shown[1] == "status queued (paused)"
    assert shown[2].startswith(f"paused by {status['pause']['by']} since ")
    assert shown[2].endswith("Z: new weights\\x1b[2J")
    assert "queued (paused)" in command_line.out("list")
    again = command_line.run("pause", batch, "--release")
    assert again.stderr.startswith(f"batch {batch} was paused before, and stays so: by {status['pause']['by']} since ")
    assert "(with --release): new weights" in again.stderr
    assert command_line.run("resume", batch).stderr == f"batch {batch} goes on\n"
    assert command_line.run("resume", batch).stderr == f"batch {batch} was not paused\n"
    assert command_line.json("resume", batch)["paused"] is False
    assert "paused" not in command_line.out("status", batch)


def test_a_second_pause_says_what_it_changed(command_line: CommandLine, store: Store) -> None:
    batch = command_line.submit({"prompt": "a"})
    command_line.run("pause", batch, "--reason", "first")
    again = command_line.run("pause", batch, "--reason", "second", "--release").stderr
    assert again.endswith("(with --release): first; what runs goes back to the queue now; the first reason is kept\n")


def test_what_has_ended_is_not_paused(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"})
    command_line.out("cancel", batch, "--yes")
    done = command_line.run("pause", batch)
    assert (done.exit_code, done.stderr) == (0, f"batch {batch} is cancelled: there is nothing to pause\n")


def test_workers_are_paused_and_resumed(command_line: CommandLine, store: Store) -> None:
    register(store, "w1", "w2", state="busy")
    done = command_line.run("pause", "--worker", "w1", "--worker", "w2", "--reason", "hot")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"worker {name} is paused until `batchjobs resume --worker {name}`" for name in ("w1", "w2")
    ]
    shown = command_line.run("workers")
    assert shown.stdout.count("Z: hot") == 2
    assert shown.stderr == ""
    assert [row["pause"]["reason"] for row in command_line.json_lines("workers")] == ["hot", "hot"]
    (row,) = command_line.json_lines("pause", "--worker", "w1", "--release")
    assert (row["worker"], row["changed"], row["pause"]["release"]) == ("w1", False, True)
    assert command_line.json_lines("resume", "--worker", "w1") == [{"worker": "w1", "changed": True, "pause": None}]
    assert command_line.run("resume", "--worker", "w1").stderr == "worker w1 was not paused\n"


def test_all_workers_are_paused_and_resumed(command_line: CommandLine, store: Store) -> None:
    register(store, "w1")
    done = command_line.run("pause", "--all-workers", "--reason", "hot")
    assert done.stderr == (
        "all workers are paused (1 worker now, and any that starts) until `batchjobs resume --all-workers`\n"
    )
    assert command_line.run("pause", "--all-workers").stderr.startswith(
        "all workers were paused before, and stay so: by "
    )
    register(store, "w2")
    assert all(row["pause"]["reason"] == "hot" for row in command_line.json_lines("workers"))
    assert "note: all workers are paused, by " in command_line.run("workers").stderr
    command_line.out("pause", "--worker", "w1")
    assert command_line.run("resume", "--worker", "w1").stderr.startswith("worker w1 is still paused with all workers")
    command_line.out("pause", "--worker", "w1")
    lifted = command_line.run("resume", "--all-workers")
    assert lifted.stderr == "all workers go on, also w1, paused by name\n"
    assert command_line.run("resume", "--all-workers").stderr == "no worker was paused\n"


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_one_kind_of_thing_is_paused(command_line: CommandLine, store: Store, command: str) -> None:
    for arguments in ((), ("b", "--all-workers"), ("--worker", "w", "--all-workers"), ("b", "--worker", "w")):
        done = command_line.run(command, *arguments)
        assert done.exit_code == 2
        assert "name a batch, or workers with --worker, or --all-workers" in done.stderr
    assert command_line.run(command, "no-batch").exit_code == 4
    missing = command_line.run(command, "--worker", "w9")
    assert (missing.exit_code, missing.stderr) == (
        4,
        "batchjobs: no worker w9; `batchjobs workers` lists those of the last day\n",
    )


# ---------------------------------------------------------------------------------------------------------- model


def test_an_update_says_what_each_worker_did(
    command_line: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(store, "w1", "w2")

    def answer(store: Store, command: Command) -> None:
        if command.worker == "w1":
            carried_out(store, command)
        else:
            store.end_command(command.id, error="layer 3 has another shape")

    given = answer_orders(monkeypatch, answer)
    done = command_line.run("model", "update", "org/model", "--revision", "r1", "--inflight", "keep")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"worker w1: {VERSION} -> sha256:00000000000000bb in place, paused for 0.25 s; "
        "3 unfinished answers go on under the new weights; 2 requests were given back to the queue",
        "batchjobs: worker w2: layer 3 has another shape",
    ]
    assert given[0].arguments == {"model": "org/model", "revision": "r1", "inflight": "keep", "dry_run": False}
    (row,) = command_line.json_lines("model", "update", "m", "--worker", "w1")
    assert (row["worker"], row["error"], row["result"], row["kind"]) == ("w1", None, UPDATED, "update_model")
    assert command_line.run("model", "update", "m", "--worker", "w1").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recomputed": 0, "given_back": 0}, "a -> b in place, paused for 0.25 s"),
        (
            {"is_reload": True, "recomputed": 0, "finished": 1200, "given_back": 0},
            "a -> b by a full reload, paused for 0.25 s; 1,200 unfinished answers were finished by the old model",
        ),
        ({"dry_run": True}, "would change a -> b in place; nothing was changed"),
        (
            {"dry_run": True, "new_version": "a"},
            "would change a -> a in place; it serves that version already; nothing was changed",
        ),
    ],
)
def test_the_sentence_of_an_update(changes: dict[str, Any], sentence: str) -> None:
    assert update_sentence({**UPDATED, "old_version": "a", "new_version": "b", **changes}) == sentence


def test_an_update_for_nobody_ends_with_4(command_line: CommandLine, store: Store) -> None:
    nobody = command_line.run("model", "update", "m")
    assert (nobody.exit_code, nobody.stderr) == (
        4,
        "batchjobs: no worker lives that could be told; `batchjobs worker --model MODEL` starts one\n",
    )
    register(store, "w1")
    assert command_line.run("model", "update", "m", "--worker", "w2").exit_code == 4
    assert store.open_commands("w1") == []


def test_an_update_names_the_batches_that_it_strands(
    command_line: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranded = command_line.submit({"prompt": "a"}, options=("--model", "m"))
    command_line.submit({"prompt": "b"})
    register(store, "w1", serves=("m",))

    def reload(store: Store, command: Command) -> None:
        carried_out(store, command)
        store.change_model("w1", model="n", model_version=UPDATED["new_version"], dtype="float32", serves=["n"])

    answer_orders(monkeypatch, reload)
    done = command_line.run("model", "update", "n")
    assert done.exit_code == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert [note.split(", ")[0] for note in notes] == [
        f"note: batch {stranded}: no living worker has the model that the batch asks for"
    ]


def test_an_update_need_not_be_waited_for(command_line: CommandLine, store: Store) -> None:
    register(store, "w1")
    done = command_line.run("model", "update", "m", "--no-wait", "--json")
    assert (done.exit_code, json.loads(done.stdout)["finished_at"]) == (0, None)
    assert done.stderr == "1 worker told: w1; `batchjobs workers` shows their versions\n"
    late = command_line.run("model", "update", "m", "--timeout", 0)
    assert late.exit_code == 124
    assert "no answer from w1; the order stands" in late.stderr
    assert len(store.open_commands("w1")) == 2
    assert command_line.run("model", "update", "m", "--no-wait", "--timeout", 1).exit_code == 2


def test_an_update_asks_on_a_terminal(command_line: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.cli.asking.is_asked", lambda: True)
    register(store, "w1")
    answer_orders(monkeypatch, carried_out)
    refused = command_line.run("model", "update", "new", stdin=b"n\n")
    assert refused.exit_code == 130
    assert "Change 1 worker (w1) to new?" in refused.stderr
    for arguments, keys in ((("--yes",), b""), (("--dry-run",), b""), ((), b"y\n")):
        assert command_line.run("model", "update", "new", *arguments, stdin=keys).exit_code == 0


def test_versions_are_listed_with_who_serves_them(command_line: CommandLine, store: Store) -> None:
    assert "no worker has served a model yet" in command_line.run("model", "list").stderr
    register(store, "w1", "w2")
    store.register_model_version(VERSION, "m\x1b", "/models/m", "float32", {"parameters": 9})
    store.register_model_version("sha256:old", "m", "/models/old", "float32", {})
    rows = {row["version"]: row for row in command_line.json_lines("model", "list")}
    assert (rows[VERSION]["workers"], rows["sha256:old"]["workers"]) == (["w1", "w2"], [])
    assert (rows[VERSION]["details"], rows[VERSION]["created_at"][-1]) == ({"parameters": 9}, "Z")
    shown = command_line.out("model", "list")
    assert f"{VERSION}  m\\x1b  /models/m" in " ".join(shown.split()).replace(" ", "  ")
    assert "w1, w2" in shown


# ---------------------------------------------------------------------------------------------------------- drain


def test_a_drain_says_what_became_of_the_work(
    command_line: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(store, "w1", "w2", "w3")
    given = answer_orders(monkeypatch, drained)
    done = command_line.run("drain", "w1", "--release")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "worker w1 has ended: 3 requests finished, 1 given back\n"
    assert given[0].arguments == {"release": True}
    assert command_line.json("drain", "w2")["result"] == {"finished": 3, "given_back": 1}
    assert command_line.run("drain", "w1").exit_code == 4


def test_a_drain_need_not_be_waited_for_and_may_fail(
    command_line: CommandLine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(store, "w1")
    store.pause_worker("w1", by="ada@n1", reason="hot")
    told = command_line.run("drain", "w1", "--no-wait")
    assert told.exit_code == 0
    assert "note: worker w1 is paused, by ada@n1 since " in told.stderr
    assert "it finishes nothing until it is resumed, and --release gives its work back\n" in told.stderr
    assert told.stderr.endswith("worker w1 drains; `batchjobs workers` shows when it has ended\n")
    assert "note" not in command_line.run("drain", "w1", "--no-wait", "--release").stderr
    assert command_line.run("drain", "w1", "--timeout", 0).exit_code == 124
    assert command_line.run("drain", "w1", "--timeout", 1, "--no-wait").exit_code == 2
    answer_orders(monkeypatch, lambda store, command: store.end_command(command.id, error="it broke"))
    failed = command_line.run("drain", "w1", "--release")
    assert (failed.exit_code, failed.stderr) == (1, "batchjobs: worker w1: it broke\n")
