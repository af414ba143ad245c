"""The device's side of a step: copy pages, run the model over one packed row, choose tokens, and keep each slot's last
token where the next step finds it.

All methods that touch the device are called from one thread, in the order of the steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from batchjobs.errors import UsageError
from workers.engine.attention import choose_backend
from workers.engine.attention.interface import LayerSpec, PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.cache import KVCache, group_layers, page_bytes
from workers.engine.config import EngineConfig
from workers.engine.layers import PagedLayer, probe_model, unbind
from workers.engine.native import native_forward
from workers.engine.offload import HostCache, PageCopy, host_pages
from workers.engine.sampler import sample, score

if TYPE_CHECKING:
    from workers.engine.models import LoadedModel
    from workers.engine.sampling_rows import SamplingRows
    from workers.engine.sequence import TopIds

log = logging.getLogger(__name__)

CPU_MEMORY_SHARE, GPU_MEMORY_SHARE = 0.25, 0.8  # of the free memory, for the cache, unless max_memory_percent says more
WARMUP_ROWS = (8, 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host. The lists follow the plan's parts that sample, and the rows that score."""

    tokens: list[int]
    logprobs: list[float]  # NaN where the logits were not finite
    allowed: list[bool]
    tops: list[TopIds] | None
    scores: list[float]
    score_tops: list[TopIds] | None
    started: float  # monotonic: when the device began with the step, and when it had finished
    ended: float


class Runner:
    """Owns the model's pages. One step at a time."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, max_model_len: int) -> None:
        self.model = loaded.model
        self.device = loaded.model.device
        with torch.inference_mode():
            probe = probe_model(loaded.model, loaded.name)
        layers = probe.layers
        specs = [spec for _, spec in layers]
        self.groups = group_layers(specs)
        self.page_size = config.page_size
        self.backends = [choose_backend(self.device, loaded.model.dtype, specs) for _ in self.groups]
        useful = -(-max_model_len // config.page_size) * config.max_requests_per_batch * len(self.groups)
        self.num_pages = config.num_blocks or self._affordable_pages(specs, config, useful + 1)
        self.cache = KVCache(
            specs,
            self.groups,
            self.backends[0],
            num_pages=self.num_pages,
            page_size=config.page_size,
            dtype=loaded.model.dtype,
            device=self.device,
        )
        self.host_pages = host_pages(
            config.cpu_offload_space,
            threshold=config.cpu_offload_space_safety_threshold,
            page_bytes=self.cache.page_bytes,
            useful=useful,
        )
        self._host = HostCache(self.cache, self.host_pages)
        group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        each = [group_of[index] for index in range(len(specs))]
        self._bind(layers, each)
        caches = [self.cache.layer(index) for index in range(len(specs))]
        with torch.inference_mode():
            self.native = native_forward(loaded.model, probe, self.backends, caches, each, config=config)
        self._last_tokens = torch.zeros(config.max_requests_per_batch, dtype=torch.long, device=self.device)
        self._started = 0.0

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, copies: Sequence[PageCopy]) -> torch.Tensor:
        """One packed step. Returns the logits of its sampled rows and then of its scored rows: [R + P, V] float32.

        They may be gone when the next step runs.
        """
        self._started = time.monotonic()
        self._host.copy(copies)
        for backend, rows in zip(self.backends, batch.rows, strict=True):
            backend.begin(rows)
        input_ids = self._on_device(batch.input_ids)  # [T]
        if len(batch.fed_rows):
            input_ids[self._on_device(batch.fed_rows)] = self._last_tokens[self._on_device(batch.fed_slots)]
        wanted = np.concatenate((batch.sampled_rows, batch.scored_rows))
        if self.native is not None:
            return self.native(input_ids, batch.positions, wanted)
        output = self.model(
            input_ids=input_ids[None],  # [1, T]
            position_ids=self._on_device(batch.positions)[None],  # [1, T]
            use_cache=False,
            logits_to_keep=self._on_device(wanted),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: PackedBatch, rows: SamplingRows, score_top: int) -> StepResult:
        """Choose the tokens of the sampled rows, keep them for the next step, and score the prompt's rows."""
        sampled = sample(logits[: rows.count], rows)
        self._last_tokens[self._on_device(batch.sampled_slots)] = sampled.tokens
        scores, score_tops = score(logits[rows.count :], self._on_device(batch.scored_tokens), score_top)
        return StepResult(
            tokens=sampled.tokens.tolist(),
            logprobs=sampled.logprobs.tolist(),
            allowed=sampled.allowed.tolist(),
            tops=sampled.tops,
            scores=scores.tolist(),
            score_tops=score_tops,
            started=self._started,
            ended=time.monotonic(),
        )

    def warmup(self) -> None:
        """Run a prefill and a decode step into the null page: whatever is prepared on first use is ready then."""
        for count in WARMUP_ROWS:
            self._run_alone(np.zeros(count, np.int64), np.array([count - 1]))

    def smoke(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after each of these tokens, of as many as one page holds, by the whole way of a step: [tokens, V].

        They are computed in the null page. On the host, float32.
        """
        count = min(len(ids), self.page_size)
        return self._run_alone(np.array(ids[:count], np.int64), np.arange(count)).to("cpu", copy=True)

    def release(self) -> None:
        """Let go of the pages' memory, here and on the host. The runner is not used after that."""
        unbind(self.model)
        self.native = None
        self.cache.release()
        self._host.release()

    def _run_alone(self, ids: np.ndarray, wanted: np.ndarray) -> torch.Tensor:
        """One sequence from its beginning in the null page; the logits of its ``wanted`` rows."""
        count = len(ids)
        tables = np.zeros((1, -(-count // self.page_size)), np.int32)
        rows = PackedRows(np.array([0, count], np.int32), np.zeros(1, np.int32), tables, self.page_size)
        none = np.zeros(0, np.int64)
        batch = PackedBatch(ids, np.arange(count), none, none, wanted, none, none, none, [rows] * len(self.groups))
        return self.forward(batch, ())

    @property
    def forward_kind(self) -> str:
        """Who computes a step: ``native`` or ``transformers``."""
        return "transformers" if self.native is None else "native"

    def _bind(self, layers: Sequence[tuple[torch.nn.Module, LayerSpec]], groups: Sequence[int]) -> None:
        """Layer i uses the page tables of ``groups[i]``."""
        for index, (module, spec) in enumerate(layers):
            paged = PagedLayer(spec, self.backends[groups[index]], self.cache.layer(index))
            module.paged_attention = paged  # type: ignore[assignment]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _affordable_pages(self, specs: list[LayerSpec], config: EngineConfig, useful: int) -> int:
        """As many pages as the free memory allows and the running sequences can ever use."""
        one = page_bytes(specs, self.groups, config.page_size, self.model.dtype)
        share = GPU_MEMORY_SHARE if self.device.type == "cuda" else CPU_MEMORY_SHARE
        affordable = int(self._free_bytes() * (config.max_memory_percent or share)) // one
        if affordable < 2:
            raise UsageError(f"no memory for the KV cache: one page takes {one / 2**20:.1f} MiB; set num_blocks")
        return int(min(useful, affordable))

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what a former model let go of is free only then
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)
