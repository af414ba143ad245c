"""An answer that one engine began and another one goes on with is the answer that the first would have given alone."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from batchjobs.types import FinishReason, Progress, VersionSpan
from tests.fuzz.drive import Log, Report, Watch, _Run, build_engine, run_case
from tests.fuzz.engine_cases import FEATURES, Case, draw_case
from tests.fuzz.models import FuzzModel, Models
from tests.fuzz.run import Summary
from tests.support.engines import make, prompts
from tests.support.models import save_chat_model, save_model
from tests.support.schemas import response_format
from workers.engine import Engine, EngineLoop, EngineOutput, EngineRequest, SamplingParams

WAIT = 60.0
Parts = tuple[Progress, ...]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, one token a byte."""
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, in which every second layer sees 16 tokens."""
    return save_model("gemma2", tmp_path_factory.mktemp("gemma2"))


def stored(part: Progress) -> Progress:
    """What is left of it when a store has kept it as JSON."""
    row = {**dataclasses.asdict(part), "started_at": part.started_at.isoformat()}
    known = json.loads(json.dumps(row))
    tops = known["top_logprobs"]
    return Progress(
        choice=known["choice"],
        token_ids=tuple(known["token_ids"]),
        tokens=tuple(map(_text, known["tokens"])),
        logprobs=tuple(known["logprobs"]),
        token_times=tuple(known["token_times"]),
        top_logprobs=tops and tuple(tuple((i, p, _text(text)) for i, p, text in best) for best in tops),
        started_at=datetime.fromisoformat(known["started_at"]),
        version_spans=tuple(VersionSpan(**span) for span in known["version_spans"]),
    )


def _text(text: Any) -> Any:
    return tuple(text) if isinstance(text, list) else text


def run(engine: Engine, *, giving_way: bool = False) -> dict[Hashable, EngineOutput]:
    """To the end. With ``giving_way`` the youngest is sent back every third step, every other time without pages."""
    outputs: dict[Hashable, EngineOutput] = {}
    host, steps = engine.scheduler.host, 0
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        steps += 1
        assert steps < 5000, "no end in sight"
        if giving_way and steps % 3 == 0 and len(engine.scheduler.running) > 1:
            kept = host.take(host.free) if steps % 2 else []  # no room in CPU memory this time
            engine.scheduler._preempt(engine.scheduler.running[-1])
            host.give_back(kept)
    assert engine.pool.free == engine.pool.capacity
    assert host.used == 0
    assert engine.scheduler.unbegun == engine.scheduler.num_waiting == 0
    return outputs


def snapshots(engine: Engine, request: EngineRequest) -> tuple[EngineOutput, list[Parts]]:
    """The answer that nobody disturbs, and how far it was after each step."""
    engine.add(request)
    seen: dict[tuple[int, ...], Parts] = {}
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
        for parts in engine.progress().values():
            seen[tuple(len(part.token_ids) for part in parts)] = parts
    (output,) = outputs
    return output, list(seen.values())


def whole(output: EngineOutput) -> Parts:
    """The progress of an answer that was finished and never told of."""
    return tuple(
        Progress(
            choice=each.choice,
            token_ids=each.token_ids,
            tokens=each.tokens,
            logprobs=each.logprobs,
            token_times=each.token_times,
            top_logprobs=each.top_logprobs,
            started_at=each.started_at,
            version_spans=each.version_spans,
        )
        for each in output.choices
    )


def check(output: EngineOutput, expected: EngineOutput, begun: Parts) -> None:
    parts = {part.choice: part for part in begun}
    assert len(output.choices) == len(expected.choices)
    for found, alone in zip(output.choices, expected.choices, strict=True):
        assert (found.token_ids, found.tokens) == (alone.token_ids, alone.tokens)
        assert (found.text, found.finish_reason, found.error) == (alone.text, alone.finish_reason, None)
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert list(found.token_times) == sorted(found.token_times)
        assert len(found.token_times) == len(found.token_ids)
        _check_tops(found.top_logprobs, alone.top_logprobs)
        if (part := parts.get(found.choice)) is not None:
            kept = len(part.token_ids)
            assert found.logprobs[:kept] == part.logprobs
            assert found.token_times[:kept] == part.token_times
            assert found.started_at == part.started_at
            assert found.first_token_at == part.started_at + timedelta(seconds=part.token_times[0])
            assert part.top_logprobs is None or (found.top_logprobs or ())[:kept] == part.top_logprobs
    scores = expected.prompt_scores
    assert (output.prompt_scores is None) is (scores is None)
    if scores is not None and output.prompt_scores is not None:
        assert output.prompt_scores.token_ids == scores.token_ids
        assert output.prompt_scores.logprobs[1:] == pytest.approx(scores.logprobs[1:], abs=1e-4)


def _check_tops(found: Sequence[Any] | None, expected: Sequence[Any] | None) -> None:
    assert (found is None) is (expected is None)
    for best, alone in zip(found or (), expected or (), strict=True):
        assert [(i, text) for i, _, text in best] == [(i, text) for i, _, text in alone]
        assert [p for _, p, _ in best] == pytest.approx([p for _, p, _ in alone], abs=1e-4)


def spelled(engine: Engine, letters: Iterable[str]) -> dict[int, float]:
    """A bias that leaves nothing but these characters."""
    return {engine.encode_prompt(letter)[0]: 100.0 for letter in letters}


LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 2}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
FREE = {"temperature": 1.0, "seed": 11, "max_tokens": 22}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 22, "ignore_eos": True},
    "sampled": {**FREE, "ignore_eos": True},
    "filtered": {**FREE, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "ignore_eos": True},
    "penalties": {"temperature": 0, "max_tokens": 22, **PENALTIES, "bias": LETTERS},
    "a stop string": {**FREE, "bias": LETTERS, "stop_at": 9},
    "a stop string after a minimum": {
        **FREE,
        "temperature": 0,
        **PENALTIES,
        "bias": "abc",
        "stop": ("a", "b"),
        "min_tokens": 13,
    },
    "stop tokens after a minimum": {**FREE, "bias": LETTERS, "stops": "aeiou", "min_tokens": 10},
    "a response format": {**FREE, "max_tokens": 60, "response_format": response_format(COLOURS)},
    "top logprobs of three choices": {**FREE, "seed": 12, "n": 3, "top_logprobs": 4, "bias": LETTERS, "stops": "xyz"},
    "top logprobs": {**FREE, "top_logprobs": 2, "ignore_eos": True},
    "a first choice that ends first": {**FREE, "seed": 14, "n": 3, "bias": LETTERS, "stops": "xyz"},
    "a scored prompt": {**FREE, "prompt_logprobs": 2},
    "a scored prompt of three choices": {
        **FREE,
        "seed": 20,
        "n": 3,
        "prompt_logprobs": 0,
        "bias": LETTERS,
        "stops": "xyz",
    },
}


def sampling(engine: Engine, case: str, prompt: Sequence[int]) -> SamplingParams:
    """What a case asks for: ``bias`` leaves these letters only, ``stop_at`` makes the text that comes there a stop."""
    fields = dict(CASES[case])
    if letters := fields.pop("bias", ""):
        fields["logit_bias"] = spelled(engine, letters)
    fields["stop_token_ids"] = tuple(spelled(engine, fields.pop("stops", "")))
    at = fields.pop("stop_at", None)
    if at is not None:
        (output,) = engine.generate([prompt], SamplingParams(**fields))
        fields["stop"] = (output.text[at : at + 4],)
        engine.pool.forget()
    return SamplingParams(**fields)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_cut_of_an_answer_leads_to_the_same_answer(chat: Path, case: str, is_async: bool, page_size: int) -> None:
    """At the first token, within a page and at its end, across a stop string, at the last token."""
    settings: Mapping[str, Any] = {"page_size": page_size, "use_async_batching": is_async, "num_blocks": 400}
    first = make(chat, **settings)
    prompt = first.encode_prompt("a prompt of some length, ")
    asked = sampling(first, case, prompt)
    expected, cuts = snapshots(first, EngineRequest("alone", prompt, asked))
    longest = max(len(choice.token_ids) for choice in expected.choices)
    assert longest > 8
    assert len(cuts) >= longest - 1
    cuts = [tuple(map(stored, parts)) for parts in (*cuts, whole(expected))]

    second = make(chat, **settings, max_batch_tokens=30, allow_block_sharing=page_size == 4)
    for number, parts in enumerate(cuts):
        second.add(EngineRequest(number, prompt, asked, begun=parts))
        second.add(EngineRequest(("beside", number), tuple(prompts(1, number)[0]), SamplingParams(max_tokens=5)))
    outputs = run(second)
    for number, parts in enumerate(cuts):
        check(outputs[number], expected, parts)
    made = sum(len(choice.token_ids) for output in outputs.values() for choice in output.choices)
    kept = sum(len(part.token_ids) for parts in cuts for part in parts)
    assert second.stats().generated_tokens == made - kept


@pytest.mark.parametrize("case", ["sampled", "penalties", "a response format", "a scored prompt of three choices"])
def test_what_goes_on_can_give_way(chat: Path, case: str) -> None:
    first = make(chat)
    prompt = first.encode_prompt("a prompt of some length, ")
    asked = sampling(first, case, prompt)
    expected, cuts = snapshots(first, EngineRequest("alone", prompt, asked))
    second = make(chat, max_batch_tokens=64, allow_block_sharing=False)
    for number, parts in enumerate(cuts):
        second.add(EngineRequest(number, prompt, asked, begun=parts))
    outputs = run(second, giving_way=True)
    for number, parts in enumerate(cuts):
        check(outputs[number], expected, parts)
    assert second.stats().preemptions > 5
    assert second.stats().recomputed_tokens > 50
    assert 0 < second.stats().offloaded_sequences < second.stats().preemptions


@pytest.mark.parametrize("num_blocks", [1 + 2 * 12, 200])
@pytest.mark.parametrize("is_async", [False, True])
def test_windows_and_a_cache_for_one_sequence(windowed: Path, is_async: bool, num_blocks: int) -> None:
    first = make(windowed)
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    second = make(windowed, num_blocks=num_blocks, use_async_batching=is_async, max_batch_tokens=7)
    found: dict[Hashable, tuple[EngineOutput, Parts]] = {}
    for index, prompt in enumerate(prompts(4, longest=28)):
        expected, cuts = snapshots(first, EngineRequest("alone", tuple(prompt), asked))
        for number, parts in enumerate(cuts[::3]):
            second.add(EngineRequest((index, number), tuple(prompt), asked, begun=parts))
            found[index, number] = (expected, parts)
    outputs = run(second)
    for name, (expected, parts) in found.items():
        check(outputs[name], expected, parts)


def test_an_answer_can_change_hands_at_every_token(chat: Path) -> None:
    first = make(chat)
    prompt = first.encode_prompt("a prompt of some length, ")
    asked = sampling(first, "a first choice that ends first", prompt)
    (expected,) = first.generate([prompt], asked)
    begun: Parts = ()
    for _ in range(100):
        first.pool.forget()  # another engine, as far as its cache goes
        first.add(EngineRequest("it", prompt, asked, begun=begun))
        while first.has_work and first.progress().get("it", ()) == begun:
            if outputs := first.step():
                check(outputs[0], expected, begun)
                assert sum(len(part.token_ids) for part in begun) > 30
                return
        begun = tuple(map(stored, first.progress()["it"]))
        first.cancel("it")
    raise AssertionError("no end in sight")


class TestAnswersThatAreThereAlready:
    @pytest.mark.parametrize("case", ["sampled", "a stop string", "a first choice that ends first"])
    def test_nothing_is_generated(self, chat: Path, case: str) -> None:
        """The worker died after the last token and before the outcome was stored."""
        engine = make(chat)
        prompt = engine.encode_prompt("a prompt of some length, ")
        asked = sampling(engine, case, prompt)
        (expected,) = engine.generate([prompt], asked)
        before = engine.stats()
        engine.add(EngineRequest("it", prompt, asked, begun=whole(expected)))
        assert engine.has_work
        assert engine.progress() == {}
        (output,) = engine.step()
        check(output, expected, whole(expected))
        assert not engine.has_work
        assert engine.stats() == before

    def test_cancelled_in_time_it_keeps_its_end(self, chat: Path) -> None:
        engine = make(chat)
        prompt = engine.encode_prompt("a prompt of some length, ")
        asked = sampling(engine, "a stop string", prompt)
        (expected,) = engine.generate([prompt], asked)
        engine.add(EngineRequest("it", prompt, asked, begun=whole(expected)))
        output = engine.cancel("it")
        assert output is not None
        check(output, expected, whole(expected))
        assert not engine.has_work

    @pytest.mark.parametrize("is_async", [False, True])
    def test_its_prompt_is_still_scored(self, chat: Path, is_async: bool) -> None:
        """No token is generated, and the choices that go on find the prompt in the cache."""
        case = "a scored prompt of three choices"
        engine = make(chat, use_async_batching=is_async)
        prompt = engine.encode_prompt("a prompt of some length, ")
        asked = sampling(engine, case, prompt)
        (expected,) = engine.generate([prompt], asked)
        engine.pool.forget()
        parts = whole(expected)
        assert expected.finish_reason is FinishReason.STOP
        for begun, missing in ((parts, 0), ((parts[0], parts[1]), len(parts[2].token_ids))):
            before = engine.stats()
            engine.add(EngineRequest("it", prompt, asked, begun=begun))
            assert engine.progress() == {"it": begun}
            output = run(engine)["it"]
            check(output, expected, begun)
            assert engine.stats().generated_tokens - before.generated_tokens == missing
            assert engine.stats().prompt_tokens - before.prompt_tokens >= len(prompt) - 1
        assert output.other_choices[1].cached_tokens == 24  # of 25: the last page is not full

    def test_a_prompt_of_one_token_has_nothing_to_score(self, chat: Path) -> None:
        engine = make(chat)
        asked = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0)
        (expected,) = engine.generate([[40]], asked)
        engine.add(EngineRequest("it", (40,), asked, begun=whole(expected)))
        (output,) = engine.step()
        check(output, expected, whole(expected))


def spoilt(token: int, at: int) -> Callable[[Progress], Progress]:
    return lambda part: dataclasses.replace(part, token_ids=(*part.token_ids[:at], token, *part.token_ids[at + 1 :]))


def cut(name: str, to: int) -> Callable[[Progress], Progress]:
    return lambda part: dataclasses.replace(part, **{name: getattr(part, name)[:to]})


def back_in_time(part: Progress) -> Progress:
    return dataclasses.replace(part, token_times=(*part.token_times[:6], -1.0, *part.token_times[7:]))


def without_tops(part: Progress) -> Progress:
    return dataclasses.replace(part, top_logprobs=None)


@pytest.mark.parametrize(
    ("case", "spoil", "kept", "why"),
    [
        ("greedy", spoilt(-1, 4), 4, "token -1 is outside the vocabulary"),
        ("greedy", spoilt(259, 0), 0, "token 259 is outside the vocabulary"),
        ("greedy", spoilt(10**12, 9), 9, "token 1000000000000 is outside the vocabulary"),
        ("sampled", cut("token_ids", 7), 7, "its lists differ in length"),
        ("sampled", cut("logprobs", 7), 7, "its lists differ in length"),
        ("sampled", cut("token_times", 0), 0, "its lists differ in length"),
        ("top logprobs", cut("top_logprobs", 3), 3, "its lists differ in length"),
        ("top logprobs", without_tops, 0, "its lists differ in length"),
        ("sampled", back_in_time, 6, "its times go backwards"),
        ("a response format", spoilt(50, 5), 0, "token 50 does not fit the response format"),
    ],
)
def test_a_beginning_that_cannot_be_replayed_costs_no_request(
    chat: Path, caplog: pytest.LogCaptureFixture, case: str, spoil: Callable[[Progress], Progress], kept: int, why: str
) -> None:
    """What is good of it is kept, and the rest is generated again."""
    engine = make(chat)
    prompt = engine.encode_prompt("a prompt of some length, ")
    asked = sampling(engine, case, prompt)
    expected, cuts = snapshots(engine, EngineRequest("alone", prompt, asked))
    (good,) = next(parts for parts in cuts if len(parts[0].token_ids) == 10)
    marked = dataclasses.replace(good, logprobs=tuple(-100.0 - n for n in range(10)))
    before = engine.stats().generated_tokens
    engine.add(EngineRequest("it", prompt, asked, begun=(spoil(marked),)))
    output = run(engine)["it"]
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert output.logprobs[:kept] == marked.logprobs[:kept]
    assert output.logprobs[kept:] == pytest.approx(expected.logprobs[kept:], abs=1e-4)
    assert output.token_times[:kept] == marked.token_times[:kept]
    assert list(output.token_times) == sorted(output.token_times)
    assert (output.started_at == marked.started_at) is (kept > 0)
    assert engine.stats().generated_tokens - before == len(expected.token_ids) - kept
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("request 'it', choice 0: ")
    assert record.message.endswith(f"tokens that another engine made {kept} are kept: {why}")


@pytest.mark.parametrize("case", ["a stop string", "sampled"])
def test_tokens_behind_the_end_are_left_out(chat: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """The request was begun under other limits: its answer ends where it has to end here."""
    engine = make(chat)
    prompt = engine.encode_prompt("a prompt of some length, ")
    asked = sampling(engine, case, prompt)
    (longer,) = engine.generate([prompt], dataclasses.replace(asked, stop=()))
    if case == "sampled":
        asked = dataclasses.replace(asked, max_tokens=6)
    (expected,) = engine.generate([prompt], asked)
    assert len(expected.token_ids) < len(longer.token_ids)
    before = engine.stats().generated_tokens
    engine.add(EngineRequest("it", prompt, asked, begun=whole(longer)))
    output = run(engine)["it"]
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert output.finish_reason is expected.finish_reason
    assert output.token_times == longer.token_times[: len(output.token_ids)]
    assert engine.stats().generated_tokens == before
    assert "the answer ends there" in caplog.text


def test_beginnings_of_no_choice_and_of_one_choice_twice(chat: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(chat)
    prompt = engine.encode_prompt("a prompt of some length, ")
    asked = sampling(engine, "a first choice that ends first", prompt)
    expected, cuts = snapshots(engine, EngineRequest("alone", prompt, asked))
    first, second, third = next(parts for parts in cuts if len(parts) == 3)
    strange = (second, dataclasses.replace(first, choice=3), dataclasses.replace(first, choice=-1), third, second)
    engine.add(EngineRequest("it", prompt, asked, begun=strange))
    check(run(engine)["it"], expected, (second, third))
    assert [record.args for record in caplog.records] == [("it", 3), ("it", -1), ("it", 1)]


def test_tokens_without_a_prompt_to_go_on_from_are_left_out(chat: Path) -> None:
    """``max_tokens`` 0 scores a prompt and has no answer."""
    engine = make(chat)
    prompt = engine.encode_prompt("a prompt of some length, ")
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=4, seed=1))
    asked = SamplingParams(max_tokens=0, prompt_logprobs=1, n=2)
    (expected,) = engine.generate([prompt], asked)
    engine.add(EngineRequest("it", prompt, asked, begun=whole(answer)))
    check(run(engine)["it"], expected, ())


class TestClocks:
    def go_on(self, engine: Engine, started_at: datetime, times: tuple[float, ...]) -> EngineOutput:
        begun = Progress(
            token_ids=(40,) * len(times),
            tokens=("G",) * len(times),
            logprobs=(-1.0,) * len(times),
            token_times=times,
            started_at=started_at,
        )
        asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add(EngineRequest("it", (30, 31, 32), asked, begun=(begun,)))
        output = run(engine)["it"]
        assert output.started_at == started_at
        assert output.token_times[: len(times)] == times
        assert list(output.token_times) == sorted(output.token_times)
        assert output.finished_at == started_at + timedelta(seconds=output.token_times[-1])
        return output

    def test_time_went_on_while_no_engine_had_it(self, chat: Path) -> None:
        hour_ago = datetime.now(UTC) - timedelta(hours=1)
        output = self.go_on(make(chat), hour_ago, (0.5, 0.75))
        assert all(3600 <= seconds < 3600 + WAIT for seconds in output.token_times[2:])

    def test_a_clock_that_is_behind_takes_no_time_back(self, chat: Path) -> None:
        """The other host's clock was ahead."""
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        output = self.go_on(make(chat), tomorrow, (0.5, 7.5))
        assert all(7.5 < seconds < 7.5 + WAIT for seconds in output.token_times[2:])
        assert len(set(output.token_times)) == 6
        recent = datetime.now(UTC)
        assert all(t > 7.5 for t in self.go_on(make(chat), recent, (0.5, 7.5)).token_times[2:])


