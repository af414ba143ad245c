"""Faults that people met in engines of this kind: parameters, numbers, and an engine's life, one test each.

Those with tokens, texts and the context are in `test_known_text_faults.py`; whole batches, queues and commands have
their tests beside those parts.
"""

from __future__ import annotations

import json
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from batchjobs.errors import InvalidParameter
from batchjobs.jsonl import parse_line
from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.cases import case
from tests.support.engines import prompts
from tests.support.models import (
    VOCAB_SIZE,
    load_reference,
    recomputed_logprobs,
    save_chat_model,
    save_model,
    solo_greedy,
)
from workers.engine import Engine, EngineOutput, EngineRequest, SamplingParams
from workers.engine import sequence as sequence_module
from workers.engine.text import Vocabulary


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def make(folder: Path, **settings: object) -> Engine:
    return engines.make(folder, **({"num_blocks": 400} | settings))


def code(output: EngineOutput) -> str | None:
    return output.error.code if output.error else None


GREEDY = SamplingParams(temperature=0, max_tokens=12)

# Sampling parameters


@case("A-sp-01")
def test_sp_01_an_empty_stop_string_is_refused() -> None:
    for stop in [("",), ("", "END")]:
        with pytest.raises(InvalidParameter, match="none of them empty"):
            SamplingParams(stop=stop)


@case("A-sp-02")
def test_sp_02_a_stop_string_that_is_a_special_token_ends_the_answer(chat_model: Path) -> None:
    engine = make(chat_model)
    special = engine.vocabulary.special_id("<|im_start|>")
    assert special is not None
    forced = SamplingParams(temperature=0, max_tokens=20, stop=("<|im_start|>",), logit_bias={special: 100.0})
    output = engine.generate(["hi"], forced)[0]
    assert (output.finish_reason, output.token_ids, output.text) == (FinishReason.STOP, (special,), "")


@case("A-sp-02")
def test_sp_02_a_special_token_that_only_the_tokenizers_table_knows_ends_it_too(tmp_path: Path) -> None:
    """As Llama 3's end of a turn: special, and not among the tokenizer's named ones."""
    folder = save_chat_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    assert (added := tokenizer.convert_tokens_to_ids("<|turn|>")) not in tokenizer.all_special_ids
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.special_id("<|turn|>") == added
    assert vocabulary.is_special(added)
    assert vocabulary.is_left_out(added)
    assert vocabulary.decode([added]) == ""


@case("A-sp-03")
def test_sp_03_a_seeded_answer_stands_beside_unseeded_neighbours(llama: Path) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=15, ignore_eos=True)
    alone = make(llama).generate([prompts(2)[0]], seeded)[0]
    for _ in range(4):
        first, _second = make(llama).generate(prompts(2), [seeded, SamplingParams(temperature=0.8, max_tokens=15)])
        assert first.token_ids == alone.token_ids


@case("A-sp-06")
def test_sp_06_twenty_alternatives_are_there(llama: Path) -> None:
    line = b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{%s}}'
    asked = b'"messages":[{"role":"user","content":"Hi"}],"logprobs":true,"max_tokens":3,"temperature":0%s'
    for alternatives, count in ((b"", 0), (b',"top_logprobs":20', 20)):
        request = parse_line(line % (asked % alternatives), 1, 0)
        output = make(llama).generate(prompts(1), request.sampling)[0]
        assert len(output.logprobs) == 3
        assert [len(top) for top in output.top_logprobs or ()] == [count] * 3 * bool(count)


@case("A-sp-07")
def test_sp_07_an_unknown_token_id_fails_its_own_request(llama: Path) -> None:
    bad, good = make(llama).generate(prompts(2), [SamplingParams(logit_bias={999_999: 5.0}), GREEDY])
    assert code(bad) == "invalid_parameter"
    assert "999999" in (bad.error.message if bad.error else "")
    assert list(good.token_ids) == solo_greedy(load_reference(llama), prompts(2)[1], 12)
    with pytest.raises(InvalidParameter, match="logit_bias"):
        SamplingParams(logit_bias={-1: 5.0})


