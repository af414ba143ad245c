"""Models with random weights, made on the device from a configuration: nothing is downloaded.

Weights are scaled so that a layer keeps the size of what goes through it, and so that logits spread as a trained
model's do (a standard deviation of about 3): the best token is then seldom within rounding of the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from workers.engine.models import LoadedModel

LOGIT_SPREAD = 3.0
EMBEDDING_SPREAD = 0.5  # where the head has weights of its own


def llama_8b() -> PreTrainedConfig:
    """The shape of Llama-3.1-8B."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )


def qwen3_0_6b() -> PreTrainedConfig:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    )


def small(config: type[PreTrainedConfig] = LlamaConfig, **more: object) -> PreTrainedConfig:
    """A small model for comparisons token by token, with the head size of the large ones unless told otherwise."""
    shape: dict[str, object] = {
        "vocab_size": 499,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return config(**(shape | more))


SMALL: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": small,
    "qwen3": lambda: small(Qwen3Config, num_attention_heads=8, num_key_value_heads=1),
    "mistral with a window": lambda: small(MistralConfig, sliding_window=48, head_dim=64),
    "gemma2 with windows and capped scores": lambda: small(
        Gemma2Config, sliding_window=48, query_pre_attn_scalar=128, head_dim=256
    ),
    "gpt-oss with sinks and experts": lambda: small(
        GptOssConfig,
        sliding_window=48,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
NEED_EAGER = ("gemma2", "gpt_oss")  # models that `generate` answers rightly with eager attention alone


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to be measured, and the sequences that take part in its workloads."""

    name: str
    config: Callable[[], PreTrainedConfig]
    sequences: int


LARGE = {
    "llama-8b": Shape("Llama-3.1-8B shape", llama_8b, 128),
    "qwen3-0.6b": Shape("Qwen3-0.6B shape", qwen3_0_6b, 256),
}


def build(config: PreTrainedConfig, device: str, dtype: torch.dtype, *, seed: int = 0) -> PreTrainedModel:
    """A model in the device's memory. Nothing of it was ever on the host."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.requires_grad_(False).eval()
    with torch.no_grad():
        head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        embeddings.normal_(std=EMBEDDING_SPREAD)
        head.normal_(std=LOGIT_SPREAD * head.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def loaded(model: PreTrainedModel, name: str) -> LoadedModel:
    """The model as the engine takes it: without a tokenizer, and without a token that ends an answer."""
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=name,
        version="random",
        max_model_len=model.config.get_text_config(decoder=True).max_position_embeddings,
        eos_ids=frozenset(),
    )


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in the same memory, under modules of their own: an engine may change how attention is computed
    in one of the two."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
