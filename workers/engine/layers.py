"""The meeting point with transformers: its attention layers call ours.

``batchjobs_paged`` is registered once with transformers' AttentionInterface and without a mask function, so no mask is
ever built. Each attention module of a loaded model carries what its calls need in ``paged_attention``; there is no
global state, and several models can live in one process.

A model is probed before it runs. While its own attention answers, its layers tell their sizes, options and masks; then
paged attention has to give the same logits. What a layer asks for and nobody here heeds is a reason to refuse it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from batchjobs.errors import UsageError
from workers.engine.attention.interface import AttentionBackend, LayerCache, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention
from workers.engine.masks import LISTENING, window_behind

IMPLEMENTATION = "batchjobs_paged"
HARMLESS = frozenset({"position_ids"})  # options that say nothing about the attention itself
NOT_CAUSAL = "is_causal=False"
LENGTH = 4  # tokens of each of the probe's two sequences
PROBE_PAGES = 3  # the null page, and one for each of them
KEPT = (3, 1, 2)  # rows of a packed step whose logits are compared, in no order
TOLERANCE = 1e-3  # of the largest logit, in float32; rounding alone stays far below
COARSE_TOLERANCE = 0.1  # in bfloat16 and float16


class How(NamedTuple):
    """What a layer asks of its attention beside the tensors; ``sinks`` is [Hq].

    ``unknown`` names what it asks for besides, such as biases of its own, which nobody here would heed.
    """

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    unknown: tuple[str, ...] = ()


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # [1, T, Hq, Dv]
    handler: Callable[..., torch.Tensor] = module.paged_attention  # type: ignore[assignment]
    return handler(query, key, value, _how(module, {**options, "attention_mask": attention_mask})), None


def _listening_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Note what the layer asks for, and let the model's own attention answer."""
    listen: Callable[..., None] = module.paged_attention  # type: ignore[assignment]
    listen(query, key, value, _how(module, dict(options)), attention_mask)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ValueError("its attention cannot be compared, since it has no eager form")
    answer: tuple[torch.Tensor, torch.Tensor | None] = own(module, query, key, value, attention_mask, **options)
    return answer


def _how(module: torch.nn.Module, options: dict[str, Any]) -> How:
    known = {name: options.pop(name, None) for name in ("scaling", "softcap", "s_aux")}
    options.pop("sliding_window", None)  # some layers have one and do not say so: the probe asks the masks instead
    is_causal = options.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    unknown = tuple(name for name, option in options.items() if name not in HARMLESS and not _is_off(option))
    return How(known["scaling"], known["softcap"], known["s_aux"], unknown + (() if is_causal else (NOT_CAUSAL,)))


def _is_off(option: Any) -> bool:
    return option is None or (isinstance(option, bool | int | float) and not option)


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
AttentionInterface.register(LISTENING, _listening_forward)


class PagedLayer:
    """One attention layer bound to its pages."""

    def __init__(self, spec: LayerSpec, backend: AttentionBackend, cache: LayerCache) -> None:
        self.spec, self.backend, self.cache = spec, backend, cache

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        spec = self.spec
        scaling = query.shape[3] ** -0.5 if how.scaling is None else how.scaling
        asked = (scaling, how.softcap, how.sinks is not None, how.unknown)
        if asked != (spec.scaling, spec.softcap, spec.has_sinks, ()):
            raise ValueError(f"layer {spec.index} asks for another attention than before: {asked}")
        return self.backend.attend(spec, self.cache, query, key, value, how.sinks)


class _Listener:
    """Notes a module's attention calls."""

    def __init__(self, module: torch.nn.Module, found: list[tuple[torch.nn.Module, LayerSpec]]) -> None:
        self.module, self.found = module, found

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How, mask: torch.Tensor | None
    ) -> None:
        if NOT_CAUSAL in how.unknown:
            raise ValueError(f"its attention looks both ways, as an encoder's does ({NOT_CAUSAL})")
        if how.unknown:
            raise ValueError(f"its attention asks for {', '.join(how.unknown)}, which packed rows do not have")
        spec = LayerSpec(
            index=len(self.found),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scaling=query.shape[3] ** -0.5 if how.scaling is None else float(how.scaling),
            sliding_window=window_behind(mask),
            softcap=how.softcap,
            has_sinks=how.sinks is not None,
        )
        self.found.append((self.module, spec))


class Probe(NamedTuple):
    """What a model told of itself: its attention layers in the order in which they run, and its own logits."""

    layers: list[tuple[torch.nn.Module, LayerSpec]]
    tokens: torch.Tensor  # [2, LENGTH]
    logits: torch.Tensor  # [2, LENGTH, V]


PackedStep = Callable[[torch.Tensor, list[int], PackedRows, Sequence[int]], torch.Tensor]
"""Runs one packed step: ids [T], their positions, the sequences, and the rows whose logits are wanted -> [K, V]."""


def probe_layers(model: PreTrainedModel, source: str) -> list[tuple[torch.nn.Module, LayerSpec]]:
    """The attention layers of :func:`probe_model`. Raises UsageError."""
    return probe_model(model, source).layers


