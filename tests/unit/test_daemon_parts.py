"""The small parts of a worker, one by one."""

from __future__ import annotations

import io
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from batchjobs.errors import BatchjobsError, ConnectionFailed
from batchjobs.store import Recorded
from batchjobs.types import Completion, Endpoint, FinishReason, Lease, PromptScores, Request, RequestStatus, ShardId
from tests.support.cases import case
from tests.support.stub_engine import StubEngine
from tests.support.waiting import eventually
from workers.engine.requests import EngineOutput
from workers.held import request_id
from workers.holdings import Holdings
from workers.logs import LineFormatter
from workers.outage import LONGEST_PAUSE_SECONDS, Outage
from workers.outcomes import Outcomes
from workers.periodic import Periodic
from workers.recorder import MAX_ROWS, Recorder
from workers.rq_states import Ending
from workers.serving import Serving

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

LEASE = Lease(ShardId("B", 0), fence=1, attempt=1)
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class FakeLoop:
    def __init__(self) -> None:
        self.cancelled: list[Hashable] = []

    def cancel(self, request_id: Hashable) -> None:
        self.cancelled.append(request_id)


class FakeRq:
    def __init__(self) -> None:
        self.ended: list[tuple[ShardId, Ending]] = []

    def end(self, shard: ShardId, ending: Ending) -> None:
        self.ended.append((shard, ending))