@case("A-sp-08")
@pytest.mark.parametrize("async_batching", [False, True])
def test_sp_08_min_tokens_holds_back_every_end_of_sequence(tmp_path: Path, async_batching: bool) -> None:
    folder = save_model("llama", tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [1, 7, 8]}))
    engine = make(folder, use_async_batching=async_batching)
    bias = {1: 50.0, 7: 50.0, 8: 49.0}  # each would come at once
    output = engine.generate([[5, 6]], SamplingParams(temperature=0, min_tokens=20, max_tokens=40, logit_bias=bias))[0]
    assert len(output.token_ids) == 21
    assert not {1, 7, 8} & set(output.token_ids[:20])
    with pytest.raises(InvalidParameter, match="min_tokens"):
        SamplingParams(min_tokens=41, max_tokens=40)


@case("A-sp-11")
def test_sp_11_top_k_zero_or_minus_one_is_off_and_a_large_one_is_clipped(llama: Path) -> None:
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)
    expected = make(llama).generate(prompts(1), free)[0].token_ids
    assert len(set(expected)) > 1
    for top_k in (0, -1, 10_000_000):
        same = SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True, top_k=top_k)
        assert make(llama).generate(prompts(1), same)[0].token_ids == expected
    with pytest.raises(InvalidParameter, match="top_p"):
        SamplingParams(top_p=0)
    greedy = make(llama).generate(prompts(1), SamplingParams(temperature=0, top_k=0, max_tokens=12))[0]
    assert list(greedy.token_ids) == solo_greedy(load_reference(llama), prompts(1)[0], 12)


@case("A-sp-12", "A-sp-13")
def test_sp_12_and_13_each_request_obeys_its_own_settings_in_any_order(llama: Path) -> None:
    asked = [
        SamplingParams(temperature=1, top_k=1, max_tokens=9),
        SamplingParams(temperature=1, seed=1, max_tokens=25, ignore_eos=True),
        SamplingParams(temperature=1, seed=2, top_k=50, top_p=0.5, max_tokens=10),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=1, max_tokens=12),
    ]
    texts = prompts(len(asked))
    engine = make(llama, allow_block_sharing=False)
    alone = [engine.generate([p], s)[0].token_ids for p, s in zip(texts, asked, strict=True)]
    assert [len(alone[1]), len(alone[3])] == [25, 5]
    reference = load_reference(llama)
    assert list(alone[0]) == solo_greedy(reference, texts[0], 9)
    assert list(alone[4]) != solo_greedy(reference, texts[4], 12), "it is drawn"
    order = list(range(len(asked)))
    for shuffle in range(4):
        random.Random(shuffle).shuffle(order)
        together = engine.generate([texts[i] for i in order], [asked[i] for i in order])
        assert [o.token_ids for o in together] == [alone[i] for i in order]


