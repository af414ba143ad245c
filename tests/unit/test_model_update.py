"""A running engine gets other weights: what becomes of unfinished answers, and what may not remain of the old ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchjobs.types import FinishReason, SamplingParams, VersionSpan
from tests.support.cases import case
from tests.support.engines import make, prompts
from tests.support.models import save_chat_model, save_model
from tests.support.updates import (
    are_same,
    bits,
    fresh,
    greedy,
    is_empty,
    made,
    new,
    old,
    request,
    run,
    save_long,
    step_until,
)
from workers.engine import Engine, EngineOutput, UpdateRefused

__all__ = ["new", "old"]

DEPTHS = pytest.mark.parametrize("is_async", [False, True])
PROMPT = prompts(1, seed=5)[0]
MADE = 9  # tokens when the model changes
LENGTH = 24


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return (
        save_model("gemma2", tmp_path_factory.mktemp("old_windowed"), seed=0),
        save_model("gemma2", tmp_path_factory.mktemp("new_windowed"), seed=1),
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return (
        save_long(tmp_path_factory.mktemp("old_long"), seed=0),
        save_long(tmp_path_factory.mktemp("new_long"), seed=1),
    )


def spans(output: EngineOutput) -> list[tuple[str, int]]:
    return [(span.version, span.from_token) for span in output.version_spans]


def begun(folder: Path, is_async: bool, **settings: object) -> Engine:
    """An engine in the middle of an answer named ``it``."""
    engine = make(folder, use_async_batching=is_async, **settings)
    engine.add(request("it", PROMPT, greedy(LENGTH)))
    step_until(engine, lambda: made(engine, "it") == MADE)
    return engine


class TestPolicies:
    @DEPTHS
    def test_recompute_goes_on_as_a_fresh_engine_would(self, old: Path, new: Path, is_async: bool) -> None:
        engine = begun(old, is_async)
        before = engine.model_version
        report = engine.update_model(str(new), inflight="recompute")
        output = run(engine)["it"]
        switch = output.version_spans[1].from_token
        assert switch in (MADE, MADE + 1)  # the step in flight is collected first
        assert list(output.token_ids[:switch]) == list(fresh(old, PROMPT, switch).token_ids)
        rest = fresh(new, [*PROMPT, *output.token_ids[:switch]], LENGTH - switch)
        assert output.token_ids[switch:] == rest.token_ids
        assert output.logprobs[switch:] == pytest.approx(rest.logprobs, abs=1e-4)
        assert spans(output) == [(before, 0), (engine.model_version, switch)]
        assert (report.recomputed, report.kept, report.restarted, report.finished) == (1, 0, 0, 0)
        assert (report.old_version, report.new_version) == (before, engine.model_version)
        assert (report.old_model, report.new_model, report.is_reload) == (old.name, new.name, False)
        assert output.token_ids[switch:] != fresh(old, PROMPT, LENGTH).token_ids[switch:]
        assert is_empty(engine)
        engine.close()

    @DEPTHS
    def test_keep_computes_nothing_again(self, old: Path, new: Path, is_async: bool) -> None:
        engine = begun(old, is_async)
        before, version = engine.stats().prompt_tokens, engine.model_version
        report = engine.update_model(str(new), inflight="keep")
        output = run(engine)["it"]
        switch = output.version_spans[1].from_token
        assert output.token_ids[:switch] == fresh(old, PROMPT, switch).token_ids
        assert spans(output) == [(version, 0), (engine.model_version, switch)]
        assert (engine.stats().prompt_tokens, engine.stats().recomputed_tokens) == (before, 0)
        assert (report.kept, report.recomputed) == (1, 0)
        # What was kept is for this answer alone: nobody finds it afterwards.
        again = engine.generate([PROMPT], greedy(LENGTH))[0]
        assert (again.cached_tokens, again.token_ids) == (0, fresh(new, PROMPT, LENGTH).token_ids)
        assert is_empty(engine)
        engine.close()

    @DEPTHS
    def test_finish_is_wholly_of_the_old_weights(self, old: Path, new: Path, is_async: bool) -> None:
        engine = begun(old, is_async, max_requests_per_batch=2)
        version = engine.model_version
        others = prompts(3, seed=9)
        for index, prompt in enumerate(others):
            engine.add(request(index, prompt, greedy(6)))
        engine.step()  # the first of them begins, for the others there is no slot
        report = engine.update_model(str(new), inflight="finish")
        outputs = run(engine)
        assert outputs["it"].token_ids == fresh(old, PROMPT, LENGTH).token_ids
        assert outputs[0].token_ids == fresh(old, others[0], 6).token_ids
        assert spans(outputs["it"]) == spans(outputs[0]) == [(version, 0)]
        for index in (1, 2):
            assert outputs[index].token_ids == fresh(new, others[index], 6).token_ids
            assert spans(outputs[index]) == [(engine.model_version, 0)]
        assert (report.finished, report.recomputed, report.restarted) == (2, 0, 0)
        assert is_empty(engine)
        engine.close()

    @DEPTHS
    def test_restart_is_wholly_of_the_new_weights(self, old: Path, new: Path, is_async: bool) -> None:
        engine = begun(old, is_async)
        report = engine.update_model(str(new), inflight="restart")
        output, wanted = run(engine)["it"], fresh(new, PROMPT, LENGTH)
        assert (output.token_ids, output.cached_tokens) == (wanted.token_ids, 0)
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert spans(output) == [(engine.model_version, 0)]
        assert (report.restarted, report.recomputed) == (1, 0)
        assert is_empty(engine)
        engine.close()

    @pytest.mark.parametrize("policy", ["recompute", "keep", "finish", "restart"])
    @pytest.mark.parametrize(
        ("scheduler_type", "is_async"), [("fifo", True), ("prefix", False), ("longest_first", True)]
    )
    def test_under_pressure_every_answer_is_what_its_spans_say(
        self, old: Path, new: Path, policy: str, scheduler_type: str, is_async: bool
    ) -> None:
        """Some run, some gave way with their pages and some without, some share pages, some have not begun."""
        engine = make(
            old,
            num_blocks=30,
            max_requests_per_batch=5,
            max_batch_tokens=16,
            cpu_offload_space=1.0,
            scheduler_type=scheduler_type,
            use_async_batching=is_async,
        )
        engine.scheduler.expected_answer_share = 0.0
        some = [PROMPT[:8] + prompt[:12] for prompt in prompts(8, seed=3)]
        for index, prompt in enumerate(some):
            engine.add(request(index, prompt, greedy(20)))
        step_until(engine, lambda: engine.stats().offloaded_sequences > 0 or engine.stats().preemptions > 1)
        engine.update_model(str(new), inflight=policy)
        outputs = run(engine)
        versions = set()
        for index, prompt in enumerate(some):
            output = outputs[index]
            assert len(output.token_ids) == 20
            cuts = [span.from_token for span in output.version_spans]
            versions |= {len(cuts)}
            if len(cuts) == 1:
                folder = new if output.version_spans[0].version == engine.model_version else old
                assert output.token_ids == fresh(folder, prompt, 20).token_ids, index
                continue
            assert policy in ("recompute", "keep")
            assert output.token_ids[: cuts[1]] == fresh(old, prompt, cuts[1]).token_ids, index
            if policy == "recompute":
                rest = fresh(new, [*prompt, *output.token_ids[: cuts[1]]], 20 - cuts[1])
                assert output.token_ids[cuts[1] :] == rest.token_ids, index
        assert versions == ({1} if policy in ("finish", "restart") else {1, 2})
        assert is_empty(engine)
        again = engine.generate(some, greedy(20))
        assert [output.token_ids for output in again] == [fresh(new, prompt, 20).token_ids for prompt in some]
        engine.close()

    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    def test_sliding_windows(self, windowed: tuple[Path, Path], policy: str) -> None:
        before, after = windowed
        engine = make(before, num_blocks=60, max_batch_tokens=7)
        some = prompts(3, seed=4, longest=28)
        for index, prompt in enumerate(some):
            engine.add(request(index, prompt, greedy(LENGTH)))
        step_until(engine, lambda: made(engine, 0) == 12)
        engine.update_model(str(after), inflight=policy)
        outputs = run(engine)
        for index, prompt in enumerate(some):
            cut = outputs[index].version_spans[-1].from_token
            assert (cut > 0) == (policy != "restart")
            assert outputs[index].token_ids[:cut] == fresh(before, prompt, max(cut, 1)).token_ids[:cut]
            if policy != "keep":
                rest = fresh(after, [*prompt, *outputs[index].token_ids[:cut]], LENGTH - cut)
                assert outputs[index].token_ids[cut:] == rest.token_ids
        assert is_empty(engine)
        engine.close()

    @case("A-eng-04")
    def test_the_switch_of_a_long_answer_is_marked(self, long: tuple[Path, Path]) -> None:
        engine = make(long[0])
        engine.add(request("it", PROMPT, greedy(500)))
        step_until(engine, lambda: made(engine, "it") == 100)
        version = engine.model_version
        engine.update_model(str(long[1]))
        output = run(engine)["it"]
        assert spans(output) == [(version, 0), (engine.model_version, 100)]
        assert output.token_ids[:100] == fresh(long[0], PROMPT, 100).token_ids
        assert output.token_ids[100:] == fresh(long[1], [*PROMPT, *output.token_ids[:100]], 400).token_ids
        assert list(output.token_times) == sorted(output.token_times)
        engine.close()

    def test_there_are_four(self, old: Path, new: Path) -> None:
        engine = make(old)
        with pytest.raises(Exception, match="inflight must be one of recompute, keep, finish, restart, not 'mix'"):
            engine.update_model(str(new), inflight="mix")


class TestCaches:
    @pytest.mark.parametrize("policy", ["recompute", "keep", "finish", "restart"])
    @case("A-eng-01")
    def test_a_known_beginning_is_not_known_any_more(self, long: tuple[Path, Path], policy: str) -> None:
        engine = make(long[0], num_blocks=500, page_size=16)
        shared = prompts(400, seed=7)
        prompt = [token for part in shared for token in part][:820]
        first, second = (engine.generate([prompt], greedy(8))[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 816)
        engine.update_model(str(long[1]), inflight=policy)
        third = engine.generate([prompt], greedy(8))[0]
        assert (third.cached_tokens, third.token_ids) == (0, fresh(long[1], prompt, 8).token_ids)
        assert spans(third) == [(engine.model_version, 0)]
        assert third.token_ids != second.token_ids
        assert engine.generate([prompt], greedy(8))[0].cached_tokens == 816
        engine.close()

    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    @DEPTHS
    def test_a_prompt_that_was_being_read_is_read_again(
        self, old: Path, new: Path, policy: str, is_async: bool
    ) -> None:
        """It has no token yet, so nothing of the old weights is worth keeping, and nothing would mark it."""
        engine = make(old, max_batch_tokens=4, use_async_batching=is_async)
        engine.generate([PROMPT[:9]], greedy(1))
        engine.add(request("it", PROMPT, greedy(LENGTH)))
        engine.step()
        assert 8 == engine._requests["it"][0].cached_tokens < engine._requests["it"][0].computed < len(PROMPT)
        engine.update_model(str(new), inflight=policy)
        output = run(engine)["it"]
        assert output.token_ids == fresh(new, PROMPT, LENGTH).token_ids
        assert (spans(output), output.cached_tokens) == ([(engine.model_version, 0)], 0)
        assert is_empty(engine)
        engine.close()

    def test_what_is_kept_is_not_mixed_with_what_others_compute_later(self, old: Path, new: Path) -> None:
        """It comes back from the host when the new weights have read the same prompt."""
        outputs = []
        for gives_way in (False, True):
            engine = begun(old, False)
            engine.update_model(str(new), inflight="keep")
            if gives_way:
                engine.suspend(["it"])
                engine.generate([PROMPT], greedy(4))
                engine.scheduler._preempt(engine._requests["it"][0])
                assert engine.stats().offloaded_pages > 0
                engine.resume(["it"])
            outputs.append(run(engine)["it"])
            assert is_empty(engine)
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].logprobs == pytest.approx(outputs[1].logprobs, abs=1e-5)

    def test_one_that_found_its_beginning_keeps_its_count(self, old: Path, new: Path) -> None:
        engine = make(old)
        engine.generate([PROMPT], greedy(2))
        engine.add(request("it", PROMPT, greedy(LENGTH)))
        step_until(engine, lambda: made(engine, "it") == MADE)
        found = engine._requests["it"][0].cached_tokens
        engine.update_model(str(new))
        assert run(engine)["it"].cached_tokens == found > 0
        engine.close()


class TestKinds:
    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    @DEPTHS
    def test_choices(self, old: Path, new: Path, policy: str, is_async: bool) -> None:
        sampled = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=16, ignore_eos=True)
        engine = make(old, use_async_batching=is_async)
        engine.add(request("it", PROMPT, sampled))
        step_until(engine, lambda: all(choice.generated >= 4 for choice in engine._requests["it"]))
        report = engine.update_model(str(new), inflight=policy)
        output = run(engine)["it"]
        assert report.restarted + report.recomputed + report.kept == 1
        first, second = make(old), make(new)
        before = first.generate([PROMPT], sampled)[0]
        after = second.generate([PROMPT], sampled)[0]
        for choice in range(3):
            cut = output.choices[choice].version_spans[-1].from_token
            assert output.choices[choice].token_ids[:cut] == before.choices[choice].token_ids[:cut]
            if policy == "restart":
                assert output.choices[choice].token_ids == after.choices[choice].token_ids
            else:
                assert cut >= 4
        assert is_empty(engine)
        engine.close()

    def test_a_choice_that_had_ended_is_restarted_with_the_others(self, old: Path, new: Path) -> None:
        engine = make(old)
        wanted = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=30)
        for seed in range(200):  # one whose choices end at different times
            wanted = SamplingParams(temperature=1.0, seed=seed, n=4, max_tokens=30)
            lengths = sorted(len(c.token_ids) for c in engine.generate([PROMPT], wanted)[0].choices)
            if lengths[0] + 5 < lengths[-1]:
                break
        engine.add(request("it", PROMPT, wanted))
        step_until(engine, lambda: any(choice.is_finished for choice in engine._requests["it"]))
        engine.update_model(str(new), inflight="restart")
        output, fresh_one = run(engine)["it"], make(new).generate([PROMPT], wanted)[0]
        assert [c.token_ids for c in output.choices] == [c.token_ids for c in fresh_one.choices]
        assert all(spans(choice) == [(engine.model_version, 0)] for choice in output.choices)
        assert is_empty(engine)

    def test_a_seed_that_was_drawn_stays(self, old: Path, new: Path) -> None:
        engine = make(old, seed=5)
        engine.add(request("it", PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)))
        step_until(engine, lambda: made(engine, "it") == 4)
        engine.update_model(str(new), inflight="restart")
        output = run(engine)["it"]
        other = make(new, seed=5).generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))[0]
        assert output.token_ids == other.token_ids
        later = [engine.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))[0] for _ in range(2)]
        assert len({o.token_ids for o in (*later, output)}) == 3  # it draws on, and does not begin again

    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    def test_prompt_scores_are_of_one_model(self, old: Path, new: Path, policy: str) -> None:
        asked = greedy(8, prompt_logprobs=2)
        engine = make(old, max_batch_tokens=5)
        engine.add(request("reading", PROMPT, asked))
        engine.step()
        engine.step()
        assert 0 < len(engine._requests["reading"][0].prompt_logprobs) < len(PROMPT) - 1
        engine.update_model(str(new), inflight=policy)
        wanted = make(new).generate([PROMPT], asked)[0].prompt_scores
        scores = run(engine)["reading"].prompt_scores
        assert wanted is not None
        assert scores is not None
        assert scores.logprobs[1:] == pytest.approx(wanted.logprobs[1:], abs=1e-4)
        assert scores.top_logprobs is not None
        assert len(scores.top_logprobs) == len(PROMPT)

    def test_a_prompt_that_is_only_scored(self, old: Path, new: Path) -> None:
        asked = SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
        engine = make(old, max_batch_tokens=5)
        engine.add(request("it", PROMPT, asked))
        engine.step()
        engine.update_model(str(new), inflight="restart")
        wanted = make(new).generate([PROMPT], asked)[0].prompt_scores
        output = run(engine)["it"]
        assert wanted is not None
        assert output.prompt_scores is not None
        assert output.prompt_scores.logprobs[1:] == pytest.approx(wanted.logprobs[1:], abs=1e-4)
        assert output.version_spans == ()
        assert is_empty(engine)

    @pytest.mark.parametrize("policy", ["restart", "finish"])
    def test_tokens_of_another_engine_are_never_mixed_in(self, old: Path, new: Path, policy: str) -> None:
        first = begun(old, False)
        parts = first.progress()["it"]
        engine = make(old, max_requests_per_batch=1)
        engine.add(request("before", PROMPT, greedy(4)))
        engine.step()
        engine.add(request("it", PROMPT, greedy(LENGTH), begun=parts))
        engine.update_model(str(new), inflight=policy)
        output = run(engine)["it"]
        assert output.token_ids == fresh(new, PROMPT, LENGTH).token_ids
        assert spans(output) == [(engine.model_version, 0)]
        assert is_empty(engine)

    def test_tokens_of_another_engine_are_marked_where_they_stay(self, old: Path, new: Path) -> None:
        first = begun(old, False)
        engine = make(old, max_requests_per_batch=1)
        engine.add(request("before", PROMPT, greedy(4)))
        engine.step()
        engine.add(request("it", PROMPT, greedy(LENGTH), begun=first.progress()["it"], made_by=("w2", 3)))
        engine.update_model(str(new))
        output = run(engine)["it"]
        assert output.version_spans == (
            VersionSpan(version=first.model_version),
            VersionSpan(version=engine.model_version, from_token=MADE, worker="w2", attempt=3),
        )

    @pytest.mark.parametrize("policy", ["restart", "recompute"])
    def test_a_streamed_token_is_never_taken_back(self, old: Path, new: Path, policy: str) -> None:
        engine = make(old)
        engine.add(request("it", PROMPT, greedy(LENGTH), stream=True))
        step_until(engine, lambda: made(engine, "it") == MADE)
        engine.update_model(str(new), inflight=policy)
        output = run(engine)["it"]
        assert [delta.token_id for delta in engine.take_deltas()] == list(output.token_ids)
        assert [cut for _, cut in spans(output)] == [0, MADE]

    @pytest.mark.parametrize("policy", ["recompute", "restart"])
    def test_penalties_stops_and_formats_stand_where_they_should(self, tmp_path: Path, policy: str) -> None:
        for seed in (0, 1):
            save_chat_model(tmp_path / f"{seed}", seed=seed)
        engine = make(tmp_path / "0")
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 30}
        formatted = greedy(24, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
        penalised = greedy(24, frequency_penalty=1.5, repetition_penalty=1.3)
        prompt = engine.encode_prompt("numbers")
        engine.add(request("format", prompt, formatted))
        engine.add(request("penalty", prompt, penalised))
        step_until(engine, lambda: made(engine, "penalty") == MADE)
        engine.update_model(str(tmp_path / "1"), inflight=policy)
        outputs, other = run(engine), make(tmp_path / "1")
        for name, asked in (("format", formatted), ("penalty", penalised)):
            cut = outputs[name].version_spans[-1].from_token
            assert cut == (0 if policy == "restart" else MADE)
            if policy == "restart":
                assert outputs[name].token_ids == other.generate([prompt], asked)[0].token_ids
        assert outputs["format"].text.startswith("[")
        assert set(outputs["format"].text) <= set("[]0123456789,- \n")


class TestEnds:
    @pytest.mark.parametrize("policy", ["recompute", "keep"])
    def test_an_answer_under_way_ends_where_the_new_model_would(self, tmp_path: Path, policy: str) -> None:
        first, second = (save_chat_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
        asked = SamplingParams(temperature=0, max_tokens=40)
        outputs = []
        for end in (None, 12):
            engine = make(first)
            prompt = engine.encode_prompt("the end of it")
            if end is not None:
                _set_eos(second, outputs[0].token_ids[end])
            engine.add(request("it", prompt, asked))
            step_until(engine, lambda engine=engine: made(engine, "it") == 6)
            engine.update_model(str(second), inflight=policy)
            outputs.append(run(engine)["it"])
        end = outputs[0].token_ids.index(outputs[0].token_ids[12], 6)
        assert outputs[1].token_ids == outputs[0].token_ids[: end + 1]
        assert outputs[1].finish_reason is FinishReason.STOP

    def test_the_new_models_end_tokens_and_template_hold(self, tmp_path: Path) -> None:
        first, second = (save_chat_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
        template = second / "chat_template.jinja"
        template.write_text("{{ messages[0]['content'] }}!")
        engine = make(first)
        prompt = engine.encode_prompt("the end of it")
        plain = engine.generate([prompt], greedy(12))[0]
        answer = fresh(second, prompt, 12).token_ids
        end = answer[5]
        _set_eos(second, end)
        engine.add(request("begun", prompt, SamplingParams(temperature=0, max_tokens=12)))
        engine.step()
        engine.update_model(str(second), inflight="restart")
        output = run(engine)["begun"]
        assert output.finish_reason is FinishReason.STOP
        assert output.token_ids == answer[: answer.index(end) + 1] != plain.token_ids
        chat = engine.encode_chat([{"role": "user", "content": "hi"}])
        assert engine.vocabulary.decode(chat) == "hi!"

    def test_there_and_back_again(self, old: Path, new: Path) -> None:
        engine = make(old)
        some = prompts(4)
        first, at_first, version = engine.generate(some, greedy(10)), bits(engine), engine.model_version
        addresses = {name: id(parameter) for name, parameter in engine.runner.model.named_parameters()}
        staged = engine.stage(str(new))
        assert staged.is_hot
        assert staged.why_not_hot is None
        engine.update_model(staged)
        assert (staged.version, staged.name) == (version, old.name)  # it holds the old weights now
        other = engine.generate(some, greedy(10))
        engine.update_model(staged)
        again = engine.generate(some, greedy(10))
        assert [(o.token_ids, o.logprobs) for o in again] == [(o.token_ids, o.logprobs) for o in first]
        assert [o.token_ids for o in other] != [o.token_ids for o in first]
        assert (engine.model_version, engine.model_name) == (version, old.name)
        assert are_same(bits(engine), at_first)
        assert addresses == {name: id(parameter) for name, parameter in engine.runner.model.named_parameters()}

    def test_the_details_are_the_new_models(self, old: Path, new: Path) -> None:
        engine, other = make(old), make(new)
        engine.update_model(str(new))
        assert engine.model_details == other.model_details
        assert engine.model_version == other.model_version
        assert engine.model_details["weights_sha256"] != make(old).model_details["weights_sha256"]

    def test_the_same_weights_again(self, old: Path) -> None:
        engine = begun(old, False)
        engine.update_model(str(old))
        output = run(engine)["it"]
        assert output.token_ids == fresh(old, PROMPT, LENGTH).token_ids
        assert spans(output) == [(engine.model_version, 0)]  # one version, one span

    @DEPTHS
    def test_what_ended_meanwhile_says_whose_it_is(self, old: Path, new: Path, is_async: bool) -> None:
        """A prompt that is only scored has no span."""
        engine = begun(old, is_async)
        version = engine.model_version
        asked = SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)
        engine.add(request("scored", PROMPT, asked))
        outputs = engine.step()
        engine.update_model(str(new))
        engine.add(request("refused", [], greedy(3)))
        engine.add(request("later", PROMPT, asked))
        outputs += [*run(engine).values()]
        found = {output.request_id: [choice.model_version for choice in output.choices] for output in outputs}
        assert found == {
            "scored": [version] * 2,
            "refused": [engine.model_version],
            "it": [engine.model_version],
            "later": [engine.model_version] * 2,
        }

    def test_what_is_suspended_meanwhile_is_not_waited_for(
        self, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In synchronous use nobody could resume it."""
        engine = begun(old, False)
        step = engine.step

        def suspending() -> list[EngineOutput]:
            outputs = step()
            engine.suspend(["it"])
            return outputs

        monkeypatch.setattr(engine, "step", suspending)
        with pytest.raises(UpdateRefused, match="are suspended, so they would never be finished"):
            engine.update_model(str(new), inflight="finish")
        monkeypatch.undo()
        engine.resume(["it"])
        assert run(engine)["it"].token_ids == fresh(old, PROMPT, LENGTH).token_ids

    def test_what_is_suspended_cannot_be_finished(self, old: Path, new: Path) -> None:
        engine = begun(old, False)
        engine.suspend(["it"])
        with pytest.raises(UpdateRefused, match="are suspended, so they would never be finished"):
            engine.update_model(str(new), inflight="finish")
        engine.add(request("later", PROMPT, greedy(3)))
        engine.resume(["it"])
        outputs = run(engine)
        assert outputs["it"].token_ids == fresh(old, PROMPT, LENGTH).token_ids
        assert outputs["later"].token_ids == fresh(old, PROMPT, 3).token_ids

    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    def test_what_is_suspended_goes_on_under_the_new_weights(self, old: Path, new: Path, policy: str) -> None:
        engine = begun(old, False)
        engine.add(request("queued", PROMPT, greedy(LENGTH), suspended=True))
        engine.suspend(["it"])
        engine.update_model(str(new), inflight=policy)
        assert not engine.has_work
        assert engine.stats().suspended == 2
        assert fresh(new, PROMPT, 5).token_ids == engine.generate([PROMPT], greedy(5))[0].token_ids
        engine.resume(["it", "queued"])
        outputs = run(engine)
        cut = outputs["it"].version_spans[-1].from_token
        assert cut == (0 if policy == "restart" else MADE)
        if policy != "keep":
            rest = fresh(new, [*PROMPT, *outputs["it"].token_ids[:cut]], LENGTH - cut)
            assert outputs["it"].token_ids[cut:] == rest.token_ids
        assert outputs["queued"].token_ids == fresh(new, PROMPT, LENGTH).token_ids
        assert is_empty(engine)


def _set_eos(folder: Path, token: int) -> None:
    for name in ("config.json", "generation_config.json"):
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**known, "eos_token_id": token}))
