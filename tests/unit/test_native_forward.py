"""The native forward: who gets it, that it says what the model's own modules say, and that company changes no bit."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config

import workers.engine.native as native
from tests.support.engines import make, prompts
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCAB_SIZE, save_model, save_random
from workers.engine import Engine, SamplingParams
from workers.engine.attention.compiler import COMPILERS
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.models import load_model
from workers.engine.native import architectures
from workers.engine.native.architectures import UnknownDecoder, read_decoder
from workers.engine.native.operations import Kernel
from workers.engine.requests import EngineOutput
from workers.engine.swap import exchange

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")

CLAIMED = [
    *("llama", "llama with linear RoPE", "llama with Llama 3 RoPE", "llama with YaRN", "mistral", "phi3", "qwen2"),
    *("qwen3", "smollm3", "gemma", "gemma2", "gemma3"),
]
OTHERS = ["gpt2", "opt", "granite", "olmo2", "qwen3_moe", "starcoder2"]
ENDLESS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAGE = 4


def alone(engine: Engine, prompt: list[int]) -> EngineOutput:
    (output,) = engine.generate([prompt], ENDLESS)
    return output


def told(outputs: list[EngineOutput]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(output.token_ids, tuple(output.logprobs)) for output in outputs]


@pytest.mark.parametrize("family", CLAIMED)
def test_a_known_decoder_runs_natively_and_answers_as_its_modules_do(family: str, tmp_path: Path) -> None:
    folder, asked = save_model(family, tmp_path), prompts(7)
    ours, own = make(folder, max_batch_tokens=17), make(folder, native_forward=False)
    assert (ours.runner.forward_kind, own.runner.forward_kind) == ("native", "transformers")
    found, expected = ours.generate(asked, ENDLESS), own.generate(asked, ENDLESS)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    for output, other in zip(found, expected, strict=True):
        assert list(output.logprobs) == pytest.approx(list(other.logprobs), abs=2e-5)


@pytest.mark.parametrize("family", OTHERS)
def test_another_model_keeps_its_modules(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = make(save_model(family, tmp_path))
    assert engine.runner.forward_kind == "transformers"
    kind = type(engine.runner.model).__name__
    assert f"the forward runs in transformers' modules: it knows no {kind}" in caplog.messages


BIASED = {
    "llama": LlamaConfig(**{**FAMILIES["llama"].to_dict(), "attention_bias": True, "mlp_bias": True}),
    "qwen2 with its own window": Qwen2Config(
        **{**FAMILIES["qwen2"].to_dict(), "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        | {"layer_types": ["full_attention", "sliding_attention"]}
    ),
    "llama with tied weights": LlamaConfig(**{**FAMILIES["llama"].to_dict(), "tie_word_embeddings": True}),
    "llama with gelu": LlamaConfig(**{**FAMILIES["llama"].to_dict(), "hidden_act": "gelu"}),
}


@pytest.mark.parametrize("form", sorted(BIASED))
def test_forms_of_a_family_answer_as_its_modules_do(form: str, tmp_path: Path) -> None:
    save_random(BIASED[form], tmp_path)
    with torch.no_grad():
        ours, own = make(tmp_path), make(tmp_path, native_forward=False)
        for engine in (ours, own):  # biases are zero when they are made
            torch.manual_seed(5)
            for name, parameter in engine.runner.model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
    assert ours.runner.forward_kind == "native"
    found, expected = ours.generate(prompts(5), ENDLESS), own.generate(prompts(5), ENDLESS)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]


# Company


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("mistral", "float32"),
        ("gemma2", "bfloat16"),
        ("gemma3", "float32"),
    ],
)
def test_company_chunks_and_threads_change_no_bit_of_an_answer(
    family: str, dtype: str, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    folder, asked = save_model(family, tmp_path), prompts(9, longest=40)
    single = make(folder, dtype=dtype, allow_block_sharing=False)
    assert single.runner.forward_kind == "native"
    expected = told([alone(single, prompt) for prompt in asked])
    for count, settings in (
        (1, {}),
        (2, {"max_batch_tokens": 13}),
        (1, {"page_size": 16, "max_requests_per_batch": 3}),
    ):
        threads(count)
        assert told(make(folder, dtype=dtype, **settings).generate(asked, ENDLESS)) == expected


def test_a_broken_row_leaves_the_others_their_bits(llama: Path) -> None:
    engine, asked = make(llama), prompts(5)
    expected = told(engine.generate(asked, ENDLESS))
    used = {token for prompt in asked for token in prompt} | {token for ids, _ in expected for token in ids}
    unused = min(set(range(3, VOCAB_SIZE)) - used)
    with torch.no_grad():
        engine.runner.model.get_input_embeddings().weight[unused] = float("nan")
    outputs = engine.generate([*asked[:3], [5, unused, 6], *asked[3:]], ENDLESS)
    assert told(outputs[:3] + outputs[4:]) == expected
    assert outputs[3].error is not None


# One step


def step(counts: list[int], cached: list[int], ids: list[int], wanted: list[int], *, scored: int = 0) -> PackedBatch:
    """Sequences with pages of their own; the last ``scored`` of the wanted rows are those of a prompt's scores."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    width = -(-max(c + n for c, n in zip(cached, counts, strict=True)) // PAGE)
    tables = 1 + np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    rows = PackedRows(starts, np.array(cached, np.int32), tables, PAGE)
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, counts, strict=True)])
    none, split = np.zeros(0, np.int64), len(wanted) - scored
    kept = np.array(wanted, np.int64)
    return PackedBatch(
        np.array(ids), positions, none, none, kept[:split], none, kept[split:], np.zeros(scored, np.int64), [rows]
    )


