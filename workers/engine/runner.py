"""The device's side of a step: copy pages, run the model over one packed row, choose tokens, and keep each slot's last
token where the next step finds it.

All methods that touch the device are called from one thread, in the order of the steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.engine.attention import choose_backend
from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.cache import KVCache, group_layers, page_bytes
from workers.engine.config import EngineConfig
from workers.engine.device_path import path_of
from workers.engine.device_sampler import choose, sampling_arrays
from workers.engine.graphs import DecodeGraphs, Sizes, decode_graphs
from workers.engine.layers import PagedLayer, probe_model, unbind
from workers.engine.memory import Wanted, memory_of, plan_memory
from workers.engine.native import NativeForward, native_forward
from workers.engine.offload import PageCopy, host_cache, host_pages, staging_bytes
from workers.engine.results import Chosen, Clock, Pending, Ready, Result, StepResult
from workers.engine.sampler import sample, score
from workers.engine.sampling_rows import SamplingRows
from workers.engine.shortage import Shortage, twice
from workers.engine.trial import TOP, trial_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.engine.models import LoadedModel

log = logging.getLogger(__name__)

WARMUP_ROWS = (8, 1)


class Runner:
    """Owns the model's pages. One step at a time."""

    is_alone = True  # no other process takes part: a step can be tried, and done again in parts

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, max_model_len: int, *, agree: Callable[[int], int] = int
    ) -> None:
        """``agree`` gets the number of pages that there is room for and returns the one to be taken, which may be less:
        where a model is split over devices, all of them have as many."""
        self.model = loaded.model
        self.device = loaded.model.device
        self.path = path_of(self.device)
        self.path.make_current()
        self._inputs, self._sampling, self._results = self.path.upload(), self.path.upload(), self.path.download()
        self._clock = Clock()
        with torch.inference_mode():
            probe = probe_model(loaded.model, loaded.name)
        self._layers = probe.layers
        specs = [spec for _, spec in probe.layers]
        self.groups = group_layers(specs)
        group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self._group_of = [group_of[index] for index in range(len(specs))]
        self.backends = [choose_backend(self.device, loaded.model.dtype, specs, config.page_size) for _ in self.groups]
        self.page_size = config.page_size or self.backends[0].page_size
        # One for each slot, and one for rows that nobody has.
        self._last_tokens = torch.zeros(config.max_requests_per_batch + 1, dtype=torch.long, device=self.device)
        self.native: NativeForward | None = None
        self._graphs: DecodeGraphs | None = None
        self._started = 0.0
        one = page_bytes(specs, self.groups, self.page_size, loaded.model.dtype)
        useful = -(-max_model_len // self.page_size) * config.max_requests_per_batch * len(self.groups)
        self.host_pages = host_pages(
            config.cpu_offload_space,
            threshold=config.cpu_offload_space_safety_threshold,
            page_bytes=one,
            useful=useful,
        )
        budget = plan_memory(
            memory_of(self.device, tries=self.is_alone),
            Wanted(config.num_blocks, config.max_batch_tokens, config.max_memory_percent),
            page_bytes=one,
            useful_pages=useful + 1,
            other_bytes=staging_bytes(self.host_pages, one) if self.path.works_beside else 0,
            try_step=partial(self._try_step, context=max_model_len),
        )
        config = replace(config, max_batch_tokens=budget.batch_tokens)
        self.num_pages, self.shortage = agree(budget.pages), Shortage(budget.batch_tokens)
        self._take_pages(self.num_pages)
        self._host = host_cache(self.cache, self.host_pages, self.path)
        caches = [self.cache.layer(index) for index in range(len(specs))]
        with torch.inference_mode():
            self.native = native_forward(loaded.model, probe, self.backends, caches, self._group_of, config=config)
        most = min(config.max_requests_per_batch, budget.batch_tokens)
        sizes = Sizes(most, -(-max_model_len // self.page_size), self.page_size, _vocab_size(self.model))
        model = partial(_model_logits, self.model, wanted=0)
        self._graphs = decode_graphs(config.use_cuda_graph, self.path, model, self.backends, self._last_tokens, sizes)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, copies: Sequence[PageCopy]) -> torch.Tensor:
        """One packed step. Returns the logits of its sampled rows and then of its scored rows: [R + P, V] float32.

        They may be gone when the next step runs.
        """
        self._started = time.monotonic()
        self.path.make_current()  # this may be another thread than that of the step before
        self._host.copy(copies)
        return self.shortage.run(self._compute, batch) if self.is_alone else self._compute(batch)

    def _compute(self, batch: PackedBatch) -> torch.Tensor:
        """The logits of a step, or of a part of one."""
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.forward(batch)
        wanted_rows = np.concatenate((batch.sampled_rows, batch.scored_rows))
        arrays = (batch.input_ids, batch.positions, wanted_rows, batch.fed_rows, batch.fed_slots)
        each = [backend.host_arrays(rows) for backend, rows in zip(self.backends, batch.rows, strict=True)]
        input_ids, positions, wanted, fed_rows, fed_slots, *others = self._inputs((*arrays, *chain(*each)))
        rest = iter(others)
        for backend, rows, own in zip(self.backends, batch.rows, each, strict=True):
            backend.begin(rows, list(islice(rest, len(own))))
        if len(batch.fed_rows):
            input_ids[fed_rows] = self._last_tokens[fed_slots]
        if self.native is not None:
            return self.native(input_ids, batch.positions, wanted_rows)
        return _model_logits(self.model, input_ids, positions, wanted).float()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: PackedBatch, rows: SamplingRows, score_top: int) -> Result:
        """Choose the tokens of the sampled rows, keep them for the next step, and score the prompt's rows."""
        if self.path.works_beside:
            return twice(lambda: self._choose_beside(logits, batch, rows, score_top))
        slots, scored_tokens = self._sampling((batch.sampled_slots, batch.scored_tokens))
        sampled = sample(logits[: rows.count], rows)
        self._last_tokens[slots] = sampled.tokens
        scores, score_tops = score(logits[rows.count :], scored_tokens, score_top)
        return Ready(
            StepResult(
                tokens=sampled.tokens.tolist(),
                logprobs=sampled.logprobs.tolist(),
                allowed=sampled.allowed.tolist(),
                tops=sampled.tops,
                scores=scores.tolist(),
                score_tops=score_tops,
                started=self._started,
                ended=time.monotonic(),
            )
        )

    def _choose_beside(self, logits: torch.Tensor, batch: PackedBatch, rows: SamplingRows, score_top: int) -> Pending:
        return Pending(self._choose(logits, batch, rows, score_top), self._results, self._clock, self._started)

    def _choose(self, logits: torch.Tensor, batch: PackedBatch, rows: SamplingRows, score_top: int) -> Chosen:
        if self._graphs is not None and rows.is_plain and self._graphs.made(logits):
            return self._graphs.choose(rows.count)
        arrays = (batch.sampled_slots, batch.scored_tokens, *sampling_arrays(rows, logits.shape[1]))
        slots, scored_tokens, *own = self._sampling(arrays)
        chosen = choose(logits, rows, own, scored_tokens, score_top)
        self._last_tokens[slots] = chosen.tokens
        return chosen

    def warmup(self) -> None:
        """Run a prefill and a decode step into the null page: whatever is prepared on first use is ready then."""
        for count in WARMUP_ROWS:
            logits = self._run_alone(np.zeros(count, np.int64), np.array([count - 1]))
            if self.path.works_beside:
                self._sample_alone(logits)

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
        if self._graphs is not None:
            self._graphs.release()
        self.cache.release()
        self._host.release()

    def _run_alone(self, ids: np.ndarray, wanted: np.ndarray) -> torch.Tensor:
        """One sequence from its beginning in the null page; the logits of its ``wanted`` rows."""
        count = len(ids)
        tables = np.zeros((1, -(-count // self.page_size)), np.int32)
        rows = PackedRows(np.array([0, count], np.int32), np.zeros(1, np.int32), tables, self.page_size)
        return self.forward(self._alone(ids, wanted, [rows] * len(self.groups)), ())

    def _sample_alone(self, logits: torch.Tensor) -> None:
        """Choose the token of one row that nobody has, in the ways that differ in what they need."""
        batch, most = self._alone(np.zeros(1, np.int64), np.zeros(1, np.int64), []), logits.shape[1]
        draws = ((1.0, most, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (0.7, most, 0.9, 0.1))
        for temperature, top_k, top_p, min_p in draws:
            rows = SamplingRows(1, drawn=[0], point=[0.5], top_logprobs=1)
            rows.temperature, rows.top_k, rows.top_p, rows.min_p = [temperature], [top_k], [top_p], [min_p]
            self.sample(logits, batch, rows, 0).wait()
        self.sample(logits, batch, SamplingRows(1), 0).wait()

    def _alone(self, ids: np.ndarray, wanted: np.ndarray, rows: list[PackedRows]) -> PackedBatch:
        none, spare = np.zeros(0, np.int64), np.full(len(wanted), len(self._last_tokens) - 1)
        return PackedBatch(ids, np.arange(len(ids)), none, none, wanted, spare, none, none, rows)

    @property
    def forward_kind(self) -> str:
        """Who computes a step: ``native`` or ``transformers``."""
        return "transformers" if self.native is None else "native"

    def _take_pages(self, number: int) -> None:
        """Make so many pages, and bind the layers to them."""
        self.cache = KVCache(
            [spec for _, spec in self._layers],
            self.groups,
            self.backends[0],
            num_pages=number,
            page_size=self.page_size,
            dtype=self.model.dtype,
            device=self.device,
        )
        for index, (module, spec) in enumerate(self._layers):
            paged = PagedLayer(spec, self.backends[self._group_of[index]], self.cache.layer(index))
            module.paged_attention = paged  # type: ignore[assignment]

    @torch.inference_mode()
    def _try_step(self, rows: int, *, context: int) -> None:
        """Run what takes the most memory in a step of so many rows, before there are pages."""
        self._take_pages(1)
        steps = trial_steps(
            rows,
            requests=len(self._last_tokens) - 1,
            context=context,
            page_size=self.page_size,
            groups=len(self.groups),
            vocab_size=_vocab_size(self.model),
        )
        for batch, wishes in steps:
            self.sample(self._compute(batch), batch, wishes, TOP).wait()


def _model_logits(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | int
) -> torch.Tensor:
    """Of the ``wanted`` rows of a packed step of T, or of all if it is 0: [R, V], in the model's dtype."""
    logits: torch.Tensor = model(
        input_ids=ids[None],  # [1, T]
        position_ids=positions[None],  # [1, T]
        use_cache=False,
        logits_to_keep=wanted,
    ).logits
    return logits[0]


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)
