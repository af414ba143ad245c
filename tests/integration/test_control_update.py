"""Commands to update a worker's model, on a stub engine, a real Redis and a real database."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.queue import JobQueue
from batchjobs.settings import Settings
from batchjobs.types import Command, CommandKind
from tests.support.batches import create, request, select, submit
from tests.support.cases import case
from tests.support.running import (
    attempts,
    checkpointed,
    completions,
    enqueue,
    is_complete,
    is_still,
    open_long,
    postgresql,
    queue,
    settings,
    sqlite,
    start,
    state,
)
from tests.support.stub_engine import UPDATED_LOGPROB, expected_text
from tests.support.waiting import eventually
from tests.support.workers import ProcessWorker, ThreadWorker
from workers.rq_worker import RqWorker

if TYPE_CHECKING:
    from batchjobs.store import Store
    from workers.engine.requests import EngineOutput

__all__ = ["queue", "settings", "start"]

Order = Callable[..., Command]


@pytest.fixture
def order(store: Store, queue: JobQueue) -> Order:
    """Gives the command to ``w1``."""

    def order(model: str, **arguments: Any) -> Command:
        given = {"model": model, "revision": None, "inflight": "recompute", "dry_run": False, **arguments}
        (command,) = store.order(CommandKind.UPDATE_MODEL, ["w1"], arguments=given, by="ann@host")
        queue.wake()
        return command

    return order


def now(store: Store, command: Command) -> Command:
    (found,) = store.commands([command.id])
    return found


def ended(store: Store, command: Command, seconds: float = 15) -> Command:
    eventually(lambda: now(store, command).finished_at, "the command has ended", seconds)
    return now(store, command)


def served(store: Store) -> tuple[str, str, tuple[str, ...]]:
    (row,) = store.workers()
    return row.model, row.model_version, row.serves


class TestHot:
    @pytest.mark.parametrize("inflight", ["recompute", "keep"])
    @case("A-eng-04")
    def test_answers_go_on_and_say_who_drew_which_tokens(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, inflight: str
    ) -> None:
        batch_id = open_long(store, queue, 24, max_tokens=120)
        worker = start(step_seconds=0.003)
        eventually(lambda: worker.loop.stats().generated_tokens > 200, "it works")
        done = ended(store, order("other@stub-2", inflight=inflight))
        assert done.error is None
        assert done.result is not None
        told = dict(done.result)
        assert (told.pop("paused_seconds"), told.pop("loading_seconds") < 1) == (0.0, True)
        counted = {"recompute": "recomputed", "keep": "kept"}[inflight]
        assert told.pop(counted) == 8
        assert told == {
            "old_version": "stub-1",
            "new_version": "stub-2",
            "old_model": "stub",
            "new_model": "other",
            "is_reload": False,
            **{name: 0 for name in ("finished", "restarted", "recomputed", "kept") if name != counted},
            "given_back": 0,
            "dry_run": False,
        }
        assert served(store) == ("other", "stub-2", ("other", "other@stub-2", "stub"))
        eventually(lambda: is_complete(store, batch_id), "all is done", 30)
        answers = completions(store, batch_id)
        mixed = [c for c in answers if len(c.version_spans) > 1]
        assert len(mixed) == 8
        for c in mixed:
            first, second = c.version_spans
            assert (first.version, first.from_token, second.version) == ("stub-1", 0, "stub-2")
            assert {first.worker, second.worker, first.attempt, second.attempt} == {"w1", 1}
            assert c.logprobs == (-0.5,) * second.from_token + (UPDATED_LOGPROB,) * (120 - second.from_token)
        assert {(c.model, c.model_version) for c in answers} == {("other", "stub-2")}
        assert [c.text for c in answers] == [expected_text(f"prompt {i}", 120) for i in range(24)]
        assert worker.loop.stats().generated_tokens == 24 * 120, "no token was made twice"

    @sqlite
    @pytest.mark.parametrize("inflight", ["finish", "restart"])
    def test_no_answer_is_mixed(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, inflight: str
    ) -> None:
        batch_id = open_long(store, queue, 24, max_tokens=200)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().generated_tokens > 200, "it works")
        done = ended(store, order("other@stub-2", inflight=inflight))
        assert done.result is not None, done.error
        assert done.result[{"finish": "finished", "restart": "restarted"}[inflight]] == 8
        eventually(lambda: is_complete(store, batch_id), "all is done", 30)
        answers = completions(store, batch_id)
        assert {len(c.version_spans) for c in answers} == {1}
        old = [c for c in answers if c.model_version == "stub-1"]
        assert len(old) == (8 if inflight == "finish" else 0)
        for c in answers:
            is_old = c.model_version == "stub-1"
            assert (c.model, set(c.logprobs)) == (("stub", {-0.5}) if is_old else ("other", {UPDATED_LOGPROB}))

    @sqlite
    def test_a_dry_run_changes_nothing(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        start()
        done = ended(store, order("other@stub-2", dry_run=True))
        assert done.result is not None
        assert (done.result["new_version"], done.result["is_reload"], done.result["dry_run"]) == ("stub-2", False, True)
        assert served(store) == ("stub", "stub-1", ("stub",))
        assert [row[0] for row in select(store, "SELECT version FROM model_versions")] == ["stub-1"]

    @sqlite
    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            ("missing", "there is no model missing"),
            ("broken@stub-2", "the smoke prompt's logits differ"),
            ("reload@stub-2", "its layers have other shapes. Use --inflight finish or --inflight restart"),
        ],
    )
    @case("A-eng-02")
    def test_refused_it_goes_on_as_before(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, model: str, reason: str
    ) -> None:
        batch_id = open_long(store, queue, 8, max_tokens=200)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().generated_tokens, "it works")
        done = ended(store, order(model))
        assert done.error is not None
        assert reason in done.error
        assert done.result is None
        eventually(lambda: is_complete(store, batch_id), "all is done")
        assert {(c.model_version, len(c.version_spans)) for c in completions(store, batch_id)} == {("stub-1", 1)}
        assert served(store) == ("stub", "stub-1", ("stub",))

    @sqlite
    def test_two_in_a_row(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 4, max_tokens=400)
        worker = start(step_seconds=0.004)
        eventually(lambda: worker.loop.stats().generated_tokens > 40, "it works")
        first = ended(store, order("a@stub-2"))
        made = worker.loop.stats().generated_tokens
        eventually(lambda: worker.loop.stats().generated_tokens > made + 8, "tokens are made in between")
        second, third = order("b@stub-3"), order("missing")
        for command in (second, third):
            ended(store, command)
        assert first.finished_at is not None
        began = now(store, second).started_at
        assert began is not None
        assert first.finished_at <= began
        assert now(store, third).error
        eventually(lambda: is_complete(store, batch_id), "all is done")
        for c in completions(store, batch_id):
            assert [span.version for span in c.version_spans] == ["stub-1", "stub-2", "stub-3"]
            assert (c.model, c.model_version) == ("b", "stub-3")
        assert served(store)[2] == ("a", "a@stub-2", "b", "b@stub-3", "stub")

    @sqlite
    def test_paused_it_stays_paused(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 4, max_tokens=200)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().generated_tokens > 40, "it works")
        store.pause_worker("w1", by="ann@host")
        queue.wake()
        eventually(lambda: is_still(worker), "it stands still")
        refused = ended(store, order("other@stub-2", inflight="finish"))
        assert refused.error is not None
        assert "it is paused, so nothing can be finished" in refused.error
        made = worker.loop.stats().generated_tokens
        assert ended(store, order("other@stub-2")).error is None
        eventually(lambda: state(store) == "paused", "it says that it is paused")
        assert is_still(worker)
        assert worker.loop.stats().generated_tokens == made
        store.resume_worker("w1")
        queue.wake()
        eventually(lambda: is_complete(store, batch_id), "it goes on")
        spans = [[(s.version, s.from_token) for s in c.version_spans] for c in completions(store, batch_id)]
        assert sum(second[1] for _, second in spans) == made

    @sqlite
    def test_checkpoints_name_the_version_that_got_so_far(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, settings: Settings
    ) -> None:
        """One is looked at before the update, and written after it."""
        batch_id = open_long(store, queue, 1)
        rare = settings.model_copy(update={"checkpoint_seconds": 3600.0})
        worker = start(step_seconds=0.002, settings=rare)
        save, daemon = store.save_checkpoints, worker.daemon
        written: list[str] = []

        def updated_meanwhile(records: Any, version: str) -> Any:
            if not written:
                written.append(version)
                ended(store, order("other@stub-2"))
            written.append(version)
            return save(records, version)

        eventually(lambda: worker.loop.stats().generated_tokens > 20, "it works")
        store.save_checkpoints = updated_meanwhile  # type: ignore[method-assign]
        assert daemon._parts.checkpoints is not None
        assert daemon._parts.checkpoints.save() == 1
        assert written == ["stub-1", "stub-1"]
        worker.loop.hold()
        tokens = worker.loop.stats().generated_tokens
        assert daemon._parts.checkpoints.save() == 1
        assert written[-1] == "stub-2"
        assert checkpointed(store, batch_id) == {0: tokens}
        assert select(store, "SELECT model_version FROM checkpoints") == [("stub-2",)]

    @pytest.mark.parametrize("pause", ["batch", "batch --release", "worker --release"])
    @sqlite
    def test_what_is_paused_while_it_finishes_goes_back_and_the_update_goes_on(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, pause: str
    ) -> None:
        paused, other = open_long(store, queue, 4), open_long(store, queue, 4, max_tokens=600)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().running == 8, "it works")
        command = order("other@stub-2", inflight="finish")
        eventually(lambda: worker.loop.is_updating and state(store) == "updating", "it waits")
        if pause.startswith("batch"):
            store.pause_batch(paused, by="ann@host", release="release" in pause)
        else:
            store.pause_worker("w1", by="ann@host", release=True)
        queue.wake()
        done = ended(store, command)
        assert done.result is not None, done.error
        assert done.result["finished"] == (4 if pause.startswith("batch") else 0)
        eventually(lambda: store.batch(paused).counts.queued == 4, "it is given back")
        assert len(checkpointed(store, paused)) == 4, "whoever has the old model goes on from there"
        store.pause_batch(paused, by="ann@host")
        store.resume_worker(None)
        queue.wake()
        eventually(lambda: is_complete(store, other), "the other one is done")
        assert attempts(store, paused) == [0]
        assert served(store)[1] == "stub-2"

    @sqlite
    def test_what_is_paused_right_before_it_finishes_goes_back_and_the_update_goes_on(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        paused, other = open_long(store, queue, 4), open_long(store, queue, 4, max_tokens=600)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().running == 8, "it works")
        update, asked = worker.loop.update_model, []

        def paused_before(staged: Any, inflight: Any) -> Any:
            if not asked:
                store.pause_batch(paused, by="ann@host")
                worker.daemon._holdings.pause({paused})  # as whoever hears the order does first
            asked.append(inflight)
            return update(staged, inflight)

        worker.loop.update_model = paused_before  # type: ignore[method-assign,assignment]
        done = ended(store, order("other@stub-2", inflight="finish"))
        assert done.result is not None, done.error
        assert done.result["finished"] == 4
        eventually(lambda: is_complete(store, other), "the other one is done")
        assert len(checkpointed(store, paused)) == 4

    @sqlite
    def test_the_old_beginning_of_an_answer_that_began_anew_is_nobodys_answer(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order, settings: Settings
    ) -> None:
        batch_id = open_long(store, queue, 4)
        rare = settings.model_copy(update={"checkpoint_seconds": 3600.0})
        worker = start(step_seconds=0.002, settings=rare)
        eventually(lambda: worker.loop.stats().generated_tokens > 40, "it works")
        assert worker.daemon._parts.checkpoints is not None
        worker.daemon._parts.checkpoints.save()
        assert len(checkpointed(store, batch_id)) == 4
        worker.loop.hold()
        done = ended(store, order("other@stub-2", inflight="restart"))
        assert done.result is not None, done.error
        assert done.result["restarted"] == 4
        assert checkpointed(store, batch_id) == {}
        store.pause_batch(batch_id, by="ann@host", release=True)
        queue.wake()
        eventually(lambda: store.batch(batch_id).counts.queued == 4, "it is given back")
        store.cancel_batch(batch_id)
        assert [c.text for c in completions(store, batch_id)] == [""] * 4
        worker.loop.release()


class TestPins:
    @postgresql
    def test_requests_pinned_to_another_version_go_back_before_the_swap(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        free = open_long(store, queue, 4, max_tokens=400)
        pinned = open_long(store, queue, 4, max_tokens=400, body={"model_version": "stub-1"})
        worker = start(step_seconds=0.004)
        eventually(lambda: worker.loop.stats().running == 8 and len(worker.loop.progress()) == 8, "it works")
        done = ended(store, order("other@stub-2"))
        assert done.result is not None
        assert (done.result["given_back"], done.result["recomputed"]) == (4, 4)
        eventually(lambda: is_complete(store, free), "the others go on")
        stored = checkpointed(store, pinned)
        assert len(stored) == 4
        assert store.batch(pinned).counts.queued == 4
        start("w2", logprob=-0.25)
        eventually(lambda: is_complete(store, pinned), "a worker of that version finishes them", 20)
        for c in completions(store, pinned):
            assert [(s.version, s.worker) for s in c.version_spans] == [("stub-1", "w1"), ("stub-1", "w2")]
            assert c.logprobs.count(-0.5) == stored[c.index]

    @sqlite
    def test_one_that_nobody_serves_waits(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        waiting = open_long(store, queue, 4, max_tokens=4, body={"model_version": "stub-2"})
        named = submit(store, 4, model="other")
        enqueue(store, queue)
        start()
        served_now = submit(store, 4)
        enqueue(store, queue)
        eventually(lambda: is_complete(store, served_now), "what it serves is done")
        assert store.batch(waiting).counts.queued == store.batch(named).counts.queued == 4
        assert ended(store, order("other@stub-2")).error is None
        eventually(lambda: is_complete(store, waiting) and is_complete(store, named), "after the update it serves both")
        assert {c.model_version for c in completions(store, waiting)} == {"stub-2"}


class TestReload:
    @postgresql
    def test_finish_finishes_what_was_begun_and_gives_back_the_rest(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 24, max_tokens=200)
        worker = start(step_seconds=0.004)
        eventually(lambda: worker.loop.stats().waiting == 16 and worker.loop.stats().generated_tokens, "it is full")
        command = order("reload@stub-2", inflight="finish")
        eventually(lambda: state(store) == "updating", "it says so")
        done = ended(store, command)
        assert done.result is not None, done.error
        assert (done.result["is_reload"], done.result["finished"], done.result["given_back"]) == (True, 8, 16)
        eventually(lambda: is_complete(store, batch_id), "the rest is answered by the new model", 30)
        answers = completions(store, batch_id)
        assert [c.model_version for c in answers].count("stub-1") == 8
        assert {len(c.version_spans) for c in answers} == {1}
        assert served(store) == ("reload", "stub-2", ("reload", "reload@stub-2"))
        assert worker.loop.stats().generated_tokens == 24 * 200

    @sqlite
    def test_restart_gives_back_everything(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 24, max_tokens=50)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().waiting == 16 and worker.loop.stats().generated_tokens, "it works")
        worker.loop.hold()
        ended_before = store.batch(batch_id).counts.done
        command = order("reload@stub-2", inflight="restart")
        done = ended(store, command)
        assert done.result is not None, done.error
        assert done.result["given_back"] == 24 - ended_before
        worker.loop.release()
        eventually(lambda: is_complete(store, batch_id), "the new model answers them", 30)
        versions = [c.model_version for c in completions(store, batch_id)]
        assert versions.count("stub-2") == 24 - ended_before
        assert checkpointed(store, batch_id) == {}

    @sqlite
    def test_cancels_and_pauses_are_heard_while_it_finishes(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        cancelled, paused = open_long(store, queue, 4), open_long(store, queue, 4)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().running == 8, "it works")
        command = order("reload@stub-2", inflight="finish")
        eventually(lambda: now(store, command).started_at and state(store) == "updating", "it waits")
        store.pause_batch(paused)
        queue.wake()
        eventually(lambda: store.batch(paused).counts.queued == 4, "what is paused cannot be finished")
        assert len(checkpointed(store, paused)) == 4
        store.cancel_batch(cancelled)
        queue.wake()
        done = ended(store, command)
        assert done.error is None
        assert is_complete(store, cancelled)
        assert {c.model_version for c in completions(store, cancelled)} == {"stub-1"}
        assert served(store)[0] == "reload"
        assert worker.stop() == 0

    @sqlite
    def test_refused_by_the_engine_what_waits_goes_on(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 24, max_tokens=100)
        worker = start(step_seconds=0.002)
        eventually(lambda: worker.loop.stats().generated_tokens, "it works")
        done = ended(store, order("reload-broken@stub-2", inflight="finish"))
        assert done.error == "the smoke prompt's logits differ"
        eventually(lambda: is_complete(store, batch_id), "the old model answers all")
        assert {c.model_version for c in completions(store, batch_id)} == {"stub-1"}


@sqlite
def test_observers_are_told(start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order) -> None:
    class Counting:
        def __init__(self) -> None:
            self.choices: list[int] = []
            self.updates: list[str] = []

        def finished(self, choices: Sequence[EngineOutput]) -> None:
            self.choices.append(len(choices))

        def updated(self, result: str) -> None:
            self.updates.append(result)

    seen = Counting()
    batch_id = open_long(store, queue, 5, max_tokens=3, body={"n": 2})
    start(observers=seen)
    eventually(lambda: is_complete(store, batch_id), "all is done")
    assert seen.choices == [2] * 5
    for model in ("missing", "other@stub-2"):
        ended(store, order(model))
    ended(store, order("other@stub-3", dry_run=True))
    assert seen.updates == ["refused", "done"]


class TestEnds:
    @sqlite
    def test_cancels_and_the_end_are_heard_while_a_model_is_loaded(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id, other = open_long(store, queue, 4), open_long(store, queue, 4)
        worker = start()
        worker.loop.can_stage.clear()
        command = order("other@stub-2")
        eventually(lambda: worker.loop.is_staging and worker.loop.stats().running == 8, "it loads")
        eventually(lambda: queue.worker_notes() == {"w1": "loading the model other@stub-2"}, "it says so")
        store.cancel_batch(batch_id)
        queue.wake()
        eventually(lambda: is_complete(store, batch_id), "it is cancelled")
        assert worker.stop() == 0
        assert now(store, command).error == (
            "the worker ended before update_model was carried out; give the command again when it is back"
        )
        assert store.batch(other).counts.queued == 4
        worker.loop.can_stage.set()

    @sqlite
    def test_the_end_in_the_middle_of_finishing(
        self, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        for model in ("reload@stub-2", "other@stub-2"):
            batch_id = open_long(store, queue, 4)
            worker = start()
            eventually(lambda: worker.loop.stats().generated_tokens > 100, "it works")  # noqa: B023
            command = order(model, inflight="finish")
            eventually(lambda: state(store) == "updating", "it waits")
            assert worker.stop() == 0
            told = now(store, command)
            assert told.error is not None
            assert "the worker ended before update_model" in told.error
            assert len(checkpointed(store, batch_id)) == 4
            store.cancel_batch(batch_id)

    def test_a_worker_that_was_killed_in_the_middle_comes_up_whole(
        self, settings: Settings, start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, order: Order
    ) -> None:
        batch_id = open_long(store, queue, 4, max_tokens=300)
        victim = ProcessWorker(settings, "w1", step_seconds=0.02)
        eventually(lambda: store.workers() and store.workers()[0].generated_tokens, "it works", 40)
        begun = order("reload@stub-2", inflight="finish")
        eventually(lambda: state(store) == "updating", "it is in the middle")
        victim.kill()
        later = order("later@stub-3")
        start()
        told = ended(store, begun)
        assert told.error == "the worker ended while it carried this out; it runs version stub-1 now"
        assert ended(store, later).error is None, "one that was not begun is carried out"
        eventually(lambda: is_complete(store, batch_id), "all is done", 30)
        assert served(store)[:2] == ("later", "stub-3")
        for c in completions(store, batch_id):
            assert len(c.logprobs) == 300

    @postgresql
    def test_sigterm_while_it_finishes(self, settings: Settings, store: Store, queue: JobQueue, order: Order) -> None:
        open_long(store, queue, 4)
        worker = ProcessWorker(settings, "w1", step_seconds=0.01)
        eventually(lambda: store.workers() and store.workers()[0].generated_tokens, "it works", 40)
        command = order("reload@stub-2", inflight="finish")
        eventually(lambda: state(store) == "updating", "it waits")
        worker.signal(signal.SIGTERM)
        code, log = worker.join()
        assert code == 0, log
        assert now(store, command).error is not None
        assert "stored 4 unfinished answers" in log


@sqlite
def test_its_own_shards_are_found_at_once_behind_those_for_other_models(
    start: Callable[..., ThreadWorker], store: Store, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops = []
    pop = RqWorker.pop
    monkeypatch.setattr(RqWorker, "pop", lambda rq, count, view: pops.append(count) or pop(rq, count, view))
    foreign = create(store, shard_size=1, model="other")
    store.add_requests(foreign, [request(index) for index in range(2000)])
    store.open_batch(foreign)
    enqueue(store, queue)
    own = submit(store, 40, model="stub")
    enqueue(store, queue)
    start()
    eventually(lambda: is_complete(store, own), "its own are done")
    assert sum(pops) < 100, "it does not go through the others one by one"
    assert store.batch(foreign).counts.queued == 2000
    assert len(queue.missing(store.claimable(2000, models=["other"]))) == 0, "the others stay in the queue"
