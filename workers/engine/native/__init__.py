"""The forward of known decoders in C++, and the choice of whether it runs."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.attention import choose_backend
from workers.engine.attention.compiler import KernelError, load_kernel
from workers.engine.attention.cpu import CpuPagedAttention
from workers.engine.layers import LENGTH, PROBE_PAGES, check_packed
from workers.engine.native.architectures import UnknownDecoder, read_decoder
from workers.engine.native.forward import NativeForward
from workers.engine.native.operations import Kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from workers.engine.attention.interface import AttentionBackend, LayerCache, LayerSpec, PackedRows
    from workers.engine.config import EngineConfig
    from workers.engine.layers import PackedStep, Probe
    from workers.engine.native.decoder import Decoder

__all__ = ["NativeForward", "native_forward"]

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("program.cpp")


def native_forward(
    model: PreTrainedModel,
    probe: Probe,
    backends: Sequence[AttentionBackend],
    caches: Sequence[LayerCache],
    groups: Sequence[int],
    *,
    config: EngineConfig,
) -> NativeForward | None:
    """The native forward of a model, if it has one that gives the model's own logits; says in the log which forward
    runs, and why.

    ``caches`` are those of its layers, and ``groups[i]`` says which of the backends serves layer i.
    """
    if model.device.type != "cpu":
        return None
    wanted = config.native_forward
    is_worth_a_warning = bool(wanted)
    why = _why_not_wanted(model.dtype, wanted)
    if why is None:
        try:
            forward = _checked(model, probe, backends, caches, groups, config)
        except (UnknownDecoder, KernelError, ValueError) as reason:
            why = str(reason)
        except Exception as error:  # noqa: BLE001  another release of transformers, say; the model itself runs
            why, is_worth_a_warning = f"it cannot be set up ({type(error).__name__}: {error})", True
        else:
            _log.info("the forward runs natively")
            return forward
    level = logging.WARNING if is_worth_a_warning else logging.INFO
    _log.log(level, "the forward runs in transformers' modules: %s", why)
    return None


def _why_not_wanted(dtype: torch.dtype, wanted: bool | None) -> str | None:
    if wanted is False:
        return "the native forward is switched off"
    if wanted is None and dtype == torch.bfloat16 and _has_matrix_unit():
        return "torch is faster in bfloat16 on this processor (AMX)"
    return None


def _checked(
    model: PreTrainedModel,
    probe: Probe,
    backends: Sequence[AttentionBackend],
    caches: Sequence[LayerCache],
    groups: Sequence[int],
    config: EngineConfig,
) -> NativeForward:
    """Raises UnknownDecoder, KernelError, or ValueError where sizes or logits are not the model's own."""
    decoder = read_decoder(model)
    paged = [backend for backend in backends if isinstance(backend, CpuPagedAttention)]
    if len(paged) < len(backends):
        raise UnknownDecoder("its attention does not run in the C++ kernel")
    kernel = _kernel()
    if isinstance(kernel, str):
        raise KernelError(kernel)
    specs = [spec for _, spec in probe.layers]
    check_packed(_native_step(kernel, decoder, specs), probe, model.dtype)
    assert config.max_batch_tokens is not None  # it has been worked out by now
    most = {"most_rows": config.max_batch_tokens, "most_kept": config.max_requests_per_batch}
    return NativeForward(kernel, decoder, specs, caches, groups, paged, **most)


def _native_step(kernel: Kernel, decoder: Decoder, specs: Sequence[LayerSpec]) -> PackedStep:
    """With a few small pages of its own."""
    dtype = decoder.embedding.dtype
    backend = choose_backend("cpu", dtype, specs)
    assert isinstance(backend, CpuPagedAttention)
    caches = [backend.allocate(spec, PROBE_PAGES, LENGTH, dtype, "cpu") for spec in specs]
    forward = NativeForward(
        kernel, decoder, specs, caches, [0] * len(specs), [backend], most_rows=LENGTH, most_kept=LENGTH
    )

    def step(ids: torch.Tensor, positions: list[int], rows: PackedRows, wanted: Sequence[int]) -> torch.Tensor:
        backend.begin(rows)
        return forward(ids, np.array(positions), np.array(wanted)).clone()

    return step


@cache
def _kernel() -> Kernel | str:
    """The kernel, or why there is none: tried once a process."""
    try:
        return Kernel(load_kernel(_SOURCE))
    except KernelError as reason:
        return str(reason)


@cache
def _has_matrix_unit() -> bool:
    """Whether the processor multiplies matrices of bfloat16 by itself; torch's library uses that."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
