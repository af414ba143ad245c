"""The forward pass: a model whose attention layers read and write our pages, over one packed row of tokens."""

from __future__ import annotations

import logging

import numpy as np
import psutil
import torch

from batchjobs.errors import UsageError
from workers.engine.attention import choose_backend
from workers.engine.attention.interface import LayerSpec
from workers.engine.batch import PackedBatch
from workers.engine.config import EngineConfig
from workers.engine.layers import PagedLayer, probe_layers
from workers.engine.models import LoadedModel

log = logging.getLogger(__name__)

CACHE_MEMORY_SHARE = 0.25  # of the memory that is free when the cache is made, unless num_blocks says otherwise


class Runner:
    """Owns the model's pages. One forward at a time."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, max_model_len: int) -> None:
        self.model = loaded.model
        self.device = loaded.model.device
        with torch.inference_mode():
            layers = probe_layers(loaded.model, loaded.name)
        specs = [spec for _, spec in layers]
        self.backend = choose_backend(self.device, loaded.model.dtype, specs)
        self.num_pages = config.num_blocks or self._affordable_pages(specs, config, max_model_len)
        for module, spec in layers:
            cache = self.backend.allocate(spec, self.num_pages, config.page_size, loaded.model.dtype, self.device)
            module.paged_attention = PagedLayer(spec, self.backend, cache)  # type: ignore[assignment]

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """One packed step. Returns the logits of the rows that sample: [R, V] float32."""
        self.backend.begin(batch.rows)
        output = self.model(
            input_ids=self._on_device(batch.input_ids)[None],  # [1, T]
            position_ids=self._on_device(batch.positions)[None],  # [1, T]
            use_cache=False,
            logits_to_keep=self._on_device(batch.sampled_rows),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _affordable_pages(self, specs: list[LayerSpec], config: EngineConfig, max_model_len: int) -> int:
        """As many pages as the free memory allows and the running sequences can ever use."""
        item = self.model.dtype.itemsize
        page_bytes = sum(s.num_kv_heads * (s.head_dim + s.value_dim) for s in specs) * config.page_size * item
        useful = -(-max_model_len // config.page_size) * config.max_requests_per_batch + 1
        affordable = int(self._free_bytes() * CACHE_MEMORY_SHARE) // page_bytes
        if affordable < 2:
            raise UsageError(f"no memory for the KV cache: one page takes {page_bytes / 2**20:.1f} MiB; set num_blocks")
        return int(min(useful, affordable))

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)