class TestProgress:
    def test_it_has_what_was_collected_of_what_is_unfinished(self, chat: Path) -> None:
        """Also while a step is on its way."""
        engine = make(chat, use_async_batching=True, max_requests_per_batch=2)
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for name in "abc":
            engine.add(EngineRequest(name, engine.encode_prompt(f"prompt {name}"), asked))
        assert engine.progress() == {}
        engine.step()
        assert engine.progress() == {}, "the first token is on its way"
        engine.step()
        assert {name: len(part.token_ids) for name, (part,) in engine.progress().items()} == {"a": 1, "b": 1}
        engine.settle()
        seen = engine.progress()
        assert {name: len(part.token_ids) for name, (part,) in seen.items()} == {"a": 2, "b": 2}
        engine.scheduler._preempt(engine.scheduler.running[-1])
        assert engine.progress() == seen
        ended = [engine.cancel("a"), engine.cancel("b")]
        assert engine.progress() == {}
        for output in ended:
            assert output is not None
            assert whole(output) == seen[output.request_id]
        run(engine)

    def test_choices_that_failed_are_left_out(self, chat: Path) -> None:
        engine = make(chat)
        prompt = engine.encode_prompt("a prompt of some length, ")
        engine.add(EngineRequest("it", prompt, sampling(engine, "a first choice that ends first", prompt)))
        while len(engine.progress().get("it", ())) < 3:
            engine.step()
        engine._fail(engine._requests["it"][1], "non_finite_logits", "for a test")
        assert [part.choice for part in engine.progress()["it"]] == [0, 2]
        run(engine)

    def test_texts_and_bytes_are_those_of_the_answer(self, chat: Path) -> None:
        engine = make(chat)
        prompt = engine.encode_prompt("a prompt of some length, ")
        asked = sampling(engine, "filtered", prompt)
        expected, cuts = snapshots(engine, EngineRequest("alone", prompt, asked))
        assert any(isinstance(text, tuple) for text in expected.tokens), "bytes that are no text by themselves"
        for (part,) in cuts:
            assert part.tokens == expected.tokens[: len(part.token_ids)]


