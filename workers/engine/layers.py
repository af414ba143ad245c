"""The meeting point with transformers: its attention layers call ours.

``batchjobs_paged`` is registered once with transformers' AttentionInterface and without a mask function, so no mask is
ever built. Each attention module of a loaded model carries what its calls need in ``paged_attention``; there is no
global state, and several models can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from batchjobs.errors import UsageError
from workers.engine.attention.interface import AttentionBackend, LayerCache, LayerSpec

IMPLEMENTATION = "batchjobs_paged"
HARMLESS = frozenset({"position_ids"})  # options that say nothing about the attention itself


class How(NamedTuple):
    """What a layer asks of its attention beside the tensors; ``sinks`` is [Hq].

    ``unknown`` names what it asks for besides, such as a mask or biases of its own, which nobody here would heed.
    """

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    unknown: tuple[str, ...] = ()


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # [1, T, Hq, Dv]
    handler: Callable[..., torch.Tensor] = module.paged_attention  # type: ignore[assignment]
    unknown = _unknown(module, attention_mask=attention_mask, **options)
    return handler(query, key, value, How(scaling, sliding_window, softcap, s_aux, unknown)), None


def _unknown(module: torch.nn.Module, **options: Any) -> tuple[str, ...]:
    """Options that are set and could change the result. Those that are off, such as a dropout of 0, change nothing."""
    names = [n for n, v in options.items() if n not in HARMLESS and not (v is None or v is False or v == 0)]
    is_causal = options.get("is_causal", getattr(module, "is_causal", True))
    return tuple(n for n in names if n != "is_causal") + (() if is_causal else ("is_causal=False",))


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


class PagedLayer:
    """One attention layer bound to its pages."""

    def __init__(self, spec: LayerSpec, backend: AttentionBackend, cache: LayerCache) -> None:
        self.spec, self.backend, self.cache = spec, backend, cache

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        return self.backend.attend(self.spec, self.cache, query, key, value, how.sinks)


class _Probe:
    """Stands in for one module during the probe forward and notes what its attention call brings."""

    def __init__(self, module: torch.nn.Module, found: list[tuple[torch.nn.Module, LayerSpec]]) -> None:
        self.module, self.found = module, found

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        if how.unknown:
            raise ValueError(f"its attention asks for {', '.join(how.unknown)}, which packed rows do not have")
        spec = LayerSpec(
            index=len(self.found),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scaling=query.shape[3] ** -0.5 if how.scaling is None else float(how.scaling),
            sliding_window=how.sliding_window,
            softcap=how.softcap,
            has_sinks=how.sinks is not None,
        )
        self.found.append((self.module, spec))
        # Only shapes matter here: the plain result of the first token's row would do as well.
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous()


def probe_layers(model: PreTrainedModel, source: str) -> list[tuple[torch.nn.Module, LayerSpec]]:
    """Find the attention layers by a forward pass over two tokens, in the order in which they run.

    Raises:
        UsageError: The model does not take its attention from the AttentionInterface, or keeps another kind of state.
    """
    found: list[tuple[torch.nn.Module, LayerSpec]] = []
    kind = model.config.model_type
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UsageError(f"{source!r} ({kind}) does not take its attention from transformers' AttentionInterface")
    modules = list(model.modules())
    for module in modules:
        module.paged_attention = _Probe(module, found)
    try:
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        positions = torch.arange(2, device=model.device)[None]
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    except Exception as error:  # whatever a foreign architecture raises, the user wants one sentence
        raise UsageError(f"{source!r} ({kind}) cannot run on packed rows: {error}") from error
    finally:
        for module in modules:
            del module.paged_attention
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    distinct = len({id(module) for module, _ in found})
    if len(found) != expected or distinct != expected:
        raise UsageError(
            f"{source!r} ({kind}) has {expected} layers but {len(found)} attention calls in {distinct} modules; "
            "state-space, hybrid and layer-sharing models cannot run here"
        )
    return found
