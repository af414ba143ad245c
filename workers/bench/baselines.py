"""What the engine is measured against in the same process: transformers' own two ways of answering many prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from batchjobs.errors import BatchjobsError
from workers.bench.system import Run, System
from workers.engine.models import TORCH_DTYPES, locate, quiet_transformers
from workers.engine.static import generate_in_static_batches
from workers.workloads import Work

PEER_SEQUENCES = 16  # at which both of them are fastest on a CPU; elsewhere they get as many as the engine


class TransformersContinuousBatching:
    """transformers' own continuous batching, at the number of sequences at which it is fastest on a CPU."""

    name = "transformers continuous batching"
    persistent = False  # whether the next turn goes on with the manager, its cache and its graphs
    limit_seconds = math.inf  # of a turn

    def __init__(self, model: str, dtype: str, max_requests: int, device: str = "cpu") -> None:
        self.model = _load(model, dtype, device)
        self.max_requests = peer_sequences(max_requests, device)

    def settings(self, work: Sequence[Work]) -> ContinuousBatchingConfig:
        """With as many pages as these requests can ever fill: by itself it takes, and fills, most of the memory."""
        longest = max(len(item.prompt_ids) + item.output_tokens for item in work)
        pages = self.max_requests * -(-longest // peer_page_size())
        return ContinuousBatchingConfig(max_requests_per_batch=self.max_requests, num_blocks=pages)

    def run(self, work: Sequence[Work]) -> Run:
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=8)
        settings = self.settings(work)
        begin = time.perf_counter()
        with (
            quiet_transformers(),
            torch.no_grad(),
            self.model.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=settings,
                persistent_manager=self.persistent,
            ) as manager,
        ):
            ids = [f"{begin}-{index}" for index in range(len(work))]  # of this turn: a manager may have had others
            for name, item in zip(ids, work, strict=True):
                manager.add_request(
                    list(item.prompt_ids), request_id=name, max_new_tokens=item.output_tokens, eos_token_id=-1
                )
            made: dict[str, int] = {}
            while len(made) < len(work):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished() and result.request_id in ids:
                    made[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise BatchjobsError(f"{self.name} stopped after {len(made)} of {len(work)} requests")
                if (seconds := time.perf_counter() - begin) > self.limit_seconds:
                    for name in ids:  # else it would be waited for
                        manager.cancel_request(name)
                    raise BatchjobsError(f"{self.name} has answered {len(made)} of {len(work)} in {seconds:.0f} s")
            seconds = time.perf_counter() - begin
        return Run(seconds, [made[name] for name in ids])


class StaticBatches:
    """transformers' ``generate`` over padded batches, each of which waits for its longest answer."""

    def __init__(self, model: str, dtype: str, max_requests: int, device: str = "cpu") -> None:
        self.model = _load(model, dtype, device)
        self.batch_size = peer_sequences(max_requests, device)
        self.name = f"static batches of {self.batch_size}"

    def run(self, work: Sequence[Work]) -> Run:
        begin = time.perf_counter()
        with quiet_transformers():
            answers = generate_in_static_batches(
                self.model, [w.prompt_ids for w in work], [w.output_tokens for w in work], batch_size=self.batch_size
            )
        return Run(time.perf_counter() - begin, [len(answer) for answer in answers])


BASELINES: dict[str, Callable[[str, str, int, str], System]] = {
    "transformers": TransformersContinuousBatching,
    "static": StaticBatches,
}
"""Made of a model, the dtype and the number of sequences of the engine beside them, and its device."""


def peer_sequences(max_requests: int, device: str) -> int:
    """How many sequences a baseline runs at a time beside an engine that runs ``max_requests``."""
    return min(PEER_SEQUENCES, max_requests) if torch.device(device).type == "cpu" else max_requests


def peer_page_size() -> int:
    """Tokens of a page of transformers' continuous batching: its setting had another name before transformers 5.18."""
    defaults = ContinuousBatchingConfig()
    return int(getattr(defaults, "page_size", None) or defaults.block_size)


def _load(model: str, dtype: str, device: str) -> PreTrainedModel:
    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(**locate(model), dtype=TORCH_DTYPES[dtype])
        return loaded.to(device).eval()