def test_logits_come_for_the_wanted_rows_in_their_order(llama: Path) -> None:
    runner, own = make(llama).runner, make(llama, native_forward=False).runner
    for wanted in ([0, 1, 2, 3, 4, 5, 6], [6, 2], [2, 2, 0], [], [3]):
        batch = step([3, 4], [0, 0], [5, 6, 7, 8, 9, 10, 11], wanted)
        found, expected = runner.forward(batch, ()).clone(), own.forward(batch, ())
        assert found.shape == (len(wanted), VOCAB_SIZE)
        assert torch.allclose(found, expected, atol=1e-4)


def test_larger_and_smaller_steps_share_the_buffers(llama: Path) -> None:
    runner = make(llama).runner
    small = step([2], [0], [5, 6], [1])
    first = runner.forward(small, ()).clone()
    runner.forward(step([30], [0], list(range(5, 35)), list(range(30))), ())
    assert torch.equal(runner.forward(small, ()), first)


def test_a_token_outside_the_vocabulary_is_refused(llama: Path) -> None:
    runner = make(llama).runner
    for bad in (-1, VOCAB_SIZE):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            runner.forward(step([2], [0], [5, bad], [1]), ())
    with pytest.raises(IndexError, match="a wanted row outside the step"):
        runner.forward(step([2], [0], [5, 6], [2]), ())


def test_a_page_outside_the_cache_is_refused(llama: Path) -> None:
    runner = make(llama, num_blocks=2).runner
    with pytest.raises(ValueError, match="page 2 is past the cache's 2 pages"):
        runner.forward(step([1, 1], [0, 0], [5, 6], [1]), ())


def test_exchanged_weights_are_seen_at_once_and_go_back_bit_for_bit(llama: Path, tmp_path: Path) -> None:
    other = load_model(str(save_model("llama", tmp_path, seed=3)), device=torch.device("cpu"), dtype="float32").model
    runner = make(llama).runner
    batch = step([3], [0], [5, 6, 7], [0, 1, 2])
    before = runner.forward(batch, ()).clone()
    exchange(runner.model, other)
    after = runner.forward(batch, ()).clone()
    assert torch.equal(after, make(tmp_path).runner.forward(batch, ()))
    assert not torch.allclose(after, before, atol=0.1)
    exchange(runner.model, other)
    assert torch.equal(runner.forward(batch, ()), before)


