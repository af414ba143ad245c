"""What a model's layers ask for is found by a probe, and what nobody would heed is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, DogeConfig, PhimoeConfig, PreTrainedConfig, Qwen2MoeConfig, RobertaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    sliding_window_overlay,
)

from batchjobs.errors import UsageError
from tests.support.models import (
    VOCAB_SIZE,
    load_reference,
    recomputed_logprobs,
    save_model,
    save_random,
    solo_greedy,
)
from workers.engine import Engine, EngineConfig, SamplingParams
from workers.engine.layers import probe_layers
from workers.engine.masks import window_of
from workers.engine.models import load_model

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": 16}

# Their masks have windows, and their attention is not told of them.
SILENT_WINDOWS: dict[str, tuple[PreTrainedConfig, list[int | None]]] = {
    "qwen2_moe": (
        Qwen2MoeConfig(
            **GROUPED,
            use_sliding_window=True,
            max_window_layers=4,
            num_experts=4,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        [16, None, 16, None],
    ),
    "phimoe": (PhimoeConfig(**GROUPED, num_local_experts=4), [16] * 4),
}


@pytest.mark.parametrize("family", sorted(SILENT_WINDOWS))
def test_a_window_that_only_the_masks_know_is_kept(family: str, tmp_path: Path) -> None:
    config, windows = SILENT_WINDOWS[family]
    save_random(config, tmp_path)
    loaded = load_model(str(tmp_path), device=torch.device("cpu"), dtype="float32")
    with torch.inference_mode():
        assert [spec.sliding_window for _, spec in probe_layers(loaded.model, family)] == windows
    rng = random.Random(family)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (40, 7, 25, 33)]
    engine = Engine(str(tmp_path), EngineConfig(device="cpu", page_size=4, num_blocks=200, max_batch_tokens=13))
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    reference = load_reference(tmp_path)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.token_ids) == solo_greedy(reference, prompt, 12)
        expected = recomputed_logprobs(reference, prompt, output.token_ids)
        assert list(output.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("window", [1, 2, 16, 4096])
def test_a_window_is_read_off_the_mask(window: int) -> None:
    assert window_of(and_masks(sliding_window_overlay(window), causal_mask_function), 8192) == window
    assert window_of(causal_mask_function, 8192) is None


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (and_masks(chunked_overlay(64, torch.zeros(1, dtype=torch.long)), causal_mask_function), "neither full nor"),
        (bidirectional_mask_function, "what comes after it"),
        (or_masks(causal_mask_function, lambda b, h, q, k: k == q + 1), "what comes after it"),
        (and_masks(causal_mask_function, lambda b, h, q, k: k % 2 == 0), "what is not right before it"),
        (and_masks(causal_mask_function, lambda b, h, q, k: k < 5), "what is not right before it"),
    ],
)
def test_other_masks_are_refused(mask: Callable[..., torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        window_of(mask, 1024)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(**SHAPE, is_decoder=False), r"looks both ways, as an encoder's does"),
        (DogeConfig(**SHAPE, num_key_value_heads=2), "uses no mask, or one of its own"),
        (RobertaConfig(**SHAPE, is_decoder=True), "or has an attention or positions of its own"),
    ],
)
def test_what_packed_rows_would_answer_otherwise_is_refused(
    config: PreTrainedConfig, words: str, tmp_path: Path
) -> None:
    """An encoder; biases in the mask; positions that are counted from the padding token's id."""
    save_random(config, tmp_path)
    with pytest.raises(UsageError, match=words):
        Engine(str(tmp_path), EngineConfig(device="cpu"))


def _model(tmp_path: Path) -> Any:
    return load_model(str(save_model("llama", tmp_path)), device=torch.device("cpu"), dtype="float32").model


def _asking(model: Any, **more: Any) -> None:
    """Every layer hands these options on to its attention."""
    for layer in model.model.layers:
        whole = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, _whole=whole, **options: _whole(*args, **options, **more)


@pytest.mark.parametrize("more", [{"position_bias": torch.ones(4, 1)}, {"alibi": True}, {"chunk": 8}])
def test_an_option_that_nobody_heeds_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    model = _model(tmp_path)
    _asking(model, **more)
    with torch.inference_mode(), pytest.raises(UsageError, match=f"asks for {next(iter(more))}, which packed rows"):
        probe_layers(model, "it")


@pytest.mark.parametrize("more", [{"bias": None}, {"flag": False}, {"rate": 0.0}])
def test_an_option_that_is_off_is_no_reason(more: dict[str, Any], tmp_path: Path) -> None:
    model = _model(tmp_path)
    _asking(model, **more)
    with torch.inference_mode():
        assert len(probe_layers(model, "it")) == 2


def test_positions_of_its_own_are_refused(tmp_path: Path) -> None:
    """Relative positions hide it while a sequence starts and goes on in one row; not when it is cut."""
    model = _model(tmp_path)
    rotary = model.model.rotary_emb
    whole = rotary.forward
    rotary.forward = lambda hidden, position_ids: whole(hidden, torch.arange(hidden.shape[1])[None])
    with torch.inference_mode(), pytest.raises(UsageError, match="or has an attention or positions of its own"):
        probe_layers(model, "it")


def test_a_bias_inside_its_own_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ALiBi has: nothing in the call tells of it."""
    from transformers.models.llama import modeling_llama

    whole = modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: torch.Tensor, **options: Any) -> Any:
        return whole(module, query, key, value, mask - torch.arange(4).flip(0), **options)

    model = _model(tmp_path)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    with torch.inference_mode(), pytest.raises(UsageError, match="or has an attention or positions of its own"):
        probe_layers(model, "it")


def test_a_model_that_computes_every_row_of_logits_is_refused(tmp_path: Path) -> None:
    model = _model(tmp_path)
    whole = model.forward
    model.forward = lambda *args, logits_to_keep=0, **options: whole(*args, **options)
    with torch.inference_mode(), pytest.raises(UsageError, match="computes the logits of every row"):
        probe_layers(model, "it")


def test_an_attention_that_changes_later_stops_the_step(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", num_blocks=20, native_forward=False)  # which reads the model once
    engine = Engine(str(save_model("llama", tmp_path)), config)
    engine.runner.model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(ValueError, match="layer 1 asks for another attention than before"):
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))


def test_broken_weights_do_not_look_like_a_broken_attention(tmp_path: Path) -> None:
    """NaN logits fail the requests that meet them, and no other."""
    model = _model(tmp_path)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with torch.inference_mode():
        assert len(probe_layers(model, "it")) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_rounding_is_no_reason(family: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_model(family, tmp_path)), device=torch.device("cpu"), dtype=dtype)
    with torch.inference_mode():
        assert probe_layers(loaded.model, family)
