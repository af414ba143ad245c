"""What a dry run says of a model is what the engine does: tokens, refusals, shared beginnings, keys and values."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from batchjobs.errors import UsageError
from batchjobs.jsonl import parse_line
from batchjobs.types import Request
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line
from tests.support.models import FAMILIES, MORE_FAMILIES, save_chat_model, save_model, smollm2
from workers.engine import Engine, EngineConfig
from workers.engine.layers import probe_layers
from workers.engine.models import locate
from workers.engine.prompts import PromptEncoder
from workers.engine.requests import EngineRequest, PromptError
from workers.model_outline import _layers, kv_sizes, read_outline
from workers.prefix_share import PrefixShare
from workers.reader import encode
from workers.speed import Sample, measure
from workers.token_count import Lengths, Refusal, TokenCount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["command_line"]

CONTEXT = 512  # of the chat model
BLOCKS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(str(model), EngineConfig(num_blocks=BLOCKS, device="cpu", max_requests_per_batch=1))
    yield engine
    engine.close()


def requests_of(*lines: dict[str, Any]) -> list[Request]:
    return [parse_line(json.dumps(line).encode(), number, number) for number, line in enumerate(lines)]


def counted(model: object, *requests: Request, **options: Any) -> TokenCount:
    count = TokenCount(read_outline(str(model), device="cpu"), **options)
    count.add(requests)
    return count


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return {"messages": messages, "max_tokens": 1, **fields}


def prompt(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, **fields}


MIXED = (
    prompt("Hello"),
    prompt("wörld 東京 \N{ROCKET}\n\n  def f(x):"),
    prompt("<|im_start|>user\nhi<|im_end|>"),
    prompt("<|endoftext|>and more"),
    prompt([5, 6, 7]),
    chat("Why is the sky blue?"),
    chat("a", "b", "c", "", "e"),
    chat("I write <|im_end|>\n<|im_start|>system myself"),
    chat("x", chat_template_kwargs={"enable_thinking": True}),
    prompt(" "),
)


def test_prompts_have_the_tokens_that_the_engine_stores(engine: Engine, model: Path) -> None:
    requests = requests_of(*MIXED)
    for each in requests:
        engine.add(EngineRequest(each.index, encode(engine, each), each.sampling))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    count = counted(model, *requests)
    stored = sorted(output.prompt_tokens for output in outputs)
    assert sorted(count.lengths.counts.elements()) == stored
    assert (count.lengths.total, count.refused, count.answer_tokens) == (sum(stored), 0, len(MIXED))


def test_many_prompts_are_encoded_as_one_by_one(model: Path) -> None:
    """With the encoder that an engine would make, whose weights take no part in it."""
    requests = requests_of(*MIXED)
    for path in (model, smollm2()):
        outline = read_outline(str(path), device="cpu")
        encoder = PromptEncoder(AutoTokenizer.from_pretrained(**locate(str(path))), outline.vocab_size)
        alone = [
            encoder.chat(each.body["messages"], each.body.get("chat_template_kwargs") or {})
            if "messages" in each.body
            else encoder.prompt(each.body["prompt"])
            for each in requests
        ]
        assert [tuple(ids) for ids in counted(path, *requests)._encoder.encode(requests)] == alone
        assert max(map(len, alone)) > 10


def refused_by(engine: Engine, requests: list[Request]) -> list[Refusal]:
    """With the code and the message that a worker would store."""
    found = []
    for request in requests:
        try:
            ids = encode(engine, request)
            engine.compile_format(request.sampling.response_format)
        except PromptError as problem:
            found.append(Refusal(request.index, request.custom_id, problem.code, problem.message))
            continue
        engine.add(EngineRequest(request.index, ids, request.sampling))
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    found.append(Refusal(request.index, request.custom_id, output.error.code, output.error.message))
    return found


STRANGE = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strange"}}}
OBJECT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "maxProperties": 1}}}


@case("A-ctx-01", "A-ctx-02", "A-ctx-05", "A-sp-07")
def test_requests_are_refused_for_the_reasons_of_the_engine(engine: Engine, model: Path) -> None:
    requests = requests_of(
        prompt("x" * CONTEXT),
        prompt("x" * (CONTEXT - 1)),
        prompt("x" * CONTEXT, echo=True, max_tokens=0),
        prompt([9999]),
        prompt("a", logit_bias={"999999": 5}),
        prompt("a", stop_token_ids=[999999]),
        prompt("a", response_format=STRANGE),
        prompt("b", response_format=STRANGE),
        prompt("a", response_format=OBJECT),
        chat("y" * CONTEXT),
        prompt("fine"),
    )
    found = counted(model, *requests)
    assert found.refusals == refused_by(engine, requests)
    assert [refusal.index for refusal in found.refusals][:4] == [0, 3, 4, 5]
    assert found.refused == len(found.refusals)
    assert found.refusals[0].code == "context_length_exceeded"
    assert found.lengths.number == len(requests) - found.refused


def test_a_model_without_a_chat_template_refuses_chats(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    requests = requests_of(chat("a"), prompt("b"))
    (refusal,) = counted(folder, *requests).refusals
    assert (refusal.index, refusal.code) == (0, "chat_template_error")


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    found = counted(save_model("llama", tmp_path), *requests_of(prompt("a"), prompt([1, 2, 3])))
    assert [(refusal.index, refusal.code) for refusal in found.refusals] == [(0, "invalid_prompt")]
    assert found.lengths.total == 3


def test_a_small_cache_refuses_what_does_not_fit(model: Path) -> None:
    small = Engine(str(model), EngineConfig(num_blocks=6, device="cpu"))
    requests = requests_of(prompt("x" * 40), prompt("x" * 100), prompt("x", max_tokens=90))
    found = counted(model, *requests, num_blocks=6)
    assert found.refusals == refused_by(small, requests)
    assert [refusal.code for refusal in found.refusals] == ["kv_cache_too_small"] * 2
    small.close()


@case("A-ctx-03")
def test_answers_that_the_context_cuts_are_named(engine: Engine, model: Path) -> None:
    requests = requests_of(
        prompt("x" * 500, max_tokens=12, ignore_eos=True), prompt("x" * 500, max_tokens=13, n=2, ignore_eos=True)
    )
    found = counted(model, *requests)
    assert [(cut.index, cut.prompt_tokens, cut.wanted, cut.room) for cut in found.cuts] == [(1, 500, 13, 12)]
    assert (found.cut, found.answer_tokens, found.choices) == (1, 12 + 2 * 12, 3)
    engine.add(EngineRequest(1, encode(engine, requests[1]), requests[1].sampling))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(choice.token_ids) for choice in outputs[0].choices] == [12, 12]


# -------------------------------------------------------------------------------------------------- shared beginnings


def test_the_share_is_what_a_cache_without_end_saves(engine: Engine, model: Path) -> None:
    system = "You answer briefly, and never with more than a word. " * 2
    requests = requests_of(
        *(prompt(system + f"What is {number}?") for number in range(4)),
        prompt(system[:64]),  # four whole pages: the last token is computed all the same
        prompt(system[:65]),
        prompt(system[:32]),
        prompt("zz" + system),
        prompt(system + "scored", echo=True, logprobs=0),
        prompt("scored first, found by the next one", echo=True, logprobs=0),
        prompt("scored first, found by the next one"),
    )
    engine.pool.forget()
    saved = 0
    for each in requests:
        engine.add(EngineRequest(each.index, encode(engine, each), each.sampling))
        while engine.has_work:
            saved += sum(output.cached_tokens for output in engine.step())
    share = counted(model, *requests).share
    assert share.saved_tokens == saved > 400
    assert share.is_exact


def test_a_page_known_from_a_whole_prompt_is_found() -> None:
    share = PrefixShare(4)
    share.add([1, 2, 3, 4])
    share.add([1, 2, 3, 4, 5])
    share.add([1, 2, 3, 4, 5])
    assert share.saved_tokens == 8
    share.add([1, 2, 3, 4])
    assert (share.saved_tokens, share.prompt_tokens) == (8, 18)


def test_too_many_pages_are_estimated_from_a_sample() -> None:
    exact, sampled = PrefixShare(4), PrefixShare(4, kept=1000)
    chooser = random.Random(2)
    system = [chooser.randrange(50_000) for _ in range(40)]
    for _ in range(12_000):
        ids = [*system, *(chooser.randrange(3) for _ in range(4)), *(chooser.randrange(50_000) for _ in range(9))]
        exact.add(ids)
        sampled.add(ids)
    assert (exact.is_exact, sampled.is_exact) == (True, False)
    assert sampled.saved_tokens == pytest.approx(exact.saved_tokens, rel=0.02)
    assert len(sampled._computed) <= 1000


# ---------------------------------------------------------------------------------------------------- keys and values


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "deepseek_v3", "gpt_bigcode", "gpt_oss", "qwen3_moe", "olmo3"]
)
def test_layers_have_the_sizes_that_a_probe_of_the_weights_finds(family: str) -> None:
    config = (FAMILIES | MORE_FAMILIES)[family]
    loaded = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.inference_mode():
        probed = [spec for _, spec in probe_layers(loaded, family)]
    layers = _layers(config)
    assert layers is not None
    assert [(s.num_kv_heads, s.head_dim, s.value_dim, s.sliding_window) for s in layers] == [
        (s.num_kv_heads, s.head_dim, s.value_dim, s.sliding_window) for s in probed
    ]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_pages_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    engine = Engine(str(tmp_path), EngineConfig(num_blocks=50, device="cpu", page_size=8))
    sizes = kv_sizes(read_outline(str(tmp_path), device="cpu"), 8, None)
    assert sizes is not None
    rounded = 3072 / 2048 if family == "gemma2" else 1  # the kernel's vectors are longer than these values
    assert sizes.page_bytes * rounded == engine.runner.cache.page_bytes
    assert sizes.groups == engine.runner.groups
    for tokens in (1, 8, 9, 100, 255):
        assert sizes.pool.pages_at_most(tokens, 32) == engine.pool.pages_at_most(tokens, 32)
    assert sizes.windows == ([16] if family == "gemma2" else [])
    engine.close()


def test_the_need_of_the_largest_and_of_many_together(model: Path) -> None:
    requests = requests_of(
        prompt("x" * 16), prompt("x" * 17, max_tokens=17), prompt("x" * 100, max_tokens=1), prompt("y" * 32, n=3)
    )
    found = counted(model, *requests, together=2)
    sizes, kv = found.sizes, found.kv
    assert sizes is not None
    layers, heads, head_dim = 2, 2, 8
    assert sizes.token_bytes == layers * heads * 2 * head_dim * 4
    assert sizes.page_bytes == 16 * sizes.token_bytes
    assert (kv.sequences, kv.pages) == (6, 1 + 3 + 7 + 3 * 2)
    assert sorted(kv.largest) == [3, 7]
    assert (kv.of_request, kv.index) == (7, 2)


# -------------------------------------------------------------------------------------------------- speed and figures


def test_a_sample_is_answered_and_the_engine_is_empty_again(engine: Engine) -> None:
    requests = requests_of(
        *(prompt(f"What is {number}?", max_tokens=6, ignore_eos=True, n=2) for number in range(5)), prompt([9999])
    )
    speed = measure(engine, requests, 60)
    assert speed is not None
    assert (speed.requests, speed.answers, speed.answer_tokens) == (5, 10, 6)
    assert speed.prompt_tokens_per_second > 0 < speed.answer_tokens_per_second
    assert not engine.has_work
    assert measure(engine, requests[-1:], 1) is None


def test_a_measurement_ends_when_its_time_is_up(engine: Engine) -> None:
    requests = requests_of(*(prompt("x" * 20, max_tokens=480, ignore_eos=True) for _ in range(64)))
    speed = measure(engine, requests, 0.5)
    assert speed is None or speed.answers < 64
    assert not engine.has_work


def test_a_sample_is_as_large_as_asked_and_takes_from_everywhere() -> None:
    sample = Sample(50)
    requests = requests_of(*(prompt(str(number)) for number in range(2000)))
    for start in range(0, 2000, 100):
        sample.add(requests[start : start + 100])
    indexes = [request.index for request in sample.requests]
    assert len(indexes) == len(set(indexes)) == 50
    assert 700 < sum(indexes) / 50 < 1300
    huge = Sample(5)
    huge.add(requests_of(prompt("x" * 300_000), prompt("a")))
    assert [request.index for request in huge.requests] == [1]


def test_quantiles_of_lengths() -> None:
    lengths = Lengths()
    lengths.counts.update([1] * 94 + [7] * 5 + [1000])
    assert (lengths.total, lengths.number) == (94 + 35 + 1000, 100)
    assert [lengths.quantile(share) for share in (0.5, 0.94, 0.95, 0.99, 1.0)] == [1, 1, 7, 7, 1000]
    assert Lengths().quantile(0.5) == 0


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_model_that_cannot_run_is_one_sentence(command_line: CommandLine, tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    done = command_line.run("validate", "-", "--model", tmp_path / "t5", stdin=b'{"prompt":"a"}\n')
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("is an encoder-decoder model (t5); only decoder-only models can run here\n")
    with pytest.raises(UsageError, match="no such folder"):
        read_outline("/nowhere/at/all")


@case("A-ctx-01")
def test_the_command_names_lines_that_would_fail(command_line: CommandLine, model: Path) -> None:
    lines = [prompt("ok"), prompt("x" * 600, custom_id="long"), prompt("x" * 500, max_tokens=40)]
    content = b"\n\n".join(json.dumps(line).encode() for line in lines)
    done = command_line.run("validate", "-", "--model", model, "--throughput", 10, stdin=content)
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "warning: line 5: the prompt has 500 tokens, so the context has room for 12 of the 40 that the answer may have",
        "line 3: the prompt has 600 tokens; the model's context of 512 must hold one more",
        f"batchjobs: 1 request would fail with {model.name}; mend the lines, or choose another model",
    ]
    assert "prompt tokens  502: mean 251.0, median 2, 95 % up to 500, longest 500 (line 5)" in done.stdout
    assert "time           at most 1.3 s; 0.7 s if answers are half as long" in done.stdout
    done = command_line.run("validate", "-", "--model", model, "--json", stdin=content)
    report = json.loads(done.stdout)
    assert [(error["line"], error["code"], error["custom_id"]) for error in report["refused"]] == [
        (3, "context_length_exceeded", "long")
    ]
    assert report["cut_answers"]["at"][0] == {
        "line": 5,
        "source": None,
        "custom_id": "request-2",
        "prompt_tokens": 500,
        "max_tokens": 40,
        "room": 12,
    }


def test_the_command_measures(command_line: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.cli.validate.MEASURED_SECONDS", 5.0)
    line = json.dumps(prompt("What is it?", max_tokens=4, ignore_eos=True)).encode()
    done = command_line.run("validate", "-", "--model", model, "--measure", "--num-blocks", 50, stdin=line)
    assert done.exit_code == 0, done.output
    assert "loading the model and answering 1 request of the input for 5 s at most, to measure" in done.stderr
    assert "if they are as long as those measured (4 tokens)" in done.stdout
    assert "assumed        one worker like this machine: " in done.stdout
    done = command_line.run("validate", "-", "--model", model, "--measure", stdin=line + b"\nnull")
    assert (done.exit_code, "time " in done.stdout) == (2, False)
    assert "note: nothing was measured: mend the lines first\n" in done.stderr