def probe_model(model: PreTrainedModel, source: str) -> Probe:
    """Find the attention layers, and check that paged attention does what they do.

    Two sequences of four tokens run as the model itself runs them, and then packed, in two steps. Leaves the model with
    our attention, bound to no pages.

    Raises:
        UsageError: The model does not take its attention from the AttentionInterface, keeps another kind of state, or
            gives other logits on packed rows.
    """
    kind = model.config.model_type
    text = model.config.get_text_config(decoder=True)
    tokens = torch.arange(1, 2 * LENGTH + 1, device=model.device).reshape(2, LENGTH) * 3 % text.vocab_size
    try:
        found, own = _listen(model, tokens)
        distinct = len({id(module) for module, _ in found})
        if not len(found) == distinct == text.num_hidden_layers:
            raise ValueError(
                f"it has {text.num_hidden_layers} layers but {len(found)} attention calls in {distinct} modules, "
                "as state-space, hybrid and layer-sharing models have"
            )
        probe = Probe(found, tokens, own)
        check_packed(_module_step(model, found), probe, model.dtype)
    except Exception as error:  # whatever a foreign architecture raises, the user wants one sentence
        raise UsageError(f"{source!r} ({kind}) cannot run on packed rows: {error}") from error
    return probe


def unbind(model: PreTrainedModel) -> None:
    """Let go of the pages that its layers are bound to."""
    for module in model.modules():
        if hasattr(module, "paged_attention"):
            del module.paged_attention


def _listen(
    model: PreTrainedModel, tokens: torch.Tensor
) -> tuple[list[tuple[torch.nn.Module, LayerSpec]], torch.Tensor]:
    """The layers, and the model's own logits [2, LENGTH, V]."""
    found: list[tuple[torch.nn.Module, LayerSpec]] = []
    _set_attention(model, LISTENING)
    with _bound({module: _Listener(module, found) for module in model.modules()}):
        own: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found, own


def _module_step(model: PreTrainedModel, layers: Sequence[tuple[torch.nn.Module, LayerSpec]]) -> PackedStep:
    """The model's own modules, with paged attention."""
    _set_attention(model, IMPLEMENTATION)
    backend = TorchPagedAttention()
    bound = {
        module: PagedLayer(spec, backend, backend.allocate(spec, PROBE_PAGES, LENGTH, model.dtype, model.device))
        for module, spec in layers
    }

    def step(ids: torch.Tensor, positions: list[int], rows: PackedRows, wanted: Sequence[int]) -> torch.Tensor:
        backend.begin(rows)
        with _bound(bound):
            logits: torch.Tensor = model(
                input_ids=ids[None],
                position_ids=torch.tensor([positions], device=model.device),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=model.device),
            ).logits
        return logits[0]

    return step


def check_packed(step: PackedStep, probe: Probe, dtype: torch.dtype) -> None:
    """Raises ValueError if packed steps, over PROBE_PAGES pages of LENGTH tokens, give other logits than the model."""
    _compare(_packed(step, probe.tokens), probe.logits, dtype)


def _packed(step: PackedStep, tokens: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Sequence, position and logits [V] of rows of two packed steps: three tokens and one, then one and three.

    So each row stands where its position does not, beside a stranger, and both sequences go on from their pages.
    """
    for cached, counts in (((0, 0), (3, 1)), ((3, 1), (1, 3))):
        rows = [(s, p) for s in range(2) for p in range(cached[s], cached[s] + counts[s])]
        starts, tables = np.array([0, counts[0], LENGTH], np.int32), np.array([[1], [2]], np.int32)
        packed = PackedRows(starts, np.array(cached, np.int32), tables, LENGTH)
        logits = step(torch.stack([tokens[s, p] for s, p in rows]), [p for _, p in rows], packed, KEPT)
        if logits.shape[0] != len(KEPT):
            raise ValueError("it computes the logits of every row, whether they are needed or not")
        yield from ((*rows[row], logits[index]) for index, row in enumerate(KEPT))


def _compare(packed: Iterator[tuple[int, int, torch.Tensor]], own: torch.Tensor, dtype: torch.dtype) -> None:
    """In float32 every row must agree, else half of them: a rounded router may take another expert once in a while."""
    scale = _finite(own).abs().max().clamp(min=1e-6)
    apart = sorted(float((_finite(own[s, p]) - _finite(logits)).abs().max() / scale) for s, p, logits in packed)
    exact = dtype == torch.float32
    if not apart[-1 if exact else len(apart) // 2] <= (TOLERANCE if exact else COARSE_TOLERANCE):
        raise ValueError(
            "it lets sequences in one row change each other's results, or has an attention or positions of its own "
            f"(logits differ by {apart[-1]:.2g} of their size)"
        )


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Tokens that can never come have a logit of minus infinity, and a broken weight makes NaN with any attention."""
    return logits.float().nan_to_num(0.0, 0.0, 0.0)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError("it does not take its attention from transformers' AttentionInterface")


@contextmanager
def _bound(handlers: Mapping[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
    for module, handler in handlers.items():
        module.paged_attention = handler  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in handlers:
            del module.paged_attention
