"""Who gets an outcome: handlers, those who wait for one or for all, and those who read the tokens as they come."""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchjobs.types import FinishReason
from tests.support.models import save_chat_model
from tests.support.scripted_engine import ScriptedEngine, request
from tests.support.waiting import eventually
from workers.engine import Engine, EngineConfig, EngineLoop, EngineOutput, EngineRequest, EngineStopped, SamplingParams
from workers.engine.loop import StreamPiece

WAIT = 60.0
Outcomes = queue.Queue[EngineOutput]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(gated=True)


@pytest.fixture
def loop(engine: ScriptedEngine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    loop.start()
    yield loop
    engine.allow(1000)
    assert loop.stop(WAIT)


@pytest.fixture(scope="module", params=[False, True], ids=["depth 1", "depth 2"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLoop]:
    """Around a tiny model that answers in random bytes."""
    folder: Path = save_chat_model(tmp_path_factory.mktemp("chat"))
    engine = Engine(str(folder), EngineConfig(device="cpu", num_blocks=600, use_async_batching=request.param))
    with EngineLoop(engine) as loop:
        yield loop
    engine.close()


def let_go(engine: ScriptedEngine) -> None:
    """From now on no step waits."""
    engine.gated = False
    engine.allow()


class TestResult:
    def test_it_is_waited_for_and_taken_once(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 2))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(loop.result, "a", WAIT)
            let_go(engine)
            assert waiting.result(WAIT).token_ids == (1, 2)
        with pytest.raises(LookupError, match="never added, or its outcome was taken"):
            loop.result("a")

    def test_the_time_to_wait_is_limited_and_it_can_be_asked_for_again(
        self, engine: ScriptedEngine, loop: EngineLoop
    ) -> None:
        loop.add(request("a", 2))
        with pytest.raises(TimeoutError, match="the outcome of request 'a'"):
            loop.result("a", 0.01)
        let_go(engine)
        assert loop.result("a", WAIT).token_ids == (1, 2)

    def test_several_may_wait_for_the_same_one(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add(request("a", 2), outcomes.put)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(loop.result, "a", WAIT) for _ in range(3)]
            eventually(lambda: len(loop._outbox._entries["a"].news._waiters) == 3, "three wait")  # type: ignore[attr-defined]
            let_go(engine)
            assert len({id(each.result(WAIT)) for each in waiting}) == 1
        assert outcomes.get(timeout=WAIT).token_ids == (1, 2), "and so does the handler"

    def test_an_outcome_of_a_handler_is_not_kept(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add(request("a"), outcomes.put)
        let_go(engine)
        outcomes.get(timeout=WAIT)
        with pytest.raises(LookupError):
            loop.result("a")
        assert list(loop.results()) == []

    def test_a_handler_does_not_wait_for_another_request(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        """It would wait for ever: the other one is made in its own thread."""
        errors = queue.Queue[Exception]()

        def wait_for_another(output: EngineOutput) -> None:
            for wait in (lambda: loop.result("long"), lambda: next(loop.results()), lambda: list(loop.stream("long"))):
                try:
                    wait()
                except RuntimeError as error:
                    errors.put(error)

        loop.add(request("short", 1), wait_for_another)
        loop.add(request("long", 9, stream=True))
        let_go(engine)
        for _ in range(3):
            assert "in the engine's thread" in str(errors.get(timeout=WAIT))
        assert len(loop.result("long", WAIT).token_ids) == 9


class TestResults:
    def test_they_come_as_they_end_and_end_with_the_last(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        names = loop.add_requests([request("long", 5), request("short", 1), request("middle", 3)])
        assert names == ["long", "short", "middle"]
        let_go(engine)
        assert [output.request_id for output in loop.results(WAIT)] == ["short", "middle", "long"]
        assert list(loop.results()) == [], "nothing is left to come"

    def test_the_first_is_there_before_the_last_is_done(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add_requests([request("short", 1), request("long", 3)])
        results = loop.results(0.01)
        engine.allow(2)
        eventually(lambda: loop._outbox._kept, "the short one has ended")
        assert next(results).request_id == "short"
        with pytest.raises(TimeoutError, match="the next outcome"):
            next(results)
        let_go(engine)
        assert [output.request_id for output in loop.results(WAIT)] == ["long"]

    def test_those_of_others_are_not_among_them(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add_requests([request("mine"), request("listened"), request("streamed", stream=True)])
        loop.add(request("handled"), outcomes.put)
        loop.register_result_handler("listened", outcomes.put)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: list(loop.stream("streamed", WAIT)))
            eventually(lambda: loop._outbox._entries["streamed"].is_read, "the stream is being read")
            let_go(engine)
            assert [output.request_id for output in loop.results(WAIT)] == ["mine"]
            assert reading.result(WAIT)[-1].output is not None
        assert {outcomes.get(timeout=WAIT).request_id for _ in range(2)} == {"handled", "listened"}

    def test_they_do_not_wait_for_what_goes_to_somebody_else(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add_requests([request("listened", 9), request("streamed", 2, stream=True)])
        loop.register_result_handler("listened", outcomes.put)
        engine.allow(2)
        stream = loop.stream("streamed", WAIT)
        assert next(stream).token_id == 1
        assert list(loop.results(WAIT)) == [], "both are still running"
        let_go(engine)
        outcomes.get(timeout=WAIT)
        assert list(loop.results(WAIT)) == [], "the stream has ended, and its reader has not got there"
        assert [piece.token_id for piece in stream] == [2, None]

    def test_two_readers_share_them(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add_requests(request(name, 1 + name % 5) for name in range(100))
        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(lambda: [output.request_id for output in loop.results(WAIT)]) for _ in range(2)]
            let_go(engine)
            first, second = (reader.result(WAIT) for reader in readers)
        assert sorted(first + second) == list(range(100))  # type: ignore[type-var]

    def test_those_of_a_loop_that_was_stopped(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add_requests([request("short", 1), request("long", 9)])
        engine.allow(2)
        engine.await_step()
        loop.stop(0)
        engine.allow()
        loop.join(WAIT)
        results = loop.results()
        assert next(results).request_id == "short"
        with pytest.raises(EngineStopped, match="was stopped"):
            next(results)


class TestHandlers:
    def test_one_that_is_registered_late_is_called_at_once(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a"))
        let_go(engine)
        eventually(lambda: loop._outbox._kept, "it has ended")
        outcomes: list[EngineOutput] = []
        loop.register_result_handler("a", outcomes.append)
        assert outcomes[0].token_ids == (1, 2, 3)
        with pytest.raises(LookupError):
            loop.register_result_handler("a", outcomes.append)

    def test_every_handler_of_a_request_is_called_once(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()
        loop.add(request("a"), outcomes.put)
        for _ in range(2):
            loop.register_result_handler("a", outcomes.put)
        let_go(engine)
        assert len({id(outcomes.get(timeout=WAIT)) for _ in range(3)}) == 1
        loop.stop(WAIT, unfinished="finish")
        assert outcomes.empty()

    def test_a_handler_may_add_and_cancel(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        outcomes = Outcomes()

        def go_on(output: EngineOutput) -> None:
            outcomes.put(output)
            loop.add(request("second", 10**9), outcomes.put)
            loop.cancel("second")

        loop.add(request("first"), go_on)
        let_go(engine)
        assert [outcomes.get(timeout=WAIT).request_id for _ in range(2)] == ["first", "second"]

    def test_a_request_that_is_not_here(self, loop: EngineLoop) -> None:
        with pytest.raises(LookupError, match="'nobody' is not here"):
            loop.register_result_handler("nobody", lambda output: None)
        loop.cancel("nobody")


class TestStream:
    def test_each_token_comes_with_its_step(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 3, stream=True))
        engine.allow()
        for token in (1, 2):
            engine.allow()
            # A new reader goes on where the last one stopped.
            piece = next(loop.stream("a", WAIT))
            assert piece == StreamPiece(choice=0, text="", token_id=token, logprob=-token, token_time=token / 10)
        with pytest.raises(TimeoutError, match="the next token of request 'a'"):
            next(loop.stream("a", 0.01))
        let_go(engine)
        last, end = loop.stream("a", WAIT)
        assert last.token_id == 3
        assert end.token_id is None
        assert end.output is not None
        assert end.output.token_ids == (1, 2, 3)
        with pytest.raises(LookupError):
            loop.result("a")

    def test_all_choices_come_in_one_stream(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 2, stream=True, n=3))
        let_go(engine)
        pieces = list(loop.stream("a", WAIT))
        tokens = [(piece.token_id, piece.choice) for piece in pieces if piece.token_id is not None]
        assert tokens == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
        ends = [piece.output for piece in pieces if piece.output is not None]
        assert [end.choice for end in ends] == [0, 1, 2]

    def test_nothing_waits_for_the_reader(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("unread", 50, stream=True))
        stream = loop.stream("unread", WAIT)
        let_go(engine)
        loop.add(request("other", 100))
        assert len(loop.result("other", WAIT).token_ids) == 100
        assert [piece.token_id for piece in stream][:-1] == list(range(1, 51))

    def test_one_reads_it(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 9, stream=True))
        engine.allow(2)
        first, second = loop.stream("a", WAIT), loop.stream("a", WAIT)
        next(first)
        for again in (lambda: next(second), lambda: loop.stream("a")):
            with pytest.raises(ValueError, match="being read already"):
                again()

    def test_a_reader_who_leaves_early_leaves_the_request_to_others(
        self, engine: ScriptedEngine, loop: EngineLoop
    ) -> None:
        loop.add(request("a", 3, stream=True))
        engine.allow(2)
        for _ in loop.stream("a", WAIT):
            break
        let_go(engine)
        assert [output.token_ids for output in loop.results(WAIT)] == [(1, 2, 3)]

    def test_a_stream_that_nobody_began_to_read_takes_nothing(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 3, stream=True))
        loop.stream("a")
        gc.collect()
        let_go(engine)
        assert loop.result("a", WAIT).token_ids == (1, 2, 3)

    def test_a_cancelled_one_ends_with_what_there_is(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        loop.add(request("a", 9, stream=True))
        engine.allow(3)
        engine.await_step()
        loop.cancel("a")
        engine.allow()
        *tokens, end = loop.stream("a", WAIT)
        assert end.output is not None
        assert end.output.finish_reason is FinishReason.CANCELLED
        assert tuple(piece.token_id for piece in tokens) == end.output.token_ids == (1, 2, 3)

    def test_tokens_before_a_death_come_before_the_error(self, engine: ScriptedEngine, loop: EngineLoop) -> None:
        engine.fail_at = 4
        loop.add(request("a", 9, stream=True))
        engine.allow(4)
        assert loop.join(WAIT)
        stream = loop.stream("a")
        assert [next(stream).token_id, next(stream).token_id] == [1, 2]
        with pytest.raises(EngineStopped) as stopped:
            next(stream)
        assert stopped.value.__cause__ is engine.failure

    def test_only_requests_that_ask_for_it_are_streamed(self, loop: EngineLoop) -> None:
        loop.add(request("a"))
        with pytest.raises(ValueError, match="added without stream=True"):
            loop.stream("a")

    def test_old_tokens_do_not_reach_the_next_loop(self) -> None:
        engine = ScriptedEngine(gated=True)
        loop = EngineLoop(engine)  # type: ignore[arg-type]
        loop.start()
        loop.add(request("a", 9, stream=True))
        engine.await_step()
        loop.stop(0)
        let_go(engine)
        loop.join(WAIT)
        with EngineLoop(engine) as again:  # type: ignore[arg-type]
            again.add(request("a", 2, stream=True))
        assert [piece.token_id for piece in again.stream("a")] == [1, 2, None]


class TestStreamedTextOfAModel:
    @pytest.mark.parametrize("stop", [(), ("a",), ("ä", "\ufffd", "xy")])
    def test_the_pieces_are_the_answer(self, chat: EngineLoop, stop: tuple[str, ...]) -> None:
        """Random bytes as answers: halves of characters, special tokens, stop strings."""
        for seed in range(20):
            sampling = SamplingParams(temperature=1.5, max_tokens=40, seed=seed, stop=stop, min_tokens=seed % 4)
            chat.add(EngineRequest(seed, chat.engine.encode_prompt("The sea"), sampling, stream=True))
        ended = defaultdict(int)
        for seed in range(20):
            *tokens, end = chat.stream(seed, WAIT)
            assert end.output is not None
            assert "".join(piece.text for piece in (*tokens, end)) == end.output.text
            assert tuple(piece.token_id for piece in tokens) == end.output.token_ids
            assert tuple(piece.logprob for piece in tokens) == end.output.logprobs
            assert tuple(piece.token_time for piece in tokens) == end.output.token_times
            ended[end.output.finish_reason] += 1
        assert ended[FinishReason.LENGTH] + ended[FinishReason.STOP] == 20
        assert ended[FinishReason.LENGTH], "some went on to their end"

    def test_a_second_reader_goes_on_in_the_text(self, chat: EngineLoop) -> None:
        sampling = SamplingParams(temperature=1.5, max_tokens=40, seed=5, ignore_eos=True)
        chat.add(EngineRequest("shared", chat.engine.encode_prompt("The sea"), sampling, stream=True))
        with contextlib.closing(chat.stream("shared", WAIT)) as first:  # type: ignore[type-var]
            pieces = list(itertools.islice(first, 15))
        pieces += chat.stream("shared", WAIT)
        assert pieces[-1].output is not None
        assert "".join(piece.text for piece in pieces) == pieces[-1].output.text
        assert len(pieces) == 41

    def test_text_comes_while_it_is_made(self, chat: EngineLoop) -> None:
        sampling = SamplingParams(temperature=1.5, max_tokens=400, seed=1, ignore_eos=True)
        chat.add(EngineRequest("long", chat.engine.encode_prompt("The sea"), sampling, stream=True))
        stream = chat.stream("long", WAIT)
        assert next(piece.text for piece in stream if piece.text)
        assert chat.stats().running == 1, "it still runs"
        chat.cancel("long")
        assert [piece.output.finish_reason for piece in stream if piece.output] == [FinishReason.CANCELLED]