def test_a_stream_tells_the_whole_answer(chat: Path) -> None:
    """A reader of what goes on gets the tokens of the beginning too: the pieces are together the text."""
    engine = make(chat)
    prompt = engine.encode_prompt("a prompt of some length, ")
    asked = sampling(engine, "a first choice that ends first", prompt)
    expected, cuts = snapshots(engine, EngineRequest("alone", prompt, asked))
    with EngineLoop(engine) as loop:
        for number, parts in enumerate((cuts[4], cuts[-1], whole(expected))):
            loop.add(EngineRequest(number, prompt, asked, stream=True, begun=parts))
        for number in range(3):
            pieces = list(loop.stream(number, WAIT))
            for choice in expected.choices:
                told = [piece for piece in pieces if piece.choice == choice.choice]
                assert tuple(piece.token_id for piece in told if piece.output is None) == choice.token_ids
                assert "".join(piece.text for piece in told) == choice.text


class HandedOver(_Run):
    """A case whose engine is given up at some steps: another one goes on with all that is unfinished."""

    def __init__(self, case: Case, engine: Engine, model: FuzzModel, updates: None, report: Report, log: Log) -> None:
        super().__init__(case, engine, model, updates, report, log)
        self.model = model
        rng = random.Random(case.seed)
        self.left = sorted(rng.sample(range(1, 40), 3))  # steps after which it is given up
        self.steps = 0

    def play(self) -> None:
        try:
            super().play()
        finally:
            self.engine.close()

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        super()._take(outputs)
        self.steps += 1
        if self.left and self.left[0] == self.steps and self.live:
            self.left.pop(0)
            self._hand_over()

    def _hand_over(self) -> None:
        begun = self.engine.progress()
        self.engine.close()  # what was in flight is lost
        self.engine = build_engine(self.case, self.model)
        self.log(f"  another engine goes on: { {name: [len(p.token_ids) for p in ps] for name, ps in begun.items()} }")
        self.engine.observer = Watch(self.case, self.counts, self.log)
        if self.case.optimistic:
            self.engine.scheduler.expected_answer_share = 0.0
        for name, index in self.live.items():
            request, parts = self.case.requests[index], tuple(map(stored, begun.get(name, ())))
            self.deltas.pop(index, None)  # they are told again
            self.engine.add(EngineRequest(name, request.prompt, request.sampling, request.stream, begun=parts))
            self.counts["handed over"] += sum(len(part.token_ids) for part in parts)


def hand_over(seeds: Iterable[int]) -> Summary:
    summary = Summary()
    features = [feature for feature in FEATURES if feature != "updates"]  # the other engine has the same model
    with patch("tests.fuzz.drive._Run", HandedOver), Models() as models:
        for seed in seeds:
            summary.add(run_case(dataclasses.replace(draw_case(seed, features), runs=1), models))
    return summary


def test_random_cases_whose_engines_are_given_up_give_what_each_prompt_gives_alone() -> None:
    summary = hand_over(range(24))
    failed = {report.case.seed: report.problems[0] for report in summary.failures}
    assert not failed
    assert summary.counts["handed over"] > 200
    assert summary.counts["forgiven"] * 100 < summary.counts["choices"]
