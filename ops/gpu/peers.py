"""transformers' own two ways of answering many prompts, on a model that is in memory already."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import ContinuousBatchingConfig, PreTrainedModel

from workers.bench.baselines import StaticBatches, TransformersContinuousBatching, peer_page_size
from workers.workloads import Work


class ContinuousBatching(TransformersContinuousBatching):
    """As it sets itself up, but for the number of sequences, the rows of a step, and the cache, which holds what the
    sequences can ever fill: by itself it takes most of the memory, and another engine lives on the same device. Its
    manager, with its cache and its graphs, is made once and kept, as ours is."""

    persistent = True

    def __init__(self, model: PreTrainedModel, sequences: int, longest: int, max_batch_tokens: int) -> None:
        """``longest`` prompt and answer together, in tokens; ``max_batch_tokens`` of a step."""
        self.model, self.max_requests = model, sequences
        self._longest, self._max_batch_tokens = longest, max_batch_tokens

    def settings(self, work: Sequence[Work]) -> ContinuousBatchingConfig:
        pages = self.max_requests * (1 + -(-self._longest // peer_page_size()))
        return ContinuousBatchingConfig(
            max_requests_per_batch=self.max_requests, num_blocks=pages, max_batch_tokens=self._max_batch_tokens
        )

    def close(self) -> None:
        self.model.destroy_cached_continuous_batching_manager()


class Static(StaticBatches):
    def __init__(self, model: PreTrainedModel, sequences: int) -> None:
        self.model, self.batch_size = model, sequences
        self.name = f"static batches of {sequences}"