def test_bfloat16_stays_near_the_modules(llama: Path) -> None:
    ids, rows = list(range(5, 25)), list(range(20))
    own = make(llama, native_forward=False).runner.forward(step([20], [0], ids, rows), ())
    half = make(llama, dtype="bfloat16").runner.forward(step([20], [0], ids, rows), ())
    modules = make(llama, dtype="bfloat16", native_forward=False).runner.forward(step([20], [0], ids, rows), ())
    # Nearer to float32 than the modules are: the rows are not rounded from layer to layer.
    assert (half - own).abs().mean() < (modules - own).abs().mean()


# Who gets it


def model_of(folder: Path) -> Any:
    return load_model(str(folder), device=torch.device("cpu"), dtype="float32").model


class OtherLinear(nn.Linear):
    pass


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _own_forward(model: Any) -> None:
    whole = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **options: whole(*args, **options)


def _more(model: Any) -> None:
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4)


def _other_kind(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = OtherLinear(32, 48, bias=False)


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def _loose_weight(model: Any) -> None:
    model.model.layers[0].self_attn.extra = nn.Parameter(torch.ones(3))


def _fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_hook, "has a hook or a forward of its own"),
        (_own_forward, "has a hook or a forward of its own"),
        (_more, "it knows no model.layers.0.mlp.adapter, a Linear"),
        (_other_kind, "up_proj of its LlamaMLP is a OtherLinear"),
        (_other_activation, "its activation is a Tanh"),
        (_loose_weight, "it knows no weight model.layers.0.self_attn.extra"),
        (_fewer_layers, "only a part of its layers"),
        (lambda model: model.train(), "in training"),
        (lambda model: model.half(), "float16"),
        (lambda model: model.model.norm.float().double(), "in torch.float64"),
    ],
)
def test_what_is_not_known_fully_is_not_read(change: Callable[[Any], object], words: str, llama: Path) -> None:
    model = model_of(llama)
    assert len(read_decoder(model).layers) == 2
    change(model)
    with pytest.raises(UnknownDecoder, match=words):
        read_decoder(model)


def test_other_logits_fall_back_to_the_modules(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a release of transformers changes inside a class that is known."""
    from transformers.models.llama import modeling_llama

    whole = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: whole(self, x) * 1.5)
    with caplog.at_level(logging.INFO):
        engine = make(llama)
    assert engine.runner.forward_kind == "transformers"
    [message] = [m for m in caplog.messages if "transformers' modules" in m]
    assert "logits differ" in message
    assert alone(engine, [5, 6, 7]).error is None


def test_it_can_be_switched_off_and_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        kinds = [make(llama, native_forward=wanted).runner.forward_kind for wanted in (None, True, False)]
    assert kinds == ["native", "native", "transformers"]
    assert caplog.messages.count("the forward runs natively") == 2
    assert "the forward runs in transformers' modules: the native forward is switched off" in caplog.messages
    monkeypatch.setattr(native, "_has_matrix_unit", lambda: True)
    options = ((None, "float32"), (None, "bfloat16"), (True, "bfloat16"))
    assert [make(llama, native_forward=wanted, dtype=dtype).runner.forward_kind for wanted, dtype in options] == [
        "native",
        "transformers",
        "native",
    ]


def test_without_a_compiler_the_modules_run(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native._kernel.cache_clear()
    monkeypatch.setenv("BATCHJOBS_NO_COMPILE", "1")
    with caplog.at_level(logging.INFO):
        engine = make(llama)
    native._kernel.cache_clear()
    assert engine.runner.forward_kind == "transformers"
    assert "the forward runs in transformers' modules: BATCHJOBS_NO_COMPILE is set" in caplog.messages


def test_a_library_of_another_layout_is_refused() -> None:
    names = ("operation", "program", "step", "call")
    stranger: Any = SimpleNamespace(**{f"batchjobs_{name}_size": _Answer(8) for name in names})
    with pytest.raises(ValueError, match="disagree about the layout of"):
        Kernel(stranger)


class _Answer:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self) -> int:
        return self.size


def test_every_claimed_family_is_tested() -> None:
    known = {type(config).__name__ for name, config in (FAMILIES | MORE_FAMILIES).items() if name in CLAIMED}
    assert {name.removesuffix("ForCausalLM") for name in architectures.FAMILIES} == {
        name.removesuffix("Config").removesuffix("Text") for name in known
    }
