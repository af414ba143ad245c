"""``batchjobs follow``, and what ``status`` draws on a terminal; how much longer a batch takes."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchjobs.cli.estimate import eta_seconds, tokens_left, tokens_per_second
from batchjobs.store import WorkerFigures
from batchjobs.types import BatchStatus, Counts, ShardId, TokenCounts
from tests.support.answers import answer, answer_all, failure
from tests.support.batches import progress
from tests.support.command_line import CommandLine, command_line
from tests.support.orders import register
from tests.support.terminal import OnTerminal
from tests.support.waiting import eventually
from tests.unit.test_progress import INFO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchjobs.types import BatchInfo

__all__ = ["command_line"]

NO_REDIS = "redis://127.0.0.1:1/0"


# ------------------------------------------------------------------------------------------------------- estimate


def running(done: int, tokens: int, in_progress: int = 0, *, total: int = 10, **changes: object) -> BatchInfo:
    counts = Counts(total=total, completed=done, running=min(2, total - done), queued=max(total - done - 2, 0))
    told = TokenCounts(completion=tokens, in_progress=in_progress)
    return replace(INFO, counts=counts, tokens=told, **changes)  # type: ignore[arg-type]


def test_time_left_is_counted_in_tokens_at_the_speed_of_the_moment() -> None:
    assert tokens_left(running(4, 400)) == 600
    assert eta_seconds(running(4, 400), 50.0) == 12.0
    # What unfinished answers have is not needed again, and the long ones among them raise the mean.
    assert tokens_left(running(4, 400, 80)) == 480 / 4 * 6 - 80
    # One that is longer than the others needs more, not less than nothing.
    assert tokens_left(running(9, 90, 900)) == pytest.approx((90 + 900) / 9 / 2)
    assert tokens_left(running(10, 1000)) == 0


def test_time_left_is_unknown_without_an_answer_or_a_speed() -> None:
    assert eta_seconds(running(0, 0, 50), 50.0) is None
    assert eta_seconds(running(4, 400), None) is None
    assert eta_seconds(running(4, 400), 0.0) is None
    assert eta_seconds(running(4, 400, paused=True), 50.0) is None
    assert eta_seconds(running(4, 400, status=BatchStatus.QUEUED), 50.0) is None
    refused = replace(INFO, counts=Counts(total=10, failed=4, queued=6))
    assert eta_seconds(refused, 50.0) is None


def looks_at(lengths: list[int], slots: int) -> Iterator[tuple[BatchInfo, int]]:
    """A batch of answers of these lengths, ``slots`` at a time, as it looks every ten steps once one has finished; with
    the tokens that it still needs."""
    made = [0] * len(lengths)
    for step in itertools.count(1):
        begun = [i for i, length in enumerate(lengths) if made[i] < length][:slots]
        if not begun:
            return
        for i in begun:
            made[i] += 1
        ended = [i for i, length in enumerate(lengths) if made[i] == length]
        open_ones = [i for i in begun if made[i] < lengths[i]]
        if step % 10 or not ended or not open_ones:
            continue
        queued = len(lengths) - len(ended) - len(open_ones)
        counts = Counts(total=len(lengths), completed=len(ended), running=len(open_ones), queued=queued)
        tokens = TokenCounts(completion=sum(made[i] for i in ended), in_progress=sum(made[i] for i in open_ones))
        yield replace(INFO, counts=counts, tokens=tokens), sum(lengths) - sum(made)


@pytest.mark.parametrize("kind", ["varied", "bounded", "alike"])
def test_short_answers_that_end_first_do_not_make_it_too_short(kind: str) -> None:
    """How many times too much or too little it says, compared with what the mean of the finished ones says."""
    draw = random.Random(1)
    lengths = {
        "varied": [1 + int(draw.expovariate(1 / 100)) for _ in range(200)],
        "bounded": [draw.randint(1, 200) for _ in range(200)],
        "alike": [100] * 200,
    }[kind]
    ours, simple = [], []
    for info, left in looks_at(lengths, 32):
        told = tokens_left(info)
        assert told is not None
        mean = info.tokens.completion / info.counts.completed
        whole = mean * (info.counts.queued + info.counts.running)
        ours.append(abs(math.log(told / left)))
        simple.append(abs(math.log(max(whole - info.tokens.in_progress, 1) / left)))
    assert len(ours) > 30
    assert statistics.mean(ours) < (0.5 * statistics.mean(simple) if kind != "alike" else 0.5)


def test_a_paused_batch_has_no_speed() -> None:
    assert tokens_per_second(running(4, 400), 50.04) == 50.0
    assert tokens_per_second(running(4, 400, paused=True), 50.0) is None
    assert tokens_per_second(running(4, 400, paused=True)) is None


def test_tokens_of_unfinished_answers_count(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    store = command_line.store()
    (lease,) = store.claim([ShardId(batch, 0)], "w1", 3600)
    store.record([(lease, answer(request)) for request in store.pending_requests(lease)[:1]])
    store.save_checkpoints([(lease, 1, (progress(7),))], "v1")
    register(store, "w1")
    store.beat("w1", WorkerFigures(state="busy", tokens_per_second=2.0))
    store.close()
    status = command_line.json("status", batch)
    assert status["tokens"] == {"prompt": 10, "completion": 5, "in_progress": 7}
    assert (status["tokens_per_second"], status["eta_seconds"]) == (2.0, 3.0)  # (5 + 7) / 2: half of 12 tokens
    shown = command_line.out("status", batch).splitlines()
    assert "tokens     10 in prompts, 12 generated, 7 of them in unfinished answers" in shown
    assert "time left  about 3 s" in shown


# --------------------------------------------------------------------------------------------------------- follow


@pytest.mark.parametrize(("failing", "code"), [(0, 0), (1, 5)])
def test_follow_ends_like_wait(command_line: CommandLine, failing: int, code: int) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    store = command_line.store()
    answer_all(store, batch, lambda request: failure(request) if request.index < failing else answer(request))
    store.close()
    done = command_line.run("follow", batch)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("2 of 2 done, 0 running, ")
    told = command_line.run("follow", batch, "--json")
    assert told.exit_code == code
    (status,) = map(json.loads, told.stdout.splitlines())
    assert (status["status"], status["counts"]["failed"], status["note"]) == ("completed", failing, None)
    assert command_line.run("follow", "no-batch").exit_code == 4


def test_follow_says_once_why_nothing_happens(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"})
    command_line.out("pause", batch)
    done = command_line.run("follow", batch, "--timeout", 0.3)
    assert done.exit_code == 124
    first, note, end = done.stderr.splitlines()
    assert first.startswith("0 of 1 done, 0 running, 0 tokens, paused by ")
    assert note == "note: no worker is running; `batchjobs worker` starts one"
    assert "did not end within 0.3 s" in end


def test_a_terminal_is_drawn_until_ctrl_c_which_leaves_the_batch_alone(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"}, options=("--name", "mine\x1b[2J", "--shard-size", 1))
    store = command_line.store()
    register(store, "w1\x9b", state="busy")
    store.pause_worker("w1\x9b", by="ada@n1", reason="hot")
    home = {"BATCHJOBS_HOME": str(command_line.home), "BATCHJOBS_REDIS_URL": NO_REDIS}
    with OnTerminal("follow", batch, columns=150, **home) as terminal:
        eventually(lambda: "requests 2: 2 queued" in terminal.text, "it is drawn")
        (lease,) = store.claim([ShardId(batch, 0)], "w2", 3600)
        store.record([(lease, answer(request)) for request in store.pending_requests(lease)])
        eventually(lambda: "requests 2: 1 queued, 1 completed" in terminal.text, "it is drawn again")
        terminal.signal(signal.SIGINT)
        code = terminal.end()
        drawn, raw = terminal.text, terminal.raw
    assert code == 130
    for part in (
        "mine\\x1b[2J",
        "━",
        "w1\\x9b busy",
        "is paused (w1\\x9b), by ada@n1 since ",
        ": hot; `batchjobs resume --",
    ):
        assert part in drawn, part
    assert f"the batch is left alone; `batchjobs follow {batch}` shows it again" in drawn
    assert "\x1b[?25h" in raw, "the cursor is shown again"
    assert store.batch(batch).status == BatchStatus.RUNNING
    store.close()


def test_status_is_drawn_on_a_terminal_too(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"})
    store = command_line.store()
    register(store, "w1")
    store.close()
    home = {"BATCHJOBS_HOME": str(command_line.home), "BATCHJOBS_REDIS_URL": NO_REDIS}
    with OnTerminal("status", batch, **home) as terminal:
        assert terminal.end() == 0
        assert "requests 1: 1 queued progress ━" in terminal.text
        assert "worker state model" in terminal.text
