"""What ends a request, what refuses it, and that one request's fault is its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason
from tests.support.engines import make, prompts
from tests.support.models import VOCAB_SIZE, load_reference, save_chat_model, save_model, solo_greedy
from workers.engine import Engine, EngineConfig, EngineRequest, PromptError, SamplingParams


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_a_length_stop_and_a_stop_token(llama: Path) -> None:
    engine = make(llama)
    prompt = prompts(1)[0]
    whole = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
    assert (whole.finish_reason, len(whole.token_ids)) == (FinishReason.LENGTH, 12)
    third = whole.token_ids[2]
    assert third not in whole.token_ids[:2]
    cut = engine.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    )[0]
    assert (cut.finish_reason, cut.token_ids) == (FinishReason.STOP, whole.token_ids[:3])


def test_min_tokens_holds_back_every_stop_token(llama: Path) -> None:
    engine = make(llama)
    prompt = prompts(1)[0]
    first = engine.generate([prompt], GREEDY)[0].token_ids[0]
    stop = SamplingParams(temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=(first,))
    output = engine.generate([prompt], stop)[0]
    assert first not in output.token_ids[:5]
    assert len(output.token_ids) >= 5


@pytest.mark.parametrize(("length", "tokens"), [(14, 2), (15, 1)])
def test_an_answer_is_cut_where_the_context_ends(llama: Path, length: int, tokens: int) -> None:
    output = make(llama, max_model_len=16).generate([[5] * length], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, tokens)


@pytest.mark.parametrize("length", [16, 17])
def test_a_prompt_that_fills_the_context_is_refused_and_its_neighbour_is_not(llama: Path, length: int) -> None:
    engine = make(llama, max_model_len=16)
    long, good = engine.generate([[5] * length, [6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert long.finish_reason is FinishReason.ERROR
    assert long.error is not None
    assert long.error.code == "context_length_exceeded"
    assert str(length) in long.error.message
    assert "16" in long.error.message
    assert len(good.token_ids) == 3


def test_a_request_that_can_never_fit_the_cache_fails_at_once(llama: Path) -> None:
    engine = make(llama, num_blocks=6)  # 5 pages of 4 tokens
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    big, fits = engine.generate([[5] * 14, [5] * 13], sampling)
    assert big.error is not None
    assert big.error.code == "kv_cache_too_small"
    assert len(fits.token_ids) == 8  # 13 + 8 tokens, of which the last is never fed back: 20
    assert engine.pool.free == engine.pool.capacity


@pytest.mark.parametrize(
    "sampling", [SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), SamplingParams(stop_token_ids=(VOCAB_SIZE + 5,))]
)
def test_an_id_outside_the_vocabulary_fails_that_request_only(llama: Path, sampling: SamplingParams) -> None:
    engine = make(llama)
    bad, good = engine.generate(prompts(2), [sampling, GREEDY])
    assert bad.error is not None
    assert bad.error.code == "invalid_parameter"
    assert f"(0 to {VOCAB_SIZE - 1})" in bad.error.message
    assert good.error is None


def test_logits_that_are_not_finite_fail_their_own_row(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(llama)
    three = prompts(3)
    alone = engine.generate(three, GREEDY)
    forward, calls = engine.runner.forward, iter(range(1000))

    def poisoned(*step: object) -> torch.Tensor:
        logits = forward(*step)  # type: ignore[arg-type]
        if next(calls) == 2:
            logits = logits.clone()
            logits[1, 7] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    first, second, third = engine.generate(three, GREEDY)
    assert second.error is not None
    assert second.error.code == "non_finite_logits"
    assert "token 3" in second.error.message
    assert len(second.token_ids) == len(second.logprobs) == len(second.token_times) == 2
    assert (first.token_ids, third.token_ids) == (alone[0].token_ids, alone[2].token_ids)
    assert engine.pool.free == engine.pool.capacity


def test_cancel_gives_the_partial_answer_and_every_page_back(llama: Path) -> None:
    engine = make(llama, max_requests_per_batch=1)
    whole = engine.generate([prompts(1)[0]], GREEDY)[0]
    for name in ("running", "waiting"):
        engine.add(EngineRequest(name, tuple(prompts(1)[0]), GREEDY))
    for _ in range(3):
        engine.step()
    running, waiting = engine.cancel("running"), engine.cancel("waiting")
    assert running is not None
    assert (running.finish_reason, running.token_ids) == (FinishReason.CANCELLED, whole.token_ids[:3])
    assert waiting is not None
    assert (waiting.finish_reason, waiting.token_ids) == (FinishReason.CANCELLED, ())
    assert engine.cancel("running") is None
    assert not engine.has_work
    assert engine.step() == []
    assert engine.pool.free == engine.pool.capacity


def test_a_seeded_answer_does_not_depend_on_its_neighbours(llama: Path) -> None:
    engine = make(llama)
    three = prompts(3)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=20, ignore_eos=True)
    alone = engine.generate([three[0]], seeded)[0]
    for neighbour in (SamplingParams(max_tokens=7), SamplingParams(temperature=0, max_tokens=30), seeded):
        together = engine.generate(three, [seeded, neighbour, neighbour])
        assert together[0].token_ids == alone.token_ids
    other = engine.generate(
        [three[0]], SamplingParams(temperature=0.9, top_p=0.95, seed=43, max_tokens=20, ignore_eos=True)
    )
    assert other[0].token_ids != alone.token_ids


def test_each_request_obeys_its_own_parameters(llama: Path) -> None:
    engine = make(llama)
    reference = load_reference(llama)
    four = prompts(4)
    outputs = engine.generate(
        four,
        [
            SamplingParams(temperature=1, top_k=1, max_tokens=10),
            SamplingParams(temperature=1.5, seed=3, max_tokens=10),
            SamplingParams(temperature=1e-12, max_tokens=10),
            SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        ],
    )
    assert list(outputs[0].token_ids) == solo_greedy(reference, four[0], 10)
    assert list(outputs[1].token_ids) != solo_greedy(reference, four[1], 10)
    assert list(outputs[2].token_ids) == solo_greedy(reference, four[2], 10)
    assert len(outputs[3].token_ids) == 5


def test_top_logprobs_hold_the_best_tokens_of_the_model_itself(llama: Path) -> None:
    reference = load_reference(llama)
    prompt = prompts(1)[0]
    output = make(llama).generate([prompt], SamplingParams(temperature=0.2, seed=1, max_tokens=4, top_logprobs=5))[0]
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output.token_ids]])
        expected = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1], -1).topk(5)
    assert output.top_logprobs is not None
    assert [[i for i, _, _ in best] for best in output.top_logprobs] == expected.indices.tolist()
    got = [[p for _, p, _ in best] for best in output.top_logprobs]
    assert torch.tensor(got) == pytest.approx(expected.values, abs=1e-4)


def test_texts_stop_strings_and_token_texts(chat_model: Path) -> None:
    engine = make(chat_model, num_blocks=400)
    whole = engine.generate(["Count: 1 2 3"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    assert whole.text == engine.vocabulary.decode(whole.token_ids)
    raw = b"".join(engine.vocabulary.bytes_of(t) for t in whole.token_ids if not engine.vocabulary.is_special(t))
    assert raw.decode(errors="replace") == whole.text
    stop = next(c for c in whole.text[5:] if c.isascii() and c not in whole.text[:5])
    first = whole.text.find(stop)
    cut = engine.generate(
        ["Count: 1 2 3"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=("never seen", stop))
    )[0]
    assert (cut.finish_reason, cut.text) == (FinishReason.STOP, whole.text[:first])
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) == len(cut.tokens) == len(cut.logprobs) == len(cut.token_times)


def test_a_special_token_as_stop_string_ends_the_answer(chat_model: Path) -> None:
    engine = make(chat_model)
    start = engine.vocabulary.special_id("<|im_start|>")
    assert start is not None
    sampling = SamplingParams(temperature=0, max_tokens=5, stop=("<|im_start|>",), logit_bias={start: 100.0})
    output = engine.generate(["hi"], sampling)[0]
    assert (output.finish_reason, output.token_ids, output.text) == (FinishReason.STOP, (start,), "")


def test_prompts_become_tokens_once(chat_model: Path) -> None:
    engine = make(chat_model)
    messages = [{"role": "user", "content": "hé"}]
    expected = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    ids = engine.encode_chat(messages)
    assert b"".join(engine.vocabulary.bytes_of(i) for i in ids).decode() == expected
    assert engine.vocabulary.text(engine.encode_prompt("é")[0]) == (0xC3,)
    for prompt, code in [("", "empty_prompt"), ([], "empty_prompt"), ([1, 10**6], "invalid_prompt")]:
        with pytest.raises(PromptError) as refused:
            engine.encode_prompt(prompt)  # type: ignore[arg-type]
        assert refused.value.code == code


def test_a_template_that_refuses_names_its_sentence(chat_model: Path) -> None:
    engine = make(chat_model)
    engine.prompts._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"  # type: ignore[union-attr]
    with pytest.raises(PromptError, match="roles must alternate") as refused:
        engine.encode_chat([{"role": "user", "content": "a"}])
    assert refused.value.code == "chat_template_error"


def test_the_same_weights_have_the_same_version(llama: Path, tmp_path: Path) -> None:
    copy = save_model("llama", tmp_path / "copy")
    other = save_model("llama", tmp_path / "other", seed=1)
    assert make(copy).model_name == "copy"
    assert make(llama).model_version == make(copy).model_version != make(other).model_version


def test_token_times_count_from_the_start_and_never_go_back(llama: Path) -> None:
    for output in make(llama).generate(prompts(5), GREEDY):
        assert len(output.token_times) == len(output.token_ids)
        assert list(output.token_times) == sorted(output.token_times)
        assert output.token_times[0] > 0
        assert output.first_token_at is not None
        assert output.started_at <= output.first_token_at <= output.finished_at


def test_generate_wants_one_sampling_or_one_each(llama: Path) -> None:
    with pytest.raises(ValueError, match="3 prompts but 2"):
        make(llama).generate(prompts(3), [GREEDY, GREEDY])


@pytest.fixture
def not_a_model(tmp_path: Path) -> Path:
    (tmp_path / "readme.txt").write_text("nothing here")
    return tmp_path


def test_models_that_cannot_be_used_are_refused_in_a_sentence(not_a_model: Path, llama: Path) -> None:
    for source, words in [
        (str(not_a_model), r"no config\.json"),
        (str(not_a_model / "absent"), "no such folder"),
        (str(not_a_model / "absent.gguf"), "no such file"),
    ]:
        with pytest.raises(UsageError, match=words):
            Engine(source)
    with pytest.raises(UsageError, match="no such device"):
        Engine(str(llama), EngineConfig(device="tpu-of-dreams"))
    with pytest.raises(UsageError, match="page_size must be 1 or more"):
        EngineConfig(page_size=0)


def test_a_shared_prefix_is_computed_once_and_changes_nothing(llama: Path) -> None:
    shared = [random.Random(9).randrange(3, VOCAB_SIZE) for _ in range(18)]
    asked = [[*shared, 5, 6], [*shared, 7], [*shared[:9], 8], shared[:16], [3, 4]]
    plain = make(llama, allow_block_sharing=False)
    alone = [plain.generate([prompt], GREEDY)[0] for prompt in asked]
    engine = make(llama)
    outputs = [engine.generate([prompt], GREEDY)[0] for prompt in asked]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    for output, expected in zip(outputs, alone, strict=True):
        assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert {o.cached_tokens for o in alone} == {0}
    # Pages of 4 tokens, and one token at least is computed: 16 of 20 and of 19, 8 of 10, 12 of 16.
    assert [o.cached_tokens for o in outputs] == [0, 16, 8, 12, 0]
    assert engine.stats().prompt_tokens == sum(len(p) for p in asked) - 36
    assert engine.pool.free == engine.pool.capacity
