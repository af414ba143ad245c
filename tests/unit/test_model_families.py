"""Every family of models answers as it does alone, under pressure; what cannot run is refused in a sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from batchjobs.errors import UsageError
from tests.support.cases import case
from tests.support.giving_way import run_giving_way
from tests.support.models import (
    FAMILIES,
    MORE_FAMILIES,
    VOCAB_SIZE,
    load_reference,
    recomputed_logprobs,
    save_model,
    save_random,
    solo_greedy,
)
from workers.engine import Engine, EngineConfig, SamplingParams
from workers.engine import engine as engine_module
from workers.engine.models import LoadedModel, load_model


@pytest.mark.parametrize("family", sorted(MORE_FAMILIES))
def test_answers_and_logprobs_equal_the_solo_run(family: str, tmp_path: Path) -> None:
    """Small chunks and pages, a shared prefix, the step planned ahead, and sequences that give way."""
    folder = save_model(family, tmp_path)
    rng = random.Random(family)
    lengths = (20, 1, *(rng.randint(2, 40) for _ in range(4)))
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts.append(prompts[0][:9] + prompts[2])
    config = EngineConfig(
        device="cpu", page_size=4, max_batch_tokens=13, max_requests_per_batch=5, use_async_batching=True
    )
    engine = Engine(str(folder), config)
    outputs = run_giving_way(engine, prompts, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    reference = load_reference(folder)
    reference.generation_config.eos_token_id = None
    answers = [solo_greedy(reference, prompt, 14) for prompt in prompts]
    assert [list(o.token_ids) for o in outputs] == answers
    assert len({tuple(answer) for answer in answers}) > 2
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = recomputed_logprobs(reference, prompt, output.token_ids)
        assert list(output.logprobs) == pytest.approx(expected, abs=1e-4)
    assert engine.stats().preemptions > 5
    assert engine.stats().cached_tokens > 0
    assert engine.pool.free == engine.pool.capacity
    engine.close()


TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
HEAD = [1.0] * 4  # one factor for each pair of dimensions of a head

REFUSED: dict[str, tuple[Any, str]] = {
    "mamba": (transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2), "of a kind"),
    "jamba": (transformers.JambaConfig(**GROUPED, num_experts=2), "of a kind that cannot run"),
    "bamba": (transformers.BambaConfig(**GROUPED, mamba_n_heads=4), "of a kind that cannot run"),
    "qwen3_next": (transformers.Qwen3NextConfig(**GROUPED), "of a kind that cannot run"),
    "lfm2": (transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "of a kind that cannot run"),
    "llama4": (transformers.Llama4TextConfig(**GROUPED, attention_chunk_size=16), "chunked_attention"),
    "t5": (transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, num_layers=2), "encoder-decoder"),
    "bart": (transformers.BartConfig(vocab_size=VOCAB_SIZE, d_model=32), "encoder-decoder"),
    "bloom": (
        transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
        "AttentionInterface",
    ),
    "falcon": (
        transformers.FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "AttentionInterface",
    ),
    "dynamic RoPE": (
        transformers.LlamaConfig(**GROUPED, rope_parameters={**ROPE, "rope_type": "dynamic"}),
        "a neighbour could change a result",
    ),
    "long RoPE": (
        transformers.Phi3Config(
            **GROUPED,
            original_max_position_embeddings=64,
            max_position_embeddings=128,
            rope_parameters={**ROPE, "rope_type": "longrope", "short_factor": HEAD, "long_factor": HEAD},
        ),
        "a neighbour could change a result",
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_models_that_cannot_run_are_refused_before_their_weights_are_read(kind: str, tmp_path: Path) -> None:
    config, words = REFUSED[kind]
    config.save_pretrained(tmp_path)
    if words == "AttentionInterface":
        save_random(config, tmp_path)
    with pytest.raises(UsageError, match=words):
        Engine(str(tmp_path), EngineConfig(device="cpu"))


def test_a_model_that_looks_both_ways_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**TINY, is_decoder=False)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"is_causal=False"):
        Engine(str(tmp_path), EngineConfig(device="cpu"))


@pytest.mark.parametrize("neighbourly", [False, True])
def test_a_model_that_mixes_the_rows_of_a_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbourly: bool
) -> None:
    """A token shift, as some architectures have: each row takes a little of the row before it."""

    def load(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*arguments, **options)

        def shift(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0] + 0.2 * torch.roll(inputs[0], 1, dims=1), *inputs[1:])

        if neighbourly:
            loaded.model.model.layers[0].register_forward_pre_hook(shift)
        return loaded

    monkeypatch.setattr(engine_module, "load_model", load)
    folder = save_model("llama", tmp_path)
    if not neighbourly:
        Engine(str(folder), EngineConfig(device="cpu"))
        return
    with pytest.raises(UsageError, match="lets sequences in one row change each other's results"):
        Engine(str(folder), EngineConfig(device="cpu"))


@case("A-sec-09")
def test_a_model_with_code_of_its_own_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    with pytest.raises(UsageError, match="cannot load the model"):
        Engine(str(folder), EngineConfig(device="cpu"))
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """transformers warns and goes on with random numbers."""
    folder = save_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"1 weights are missing, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        Engine(str(folder), EngineConfig(device="cpu"))


def test_a_broken_checkpoint_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    no_weights = save_model("llama", tmp_path / "none")
    (no_weights / "model.safetensors").unlink()
    other_shape = save_model("llama", tmp_path / "shape")
    config = json.loads((other_shape / "config.json").read_text())
    (other_shape / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    quantized = save_model("llama", tmp_path / "quantized")
    asked = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (quantized / "config.json").write_text(json.dumps(config | asked))
    for broken in (folder, no_weights, other_shape, quantized):
        with pytest.raises(UsageError, match="cannot load the model") as refused:
            Engine(str(broken), EngineConfig(device="cpu"))
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 500


def test_the_context_is_the_models_own(tmp_path: Path) -> None:
    for number, (changes, length) in enumerate([({}, 256), ({"sliding_window": 24}, 256), ({"n_positions": 77}, 77)]):
        family = "gpt2" if "n_positions" in changes else "mistral"
        config = transformers.AutoConfig.for_model(**{**FAMILIES[family].to_dict(), **changes})
        save_random(config, tmp_path / str(number))
        assert load_model(str(tmp_path / str(number)), device=torch.device("cpu"), dtype="auto").max_model_len == length


@case("A-sp-08")
def test_an_answer_ends_by_every_id_of_the_generation_config(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    assert load_model(str(folder), device=torch.device("cpu"), dtype="auto").eos_ids == {1}
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [4, 5]}))
    assert load_model(str(folder), device=torch.device("cpu"), dtype="auto").eos_ids == {4, 5}
