"""A checkpoint that does not hold its model is refused by name; what is unused is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from batchjobs.errors import UsageError
from tests.support.models import VOCAB_SIZE, load_reference, save_model, save_random, solo_greedy
from workers.engine import Engine, EngineConfig, SamplingParams
from workers.engine.gguf import check_rope
from workers.engine.models import LoadedModel, load_model


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), device=torch.device("cpu"), dtype="float32")


def changed(folder: Path, **changes: Any) -> Path:
    """The folder, with these entries in its config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_weight_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = changed(save_model("llama", tmp_path), intermediate_size=40)
    words = (
        r"cannot load the model .*: model\.layers\.0\.mlp\.down_proj\.weight is \(32, 48\) in its weights, but \(32, 40"
    )
    with pytest.raises(UsageError, match=words):
        load(folder)


def test_a_lost_expert_is_refused(tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"weights are missing or do not fit its config\.json"):
        load(folder)


def test_a_lost_file_of_several_is_refused(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"model-00001-of-00001\.safetensors"):
        load(folder)


def test_unused_weights_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(save_model("llama", tmp_path), num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "has 9 weights that its architecture does not use, such as model.layers.1." in caplog.text


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "requires bitsandbytes"),
        ({"quant_method": "of tomorrow"}, "is quantized by 'of tomorrow', which"),
    ],
)
def test_quantized_weights_that_cannot_be_read_are_refused(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    """transformers takes weights of a kind that it does not know for plain ones."""
    folder = changed(save_model("llama", tmp_path), quantization_config=asked)
    with pytest.raises(UsageError, match=words) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_code_of_its_own_is_refused_with_what_to_do(place: str, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    if place == "config.json":
        changed(folder, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    else:
        code = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        (folder / place).write_text(json.dumps(code))
    with pytest.raises(UsageError, match="brings Python code of its own, which is never run; take a checkpoint"):
        load(folder)


def test_a_known_architecture_that_also_brings_code_runs_without_it(tmp_path: Path) -> None:
    folder = changed(save_model("llama", tmp_path), auto_map={"AutoModelForCausalLM": "mine.Mine"})
    (folder / "mine.py").write_text("raise SystemExit('this code was run')\n")
    assert type(load(folder).model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.LlavaConfig(), "llava.* takes more than text"),
        (transformers.ViTConfig(), "vit.* does not continue text"),
        (transformers.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2), "AttentionInterface"),
    ],
)
def test_other_kinds_of_model_are_refused(config: Any, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    if words == "AttentionInterface":
        save_random(config, tmp_path)
    with pytest.raises(UsageError, match=words):
        Engine(str(tmp_path), EngineConfig(device="cpu"))


def test_the_text_part_of_gemma_3_runs(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {**shape, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8}
    special = {"boi_token_index": 93, "eoi_token_index": 94, "image_token_index": 95}
    config = transformers.Gemma3Config(
        text_config={**text, "sliding_window": 16, "query_pre_attn_scalar": 8, "eos_token_id": 1, "pad_token_id": 0},
        vision_config={**shape, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **special,
    )
    save_random(config, tmp_path)
    engine = Engine(str(tmp_path), EngineConfig(device="cpu", page_size=4, num_blocks=300, max_batch_tokens=13))
    prompts = [[3 + (7 * i + n) % 80 for i in range(length)] for n, length in enumerate((30, 5, 21))]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=10))
    reference = load_reference(tmp_path)
    assert [list(o.token_ids) for o in outputs] == [solo_greedy(reference, prompt, 10) for prompt in prompts]
    assert [group.window for group in engine.runner.groups] == [16] * 5 + [None]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "default"}, 256),
    ],
)
def test_yarn_may_reach_further(rope: dict[str, Any], length: int, tmp_path: Path) -> None:
    folder = changed(save_model("llama", tmp_path), rope_parameters={"rope_theta": 10000.0, **rope})
    assert load(folder).max_model_len == length


def _gguf(file: Path, *, kind: str | None = None, factors: list[float] | None = None) -> Path:
    writer = GGUFWriter(file, "llama")
    if kind is not None:
        writer.add_string("llama.rope.scaling.type", kind)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("scaled", [{"kind": "yarn"}, {"kind": "linear"}, {"factors": [1.0, 8.0]}])
def test_a_gguf_file_with_scaled_rope_is_refused(scaled: dict[str, Any], tmp_path: Path) -> None:
    """transformers does not read the scaling, and would run the model with other frequencies."""
    with pytest.raises(UsageError, match=r"m\.gguf scales its RoPE"):
        check_rope(_gguf(tmp_path / "m.gguf", **scaled))


@pytest.mark.parametrize("plain", [{}, {"kind": "none"}, {"factors": [1.0, 1.0]}])
def test_a_gguf_file_with_plain_rope_is_not(plain: dict[str, Any], tmp_path: Path) -> None:
    check_rope(_gguf(tmp_path / "m.gguf", **plain))