class FakeStore:
    """Fails as often as told, then stores."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.rows: dict[int, Completion] = {}
        self.sizes: list[int] = []
        self.refused: set[int] = set()
        self.total = 0
        self.let_go: list[ShardId] = []

    def record(self, records: Sequence[tuple[Lease, Completion]]) -> Recorded:
        if self.failures:
            raise self.failures.pop()
        for _, completion in records:
            if completion.index in self.refused:
                raise ValueError(f"row {completion.index} is refused")
        self.sizes.append(len(records))
        self.rows |= {completion.index: completion for _, completion in records}
        done = [LEASE.shard] if self.total and len(self.rows) == self.total else []
        return Recorded(done=done, stale=[])

    def renew(self, leases: Sequence[Lease], ttl_seconds: float) -> set[ShardId]:
        self.let_go += [lease.shard for lease in leases if ttl_seconds == 0]
        return {lease.shard for lease in leases}


def answer(index: int) -> Completion:
    return Completion(index=index, status=RequestStatus.COMPLETED, finish_reason=FinishReason.STOP)


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def rq() -> FakeRq:
    return FakeRq()


@pytest.fixture
def holdings(loop: FakeLoop, rq: FakeRq) -> Holdings:
    holdings = Holdings(loop, rq, unread_size=64)  # type: ignore[arg-type]
    holdings.take(LEASE)
    return holdings


class TestHoldings:
    def test_a_shard_counts_as_full_until_it_was_read(self, holdings: Holdings) -> None:
        assert holdings.unfinished == 64
        holdings.fill(LEASE, {0: 1, 1: 1, 2: 1})
        assert holdings.unfinished == 3

    def test_each_request_finishes_once(self, holdings: Holdings) -> None:
        holdings.fill(LEASE, {0: 1, 1: 1})
        assert holdings.finish(LEASE, 0)
        assert not holdings.finish(LEASE, 0)
        assert not holdings.finish(LEASE, 7)
        assert holdings.unfinished == 1

    def test_a_request_is_as_much_work_as_it_has_choices(self, holdings: Holdings) -> None:
        holdings.fill(LEASE, {0: 1, 1: 4})
        assert (holdings.unfinished, holdings.unread) == (5, 0)
        assert holdings.spare(4) is None, "one of its five choices runs"
        assert holdings.finish(LEASE, 1)
        assert not holdings.finish(LEASE, 1)
        assert holdings.unfinished == 1

    def test_what_is_done_is_told_to_rq(self, holdings: Holdings, rq: FakeRq) -> None:
        holdings.done(LEASE.shard)
        holdings.done(LEASE.shard)
        assert rq.ended == [(LEASE.shard, Ending.SUCCESS)]
        assert len(holdings) == 0

    def test_a_lost_lease_ends_its_sequences_and_takes_no_more_outcomes(
        self, holdings: Holdings, loop: FakeLoop, rq: FakeRq
    ) -> None:
        holdings.fill(LEASE, {0: 1, 1: 1, 2: 1})
        holdings.finish(LEASE, 1)
        holdings.lose(LEASE)
        assert loop.cancelled == [request_id(LEASE, 0), request_id(LEASE, 2)]
        assert not holdings.finish(LEASE, 0)
        assert not holdings.wants(LEASE, 0)
        assert rq.ended == [(LEASE.shard, Ending.LOST)]

    def test_a_second_claim_of_a_shard_ends_the_first(self, holdings: Holdings, loop: FakeLoop) -> None:
        holdings.fill(LEASE, {0: 1})
        again = Lease(LEASE.shard, fence=2, attempt=2)
        holdings.take(again)
        assert loop.cancelled == [request_id(LEASE, 0)]
        assert holdings.leases == [again]
        assert not holdings.finish(LEASE, 0)

    def test_a_refused_renewal_of_a_finished_shard_is_left_to_the_recorder(self, holdings: Holdings) -> None:
        holdings.fill(LEASE, {0: 1})
        holdings.finish(LEASE, 0)
        holdings.lose_unless_finished(LEASE)
        assert holdings.has(LEASE)

    def test_a_refused_renewal_of_an_unfinished_shard_loses_it(self, holdings: Holdings) -> None:
        holdings.lose_unless_finished(LEASE)
        assert not holdings.has(LEASE)

    def test_cancelling_is_repeated_for_what_slipped_through(self, holdings: Holdings, loop: FakeLoop) -> None:
        holdings.fill(LEASE, {0: 1, 1: 1})
        for _ in range(2):
            holdings.cancel(set(), {("B", 1), ("another", 0)})
        assert loop.cancelled == [request_id(LEASE, 1)] * 2
        assert holdings.wants(LEASE, 0)
        assert not holdings.wants(LEASE, 1)
        holdings.cancel({"B"}, set())
        assert not holdings.wants(LEASE, 0)
        assert holdings.finish(LEASE, 0), "a cancelled request still gets its outcome"

    def test_only_a_shard_that_was_not_begun_can_be_spared(self, holdings: Holdings, loop: FakeLoop) -> None:
        assert holdings.spare(100) is None, "not read yet"
        holdings.fill(LEASE, {0: 1, 1: 1})
        assert holdings.spare(1) is None, "one of its two requests runs"
        assert holdings.spare(2) == LEASE
        assert loop.cancelled == [request_id(LEASE, 0), request_id(LEASE, 1)]
        holdings.take(LEASE)
        holdings.fill(LEASE, {0: 1, 1: 1})
        holdings.finish(LEASE, 0)
        assert holdings.spare(2) is None, "one of its requests is done"


class TestRecorder:
    @pytest.fixture
    def store(self) -> FakeStore:
        return FakeStore()

    @pytest.fixture
    def recorder(self, store: FakeStore, holdings: Holdings) -> Recorder:
        engine: Any = StubEngine()
        outcomes = Outcomes("w1", Serving(engine))
        return Recorder(store, holdings, outcomes)  # type: ignore[arg-type]

    def test_rows_share_transactions(self, recorder: Recorder, store: FakeStore) -> None:
        rows = 2 * MAX_ROWS + 88
        for index in range(rows):
            recorder.put(LEASE, (answer(index),))
        recorder.start()
        assert recorder.stop(10) == 0
        assert len(store.rows) == rows
        assert store.sizes == [MAX_ROWS, MAX_ROWS, 88]

    def test_the_choices_of_a_request_share_a_transaction(self, recorder: Recorder, store: FakeStore) -> None:
        choices = MAX_ROWS // 3 + 1
        for index in range(4):
            recorder.put(LEASE, tuple(replace(answer(index), choice=number) for number in range(choices)))
        assert recorder.backlog == 4 * choices
        recorder.start()
        assert recorder.stop(10) == 0
        assert store.sizes == [3 * choices, choices], "three requests have at least MAX_ROWS rows"

    def test_a_flush_waits_for_what_was_put_before_it_alone(self, recorder: Recorder) -> None:
        class Busy(FakeStore):
            feeds = True

            def record(self, records: Sequence[tuple[Lease, Completion]]) -> Recorded:
                if self.feeds:
                    recorder.put(LEASE, (answer(len(self.rows) + 1000),))
                return super().record(records)

        recorder._store = busy = Busy()  # type: ignore[assignment]
        for index in range(3):
            recorder.put(LEASE, (answer(index),))
        assert not recorder.flush(0.01)
        recorder.start()
        assert recorder.flush(10)
        assert {0, 1, 2} <= busy.rows.keys()
        assert recorder.backlog, "there is always more on its way"
        busy.feeds = False
        assert recorder.stop(10) == 0

    def test_an_outage_keeps_the_rows(
        self, recorder: Recorder, store: FakeStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.failures = [ConnectionFailed("the database is away")] * 3
        recorder.put(LEASE, (answer(0),))
        recorder.start()
        eventually(lambda: store.rows, "the row is stored")
        recorder.stop(1)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warnings == ["recording outcomes failed, trying again: the database is away"]

    def test_it_gives_up_when_its_time_is_over_and_says_what_is_lost(
        self, recorder: Recorder, store: FakeStore
    ) -> None:
        store.failures = [ConnectionFailed("the database is away")] * 1000
        for index in range(3):
            recorder.put(LEASE, (answer(index),))
        recorder.start()
        assert recorder.stop(0.2) == 3
        assert store.rows == {}

    def test_a_refused_row_fails_alone_with_the_reason(self, recorder: Recorder, store: FakeStore) -> None:
        class Refusing(FakeStore):
            def record(self, records: Sequence[tuple[Lease, Completion]]) -> Recorded:
                if any(c.index == 5 and c.status == RequestStatus.COMPLETED for _, c in records):
                    raise ValueError("no fives")
                return super().record(records)

        recorder._store = refusing = Refusing()  # type: ignore[assignment]
        for index in range(10):
            recorder.put(LEASE, (answer(index),))
        recorder.start()
        recorder.stop(5)
        assert sorted(refusing.rows) == list(range(10))
        error = refusing.rows[5].error
        assert error is not None
        assert (error.code, error.message) == ("result_not_stored", "the database refused the answer: no fives")
        assert refusing.rows[5].worker == "w1"
        assert all(c.status == RequestStatus.COMPLETED for i, c in refusing.rows.items() if i != 5)

    def test_with_one_choice_refused_the_whole_request_fails(self, recorder: Recorder, store: FakeStore) -> None:
        class Refusing(FakeStore):
            def record(self, records: Sequence[tuple[Lease, Completion]]) -> Recorded:
                if any(completion.choice == 2 for _, completion in records):
                    raise ValueError("no third choices")
                return super().record(records)

        recorder._store = refusing = Refusing()  # type: ignore[assignment]
        recorder.put(LEASE, tuple(replace(answer(0), choice=number) for number in range(3)))
        recorder.put(LEASE, (answer(1),))
        recorder.start()
        assert recorder.stop(5) == 0
        assert {index: (c.choice, c.status) for index, c in refusing.rows.items()} == {
            0: (0, RequestStatus.FAILED),
            1: (0, RequestStatus.COMPLETED),
        }
        assert refusing.sizes == [1, 1]

    def test_a_row_that_can_never_be_stored_lets_its_shard_go(
        self, recorder: Recorder, store: FakeStore, holdings: Holdings
    ) -> None:
        store.refused = {1}
        for index in range(3):
            recorder.put(LEASE, (answer(index),))
        recorder.start()
        assert recorder.stop(5) == 0
        assert sorted(store.rows) == [0, 2]
        assert not holdings.has(LEASE)
        assert store.let_go == [LEASE.shard], "for another try at once"

    def test_a_finished_shard_leaves_the_holdings(
        self, recorder: Recorder, store: FakeStore, holdings: Holdings, rq: FakeRq
    ) -> None:
        store.total = 2
        holdings.fill(LEASE, {0: 1, 1: 1})
        recorder.put(LEASE, (answer(0),))
        recorder.put(LEASE, (answer(1),))
        recorder.start()
        recorder.stop(5)
        assert rq.ended == [(LEASE.shard, Ending.SUCCESS)]


def output(*texts: str, choice: int = 0, **values: Any) -> EngineOutput:
    """A choice whose tokens are these texts."""
    given: dict[str, Any] = {
        "text": "".join(texts),
        "finish_reason": FinishReason.LENGTH,
        "prompt_scores": None,
        "model_version": "stub-1",
        **values,
    }
    return EngineOutput(
        request_id="r",
        choice=choice,
        token_ids=tuple(range(len(texts))),
        tokens=texts,
        logprobs=tuple(-1.0 for _ in texts),
        token_times=tuple(0.5 for _ in texts),
        top_logprobs=None,
        prompt_tokens=3,
        cached_tokens=0,
        started_at=NOW,
        first_token_at=NOW if texts else None,
        finished_at=NOW,
        **given,
    )


def echoing(prompt: str | list[int], echo: bool = True) -> Request:
    return Request(index=5, custom_id="q", endpoint=Endpoint.COMPLETIONS, body={"prompt": prompt, "echo": echo})


class TestOutcomes:
    @pytest.fixture
    def outcomes(self) -> Outcomes:
        engine: Any = StubEngine()
        return Outcomes("w1", Serving(engine))

    def test_one_completion_a_choice(self, outcomes: Outcomes) -> None:
        last = replace(output("c", choice=2), finish_reason=FinishReason.CANCELLED)
        given = replace(output("a"), other_choices=(output("b", choice=1), last))
        made = outcomes.of(given, LEASE, echoing("Hi", echo=False))
        assert [(c.index, c.choice, c.text, c.status) for c in made] == [
            (5, 0, "a", "completed"),
            (5, 1, "b", "completed"),
            (5, 2, "c", "cancelled"),
        ]

    def test_an_echo_repeats_a_text_as_it_was_given_before_each_choice(self, outcomes: Outcomes) -> None:
        given = replace(output(" blue", "."), other_choices=(output(choice=1),))
        made = outcomes.of(given, LEASE, echoing("\n The  sky is"))
        assert [c.text for c in made] == ["\n The  sky is blue.", "\n The  sky is"]
        assert made[0].tokens == (" blue", "."), "the tokens are those of the answer"

    def test_of_ids_it_repeats_the_text_of_their_tokens(self, outcomes: Outcomes) -> None:
        (made,) = outcomes.of(output("!"), LEASE, echoing([72, 105]))
        assert made.text == "Hi!", "from the vocabulary"
        scores = PromptScores(
            token_ids=(1, 2), tokens=((0xC3,), (0xA9, 0x21)), logprobs=(None, -2.0), top_logprobs=None
        )
        (made,) = outcomes.of(output("!", prompt_scores=scores), LEASE, echoing([1, 2]))
        assert made.text == "\u00e9!!", "from the scores, a character over two tokens put together"
        assert made.prompt_scores is not None
        assert made.prompt_scores.logprobs == (None, -2.0)

    def test_a_blank_that_the_decoder_dropped_stands_between_prompt_and_answer(self, outcomes: Outcomes) -> None:
        prompt = echoing("The sky is")
        (made,) = outcomes.of(replace(output(" blue", " now"), text="blue now"), LEASE, prompt)
        assert made.text == "The sky is blue now"
        (made,) = outcomes.of(replace(output("ish"), text="ish"), LEASE, prompt)
        assert made.text == "The sky isish"
        (made,) = outcomes.of(replace(output(" blue"), text=" bl"), LEASE, prompt)
        assert made.text == "The sky is bl", "a stop string cut it"

    def test_a_failure_has_no_echo(self, outcomes: Outcomes) -> None:
        (made,) = outcomes.of(output("par", finish_reason=FinishReason.ERROR), LEASE, echoing("Hi"))
        assert (made.text, made.status) == ("par", RequestStatus.FAILED)


class TestOutage:
    def test_it_is_said_once_and_pauses_grow_to_a_limit(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "batchjobs")
        outage = Outage("writing")
        pauses = [outage.failed(ConnectionFailed("away")) for _ in range(12)]
        outage.over()
        outage.over()
        assert pauses[0] <= 0.15
        assert 0.5 * LONGEST_PAUSE_SECONDS <= pauses[-1] <= 1.5 * LONGEST_PAUSE_SECONDS
        said = [record.getMessage() for record in caplog.records]
        assert said == ["writing failed, trying again: away", "writing works again after 0 s"]
        assert outage.failed(ConnectionFailed("again")) <= 0.15


class TestPeriodic:
    def test_waking_makes_it_act_at_once(self) -> None:
        calls: list[int] = []
        thread = Periodic("counting", 3600, lambda: calls.append(1))
        thread.start()
        eventually(lambda: len(calls) == 1, "it acts when it starts")
        thread.wake()
        eventually(lambda: len(calls) == 2, "it acts when woken")
        thread.stop(5)
        assert not thread.is_alive()

    def test_an_outage_is_tried_again_and_a_bug_ends_the_thread(self) -> None:
        errors: list[Exception] = [KeyError("a bug"), BatchjobsError("away"), ConnectionFailed("away")]

        def act() -> None:
            raise errors.pop()

        thread = Periodic("failing", 0.01, act)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(thread.failure, KeyError)
        assert errors == []

    def test_woken_often_it_rests_in_between(self) -> None:
        times: list[float] = []

        def act() -> None:
            times.append(time.monotonic())
            if len(times) < 3:
                thread.wake()

        thread = Periodic("counting", 3600, act, rest=0.1)
        thread.start()
        eventually(lambda: len(times) == 3, "it acts each time that it is woken")
        assert min(times[1] - times[0], times[2] - times[1]) >= 0.1
        thread.stop(5)
        assert not thread.is_alive()

    def test_stopping_does_not_wait_for_its_rest(self) -> None:
        thread = Periodic("counting", 3600, lambda: None, rest=3600)
        thread.start()
        thread.stop(5)
        assert not thread.is_alive()

    def test_stopping_one_that_was_never_started_is_harmless(self) -> None:
        Periodic("idle", 1, lambda: None).stop()


class TestLog:
    @pytest.fixture
    def log(self) -> Any:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(LineFormatter())
        logger = logging.Logger("test")
        logger.addHandler(handler)
        return logger, stream

    def test_one_line_an_event_with_its_time_in_utc(self, log: Any) -> None:
        logger, stream = log
        logger.info("claimed shard %s", "B-0")
        assert stream.getvalue().endswith("Z INFO claimed shard B-0\n")
        assert len(stream.getvalue().splitlines()) == 1

    @case("A-sec-02")
    def test_control_characters_are_shown(self, log: Any) -> None:
        logger, stream = log
        try:
            raise ValueError("\x1b]0;pwned\x07")
        except ValueError:
            logger.exception("name %s", "\x1b[2J\x9b31m\nsecond line")
        for character in "\x1b\x07\x9b":
            assert character not in stream.getvalue()
        assert "name \\x1b[2J\\x9b31m\\nsecond line" in stream.getvalue()
