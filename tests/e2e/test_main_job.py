"""The whole way with real processes: a file is submitted by one, answered by others, and read from SQL.

The model is tiny and random, with a byte-level tokenizer, so answers are nonsense but exactly repeatable.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import Machine
from tests.support.models import save_chat_model
from tests.support.waiting import eventually

PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def servers(home: Path, model: Path, database_url: str, redis_url: str) -> Iterator[Machine]:
    machine = Machine(home, model, BATCHJOBS_DATABASE_URL=database_url, BATCHJOBS_REDIS_URL=redis_url)
    yield machine
    machine.end()


def lines(count: int, *, max_tokens: int = 24) -> list[dict[str, Any]]:
    """Chats and prompts, greedy and sampled, in both forms."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        fields = {"max_tokens": max_tokens, "temperature": 0.0 if number % 2 else 0.8, "ignore_eos": True}
        messages = [{"role": "user", "content": f"question {number}"}]
        if number % 3 == 0:
            made.append({"prompt": f"text {number}", **fields})
        elif number % 3 == 1:
            made.append({"custom_id": f"chat-{number}", "messages": messages, **fields})
        else:
            body = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": max_tokens}
            made.append(
                {"custom_id": f"openai-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            )
    return made


def write(folder: Path, made: list[dict[str, Any]]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in made))
    return str(path)


def rows(machine: Machine, batch: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in machine.call("results", batch).splitlines()]


def check_rows(found: list[dict[str, Any]], count: int) -> None:
    """One whole row a request, in input order."""
    assert [row["index"] for row in found] == list(range(count))
    for row in found:
        assert row["status"] == "completed", row
        assert row["finish_reason"] in ("stop", "length")
        lengths = {len(row[name]) for name in ("token_ids", "tokens", "logprobs", "token_times")}
        assert lengths == {row["completion_tokens"]}
        assert row["token_times"] == sorted(row["token_times"])
        assert all(logprob <= 0 for logprob in row["logprobs"])


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite and processes: the next one
def test_two_workers_share_a_batch_of_another_process(servers: Machine, home: Path) -> None:
    share_a_batch(servers, home)


def test_two_workers_share_a_batch_with_no_settings_at_all(embedded: Machine, home: Path) -> None:
    share_a_batch(embedded, home)


def share_a_batch(machine: Machine, home: Path) -> None:
    count = 120
    batch = machine.call("submit", write(home, lines(count)), "--shard-size", "4").strip()
    for name in ("one", "two"):
        machine.start("worker", "--name", name, "--max-requests-per-batch", "8")
    machine.call("wait", batch, "--timeout", str(PATIENCE))
    found = rows(machine, batch)
    check_rows(found, count)
    assert {row["worker"] for row in found} == {"one", "two"}
    assert {row["attempt"] for row in found} == {1}
    with closing(machine.store()) as store:
        _, selected = store.select("SELECT count(*) FROM completions", 1)
        assert list(selected) == [(count,)]
    openai = machine.call("results", batch, "--format", "openai").splitlines()
    assert [json.loads(line)["response"]["status_code"] for line in openai] == [200] * count


def test_a_killed_worker_loses_nothing(embedded: Machine, home: Path) -> None:
    count = 80
    batch = embedded.call("submit", write(home, lines(count, max_tokens=48)), "--shard-size", "8").strip()
    doomed = embedded.start("worker", "--name", "doomed", "--max-requests-per-batch", "8")
    with closing(embedded.store()) as store:
        eventually(lambda: store.batch(batch).counts.completed >= 8, "eight answers are stored", PATIENCE)
        doomed.kill()
        doomed.wait()
        before = store.batch(batch).counts.completed
        assert before < count
    embedded.work("heir")
    embedded.call("wait", batch, "--timeout", str(PATIENCE))
    found = rows(embedded, batch)
    check_rows(found, count)
    by_worker = Counter(row["worker"] for row in found)
    assert by_worker["doomed"] == before
    assert by_worker["heir"] == count - before
    assert {row["attempt"] for row in found} == {1, 2}


def test_an_interrupted_run_goes_on_and_makes_nothing_twice(embedded: Machine, home: Path) -> None:
    count = 60
    path = write(home, lines(count, max_tokens=64))
    with closing(embedded.store()) as store:
        store.prepare()
        first = embedded.start("run", path, "--max-requests-per-batch", "4", "-o", str(home / "out.jsonl"))

        def answered() -> int:
            found = store.batches()
            return found[0].counts.completed if found else 0

        eventually(lambda: answered() >= 6, "six answers are stored", PATIENCE)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
        batch = store.batches()[0]
        assert 6 <= batch.counts.completed < count
        assert batch.counts.running == 0  # given back
        earlier = {
            r.request.index: r.completion.finished_at for r in store.results(batch.id) if r.completion is not None
        }
    assert not (home / "out.jsonl").exists()
    embedded.call("run", path, "--max-requests-per-batch", "4", "-o", str(home / "out.jsonl"))
    found = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
    check_rows(found, count)
    assert {row["attempt"] for row in found} == {1}  # giving back in good order is no attempt
    with closing(embedded.store()) as store:
        assert [b.id for b in store.batches()] == [batch.id]
        now = {r.request.index: r.completion.finished_at for r in store.results(batch.id) if r.completion is not None}
    assert {index: now[index] for index in earlier} == earlier
    again = embedded.call("run", path, "--max-requests-per-batch", "4")
    assert [json.loads(line) for line in again.splitlines()] == found


def test_seeded_answers_are_the_same_however_they_were_made(embedded: Machine, home: Path) -> None:
    made = [{"prompt": f"tale {n}", "seed": n, "temperature": 0.9, "max_tokens": 20} for n in range(12)]
    path = write(home, made)
    texts = []
    for at_once in (1, 12):
        batch = embedded.call("submit", path).strip()
        embedded.work(f"with-{at_once}", max_requests_per_batch=at_once)
        texts.append([row["token_ids"] for row in rows(embedded, batch)])
    assert texts[0] == texts[1]


def test_a_worker_answers_no_batch_that_asks_for_another_model(embedded: Machine, home: Path) -> None:
    path = write(home, lines(6, max_tokens=4))
    foreign = embedded.call("submit", path, "--model", "Org/BigModel", "--shard-size", "2").strip()
    own = embedded.call("submit", path, "--shard-size", "2").strip()
    embedded.work("own")
    check_rows(rows(embedded, own), 6)
    counts = embedded.counts(foreign)
    assert (counts["queued"], counts["completed"]) == (6, 0)


def test_a_broken_line_is_named_and_nothing_is_stored(embedded: Machine, home: Path) -> None:
    path = Path(write(home, lines(20)))
    content = path.read_text().splitlines()
    content[16] = content[16][:-5]
    path.write_text("\n".join(content) + "\n")
    for command in (["submit", str(path)], ["run", str(path)]):
        complaint = embedded.complaint(*command, code=2)
        assert "line 17: " in complaint
    assert embedded.call("list", "--json") == ""


def test_a_prompt_that_cannot_run_fails_alone(embedded: Machine, home: Path) -> None:
    path = write(
        home, [{"prompt": "x" * 600, "max_tokens": 4}, {"prompt": "good", "max_tokens": 4, "ignore_eos": True}]
    )
    batch = embedded.call("submit", path).strip()
    embedded.work("one")
    embedded.call("wait", batch, code=5)
    long, good = rows(embedded, batch)
    assert (long["status"], long["error"]["code"]) == ("failed", "context_length_exceeded")
    assert "512" in long["error"]["message"]
    assert (good["status"], good["completion_tokens"]) == ("completed", 4)
