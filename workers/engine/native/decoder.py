"""A decoder as the native forward knows it: which weights it has, and how they are joined.

Nothing is copied: weights are the model's own parameters, so that an exchange of their memory is seen here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions [1, T] -> cosines and sines [1, T, D], float32."""


class Activation(IntEnum):
    """As in linear_plan.h."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """y = x W^T + b, W being the rows ``first .. first + outputs`` of ``weight``, and b those numbers of ``bias``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    first: int
    outputs: int

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + epsilon) * (weight + shift)."""

    weight: torch.Tensor
    epsilon: float
    shift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """h += after_attention(output(attention(before_attention(h)))), then the same with the gated MLP.

    ``rotary`` says which of the decoder's rotaries turns queries and keys; None for a layer that knows no positions.
    """

    before_attention: Norm
    query: Matrix
    key: Matrix
    value: Matrix
    query_norm: Norm | None  # of each head
    key_norm: Norm | None
    rotary: int | None
    output: Matrix
    after_attention: Norm | None
    before_mlp: Norm
    gate: Matrix
    up: Matrix
    down: Matrix
    after_mlp: Norm | None
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """From token ids to logits. ``logit_cap`` c makes of each logit c * tanh(logit / c)."""

    embedding: torch.Tensor  # [vocabulary, hidden]
    embedding_scale: float
    layers: tuple[DecoderLayer, ...]
    rotaries: tuple[Rotary, ...]
    norm: Norm
    head: Matrix
    logit_cap: float | None

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]