@case("A-sp-14")
def test_sp_14_penalties_see_what_they_should(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt holds a token four times, and the model likes it a bit more than any other."""
    banana, engine = 50, make(llama)
    forward = engine.runner.forward

    def level(*step: object) -> torch.Tensor:
        logits = torch.full_like(forward(*step), 0.5)  # type: ignore[arg-type]
        logits[:, banana] = 1.0
        return logits

    monkeypatch.setattr(engine.runner, "forward", level)

    def says_banana(**penalty: float) -> list[bool]:
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **penalty)
        return [token == banana for token in engine.generate([[3, *[banana] * 4]], sampling)[0].token_ids]

    assert says_banana() == [True, True, True]
    assert says_banana(presence_penalty=2) == [True, False, False], "the prompt does not count, the answer does"
    assert says_banana(frequency_penalty=0.4) == [True, True, False], "twice is counted twice"
    assert says_banana(repetition_penalty=4) == [False, False, False], "prompt and answer count"
    for wrong in ({"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"repetition_penalty": 0.0}):
        with pytest.raises(InvalidParameter):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@case("A-sp-16")
def test_sp_16_logprobs_are_the_models_own_whatever_the_processing(llama: Path) -> None:
    prompt = prompts(1)[0]
    reference = load_reference(llama)
    token = solo_greedy(reference, prompt, 1)[0]
    with torch.inference_mode():
        best = torch.log_softmax(reference(input_ids=torch.tensor([prompt])).logits[0, -1], -1).topk(3)
    for asked in (
        {"temperature": 0.2, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 3},
        {"temperature": 0, "logit_bias": {token: -100.0}},
        {"temperature": 0, "presence_penalty": 2, "repetition_penalty": 1.5},
    ):
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, top_logprobs=3, **asked)  # type: ignore[arg-type]
        output = make(llama).generate([prompt], sampling)[0]
        expected = recomputed_logprobs(reference, prompt, output.token_ids)
        assert list(output.logprobs) == pytest.approx(expected, abs=1e-4)
        assert output.top_logprobs is not None
        assert [id for id, _, _ in output.top_logprobs[0]] == best.indices.tolist()
        assert [logprob for _, logprob, _ in output.top_logprobs[0]] == pytest.approx(best.values.tolist(), abs=1e-4)


# Numbers


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@case("A-num-01")
def test_num_01_a_logit_that_is_not_finite_fails_its_own_row(
    llama: Path, monkeypatch: pytest.MonkeyPatch, async_batching: bool, value: float
) -> None:
    engine = make(llama, use_async_batching=async_batching)
    sampled = SamplingParams(temperature=0.9, seed=1, max_tokens=12, top_p=0.9, ignore_eos=True)
    alone = engine.generate(prompts(3), sampled)
    forward, calls = engine.runner.forward, iter(range(1000))

    def poisoned(*step: object) -> torch.Tensor:
        logits = forward(*step)  # type: ignore[arg-type]
        if next(calls) == 2:
            logits = logits.clone()
            logits[1, 7] = value
        return logits

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    first, second, third = engine.generate(prompts(3), sampled)
    assert code(second) == "non_finite_logits"
    assert "token 3" in (second.error.message if second.error else "")
    assert len(second.token_ids) == len(second.logprobs) == 2
    assert [first.token_ids, third.token_ids] == [alone[0].token_ids, alone[2].token_ids]
    assert engine.pool.free == engine.pool.capacity


@case("A-num-03")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_num_03_a_very_small_temperature_is_greedy(llama: Path, dtype: str) -> None:
    small = [SamplingParams(temperature=each, max_tokens=12) for each in (1e-3, 1e-4, 1e-5, 1e-12)]
    engine = make(llama, dtype=dtype, max_requests_per_batch=1)
    greedy = engine.generate(prompts(1), GREEDY)[0]
    assert len(greedy.token_ids) == 12
    if dtype == "float32":
        assert list(greedy.token_ids) == solo_greedy(load_reference(llama), prompts(1)[0], 12)
    outputs = engine.generate(prompts(1) * 4, small)
    assert [output.token_ids for output in outputs] == [greedy.token_ids] * 4
    for wrong in (-0.1, 2.1):
        with pytest.raises(InvalidParameter, match="temperature"):
            SamplingParams(temperature=wrong)


@case("A-num-04")
def test_num_04_the_number_of_neighbours_changes_no_greedy_token_in_float32(llama: Path) -> None:
    asked = prompts(20)
    alone = [o.token_ids for o in make(llama, max_requests_per_batch=1).generate(asked, GREEDY)]
    assert list(alone[0]) == solo_greedy(load_reference(llama), asked[0], 12)
    for most in (2, 17, 64):
        outputs = make(llama, max_requests_per_batch=most).generate(asked, GREEDY)
        assert [o.token_ids for o in outputs] == alone


@case("A-num-05")
def test_num_05_a_short_prompt_beside_a_long_one_in_bfloat16(llama: Path) -> None:
    short, long = [5], [random.Random(2).randrange(3, VOCAB_SIZE) for _ in range(60)]
    alone = make(llama, dtype="bfloat16").generate([short], GREEDY)[0]
    beside, other = make(llama, dtype="bfloat16").generate([short, long], GREEDY)
    assert [beside.error, other.error] == [None, None]
    assert beside.token_ids[0] == alone.token_ids[0]
    assert beside.logprobs[0] == pytest.approx(alone.logprobs[0], abs=0.05)


# The engine's life


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("cpu_offload_space", [0, 1.0])
@case("A-eng-08")
def test_eng_08_giving_way_changes_nothing(llama: Path, async_batching: bool, cpu_offload_space: float) -> None:
    asked = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, presence_penalty=1, min_tokens=30),
    ]
    ample = make(llama).generate(prompts(2), asked)
    engine = make(llama, num_blocks=19, use_async_batching=async_batching, cpu_offload_space=cpu_offload_space)
    engine.scheduler.expected_answer_share = 0.0
    tight = engine.generate(prompts(2), asked)
    assert engine.stats().preemptions > 0
    for ours, theirs in zip(tight, ample, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.text) == (theirs.token_ids, theirs.finish_reason, theirs.text)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert list(ours.token_times) == sorted(ours.token_times)


@case("A-eng-09")
def test_eng_09_a_clock_that_is_set_back_changes_no_time(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(llama)
    submitted = datetime.now(UTC)
    engine.add(EngineRequest("r", (5, 6), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)))
    outputs = engine.step()
    before = datetime.now(UTC)

    class SetBack(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return before - timedelta(hours=1)

    monkeypatch.setattr(sequence_module, "datetime", SetBack)
    monkeypatch.setattr(time, "time", lambda: before.timestamp() - 3600)
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert len(output.token_times) == len(output.token_ids) == 10
    assert list(output.token_times) == sorted(output.token_times)
    assert output.first_token_at is not None
    assert submitted <= output.started_at <= before, "the one anchor, from before the clock was set"
    assert output.started_at <= output.first_token_at <= output.finished_at
    assert output.finished_at - output.started_at < timedelta(minutes=1)


@case("A-eng-05", "A-eng-06")
def test_eng_05_and_06_a_cancel_in_the_last_step_has_one_outcome(llama: Path) -> None:
    for async_batching in (False, True):
        engine = make(llama, use_async_batching=async_batching)
        for steps in range(6):
            engine.add(EngineRequest(steps, (5, 6), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)))
            finished = [output for _ in range(steps) for output in engine.step()]
            cancelled = engine.cancel(steps)
            assert len(finished) + (cancelled is not None) == 1
            if cancelled is not None:
                assert cancelled.finish_reason is FinishReason.CANCELLED
                assert len(cancelled.token_ids) < 3
            assert not engine.has_work


@case("A-num-01")
def test_num_01_what_is_not_finite_in_one_prompt_stays_out_of_a_shared_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose embedding is NaN, behind a beginning that the next prompt shares: in either backend."""
    folder = save_model("llama", tmp_path)
    shared = prompts(1, seed=8)[0][:9]
    good = make(folder).generate([[*shared, 20]], GREEDY)[0]
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr("workers.engine.attention._kernel", lambda: "not in this test")
        engine = make(folder)
        with torch.no_grad():
            engine.runner.model.get_input_embeddings().weight[96] = float("nan")
            engine.runner.model.get_output_embeddings().weight[96] = 0.0
        bad, after = (engine.generate([[*shared, last]], GREEDY)[0] for last in (96, 20))
        assert code(bad) == "non_finite_logits"
        assert (after.error, after.cached_tokens) == (None, 8)
        assert after.token_ids == good.token_ids


def test_an_end_token_that_the_model_has_no_logits_for_harms_nobody(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside ``min_tokens``, which bans every end token."""
    engine = make(llama)
    monkeypatch.setattr(engine._admission, "_eos_ids", frozenset({1, VOCAB_SIZE + 7}))
    output = engine.generate([[5, 6]], SamplingParams(temperature=0, min_tokens=3, max_tokens=8))[0]
    assert output.error is None
    assert len(output.token_ids) >= 3
