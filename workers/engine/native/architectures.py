"""Reads a decoder off a model of transformers, or says what of it is not known.

What it keeps true:
- Every module of the model is known by its very class and place, and every weight is used. Anything more (a hook, a
  layer of another kind, a forward of its own, a bias where none is known) is a reason to refuse.
- What a module computes is not looked at here: a probe compares the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workers.engine.native.decoder import Activation, Decoder, DecoderLayer, Matrix, Norm
from workers.engine.native.linear import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from workers.engine.native.decoder import Rotary

ACTIVATIONS = {
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "ReLU": Activation.RELU,
}


class UnknownDecoder(Exception):
    """The native forward does not know this model; the message says what of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What differs between models of transformers that are decoders of the same shape.

    ``prefix`` begins the names of its classes, in the module of ``folder``.
    """

    folder: str
    prefix: str
    model: str = "Model"
    embedding: str | None = None  # None: a plain nn.Embedding
    shift: float = 0.0  # of its norms
    epsilon: str = "variance_epsilon"
    activation: str = "act_fn"
    merged: bool = False  # one weight for queries, keys and values, and one for gate and up
    head_norms: bool = False
    sandwich: bool = False  # norms behind the attention and the MLP, too
    dropouts: tuple[str, ...] = ()  # of a layer; they do nothing outside training
    rotaries: bool = False  # one for each kind of layer

    @property
    def module(self) -> str:
        return f"transformers.models.{self.folder}.modeling_{self.folder}"


_GEMMA: dict[str, Any] = {"embedding": "TextScaledWordEmbedding", "shift": 1.0, "epsilon": "eps"}
FAMILIES = {
    f"{family.prefix}ForCausalLM": family
    for family in (
        Family(folder="llama", prefix="Llama"),
        Family(folder="mistral", prefix="Mistral"),
        Family(folder="qwen2", prefix="Qwen2"),
        Family(folder="qwen3", prefix="Qwen3", head_norms=True),
        Family(folder="smollm3", prefix="SmolLM3"),
        Family(
            folder="phi3",
            prefix="Phi3",
            activation="activation_fn",
            merged=True,
            dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        ),
        Family(folder="gemma", prefix="Gemma", **_GEMMA),
        Family(folder="gemma2", prefix="Gemma2", sandwich=True, **_GEMMA),
        Family(
            folder="gemma3",
            prefix="Gemma3",
            model="TextModel",
            sandwich=True,
            head_norms=True,
            rotaries=True,
            **_GEMMA,
        ),
    )
}


def read_decoder(model: PreTrainedModel) -> Decoder:
    """Raises UnknownDecoder."""
    family = FAMILIES.get(type(model).__name__)
    if family is None or type(model).__module__ != family.module:
        raise UnknownDecoder(f"it knows no {type(model).__name__}")
    if model.device.type != "cpu" or model.dtype not in DTYPES:
        raise UnknownDecoder(f"it does not run in {model.dtype} on {model.device.type}")
    reader = _Reader(model, family)
    decoder = reader.decoder()
    reader.refuse_the_rest()
    return decoder


class _Reader:
    """Notes what was read: what is left over at the end is unknown."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self.model, self.family = model, family
        self.modules: set[nn.Module] = {model}
        self.weights: set[int] = set()  # ids

    def decoder(self) -> Decoder:
        model, family, config = self.model, self.family, self.model.config
        inner = self.own(model, "model", family.model)
        if family.embedding is None:
            table = self.plain(inner, "embed_tokens", nn.Embedding)
            scale = 1.0
        else:
            table = self.own(inner, "embed_tokens", family.embedding)
            scale = float(table.embed_scale.to(model.dtype))
            self.weights.add(id(table.embed_scale))
        modules = self.plain(inner, "layers", nn.ModuleList)
        if len(modules) != config.num_hidden_layers:
            raise UnknownDecoder("it runs only a part of its layers")
        kinds, rotaries = self.rotaries(inner, len(modules))
        return Decoder(
            embedding=self.weight(table, "weight"),
            embedding_scale=scale,
            layers=tuple(self.layer(modules, index, kind) for index, kind in enumerate(kinds)),
            rotaries=rotaries,
            norm=self.norm(inner, "norm"),
            head=self.matrix(model, "lm_head"),
            logit_cap=getattr(config, "final_logit_softcapping", None),
        )

    def rotaries(self, inner: nn.Module, layers: int) -> tuple[list[int], tuple[Rotary, ...]]:
        """Which rotary each layer uses, and the rotaries."""
        rotary = self.own(inner, "rotary_emb", "RotaryEmbedding")
        self.weights |= {id(buffer) for buffer in rotary.buffers(recurse=False)}
        if not self.family.rotaries:
            return [0] * layers, (partial(_turns, rotary),)
        kinds = list(dict.fromkeys(self.model.config.layer_types))
        each = [kinds.index(kind) for kind in self.model.config.layer_types]
        return each, tuple(partial(_turns, rotary, layer_type=kind) for kind in kinds)

    def layer(self, modules: nn.Module, index: int, rotary: int) -> DecoderLayer:
        family = self.family
        layer = self.own(modules, str(index), "DecoderLayer")
        attention, mlp = self.own(layer, "self_attn", "Attention"), self.own(layer, "mlp", "MLP")
        for name in family.dropouts:
            self.plain(layer, name, nn.Dropout)
        if family.merged:
            heads = [
                n * attention.head_dim for n in (self.model.config.num_attention_heads, attention.num_key_value_heads)
            ]
            query, key, value = self.slices(attention, "qkv_proj", (heads[0], heads[1], heads[1]))
            half = self.model.config.intermediate_size
            gate, up = self.slices(mlp, "gate_up_proj", (half, half))
        else:
            query, key, value = (self.matrix(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
            gate, up = (self.matrix(mlp, name) for name in ("gate_proj", "up_proj"))
        return DecoderLayer(
            before_attention=self.norm(layer, "input_layernorm"),
            query=query,
            key=key,
            value=value,
            query_norm=self.norm(attention, "q_norm") if family.head_norms else None,
            key_norm=self.norm(attention, "k_norm") if family.head_norms else None,
            rotary=rotary if getattr(attention, "use_rope", True) else None,
            output=self.matrix(attention, "o_proj"),
            after_attention=self.norm(layer, "post_attention_layernorm") if family.sandwich else None,
            before_mlp=self.norm(layer, "pre_feedforward_layernorm" if family.sandwich else "post_attention_layernorm"),
            gate=gate,
            up=up,
            down=self.matrix(mlp, "down_proj"),
            after_mlp=self.norm(layer, "post_feedforward_layernorm") if family.sandwich else None,
            activation=self.activation(mlp),
        )

    def own(self, owner: nn.Module, name: str, kind: str) -> Any:
        """A module of the family's own class."""
        return self._module(
            owner, name, lambda it: (it.__module__, it.__name__) == (self.family.module, self.family.prefix + kind)
        )

    def plain(self, owner: nn.Module, name: str, kind: type[nn.Module]) -> Any:
        """A module of exactly this class."""
        return self._module(owner, name, lambda it: it is kind)

    def _module(self, owner: nn.Module, name: str, is_known: Callable[[type], bool]) -> Any:
        module = getattr(owner, name, None)
        if not isinstance(module, nn.Module) or not is_known(type(module)):
            raise UnknownDecoder(f"{name} of its {type(owner).__name__} is a {type(module).__name__}")
        self.modules.add(module)
        return module

    def activation(self, mlp: nn.Module) -> Activation:
        module = getattr(mlp, self.family.activation)
        known = ACTIVATIONS.get(type(module).__name__)
        if known is None or not type(module).__module__.startswith(("transformers.activations", "torch.nn.")):
            raise UnknownDecoder(f"its activation is a {type(module).__name__}")
        self.modules.add(module)
        return known

    def norm(self, owner: nn.Module, name: str) -> Norm:
        module = self.own(owner, name, "RMSNorm")
        return Norm(self.weight(module, "weight"), float(getattr(module, self.family.epsilon)), self.family.shift)

    def matrix(self, owner: nn.Module, name: str) -> Matrix:
        module = self.plain(owner, name, nn.Linear)
        weight, bias = self.weight(module, "weight"), None if module.bias is None else self.weight(module, "bias")
        return Matrix(weight, bias, 0, len(weight))

    def slices(self, owner: nn.Module, name: str, sizes: tuple[int, ...]) -> list[Matrix]:
        """Parts of one weight that several products share."""
        whole = self.matrix(owner, name)
        if sum(sizes) != whole.outputs:
            raise UnknownDecoder(f"{name} has {whole.outputs} rows, not {sum(sizes)}")
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [Matrix(whole.weight, whole.bias, first, size) for first, size in zip(firsts, sizes, strict=True)]

    def weight(self, module: nn.Module, name: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(module, name)
        if tensor.dtype != self.model.dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
            raise UnknownDecoder(f"{name} of a {type(module).__name__} is in {tensor.dtype} on {tensor.device}")
        self.weights.add(id(tensor))
        return tensor

    def refuse_the_rest(self) -> None:
        for name, module in self.model.named_modules():
            if module not in self.modules:
                raise UnknownDecoder(f"it knows no {name or 'module'}, a {type(module).__name__}")
            if "forward" in vars(module) or module.training or _is_hooked(module):
                raise UnknownDecoder(
                    f"{name or type(module).__name__} has a hook or a forward of its own, or is in training"
                )
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if id(tensor) not in self.weights:
                raise UnknownDecoder(f"it knows no weight {name}")


def _turns(rotary: nn.Module, positions: torch.Tensor, **kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = rotary(torch.empty(0, dtype=torch.float32), positions, **kind)
    return cosines, sines


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
