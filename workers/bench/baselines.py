"""What the engine is measured against in the same process: transformers' own two ways of answering many prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from batchjobs.errors import BatchjobsError
from workers.bench.system import Run, System
from workers.engine.models import TORCH_DTYPES, locate, quiet_transformers
from workers.engine.static import generate_in_static_batches
from workers.workloads import Work

PEER_SEQUENCES = 16  # at which both of them are fastest on a CPU


class TransformersContinuousBatching:
    """transformers' own continuous batching, at the number of sequences at which it is fastest on a CPU."""

    name = "transformers continuous batching"

    def __init__(self, model: str, dtype: str, max_requests: int) -> None:
        self.model = _load(model, dtype)
        self.max_requests = min(PEER_SEQUENCES, max_requests)

    def settings(self, work: Sequence[Work]) -> ContinuousBatchingConfig:
        """With as many pages as these requests can ever fill: by itself it takes, and fills, most of the memory."""
        page_size = ContinuousBatchingConfig().page_size
        longest = max(len(item.prompt_ids) + item.output_tokens for item in work)
        pages = self.max_requests * -(-longest // page_size)
        return ContinuousBatchingConfig(max_requests_per_batch=self.max_requests, num_blocks=pages)

    def run(self, work: Sequence[Work]) -> Run:
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=8)
        settings = self.settings(work)
        begin = time.perf_counter()
        with (
            quiet_transformers(),
            torch.no_grad(),
            self.model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings
            ) as manager,
        ):
            for index, item in enumerate(work):
                manager.add_request(
                    list(item.prompt_ids), request_id=str(index), max_new_tokens=item.output_tokens, eos_token_id=-1
                )
            made: dict[str, int] = {}
            while len(made) < len(work):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise BatchjobsError(f"{self.name} stopped after {len(made)} of {len(work)} requests")
            seconds = time.perf_counter() - begin
        return Run(seconds, [made[str(index)] for index in range(len(work))])


class StaticBatches:
    """transformers' ``generate`` over padded batches, each of which waits for its longest answer."""

    name = f"static batches of {PEER_SEQUENCES}"

    def __init__(self, model: str, dtype: str, max_requests: int) -> None:
        self.model = _load(model, dtype)
        self.batch_size = min(PEER_SEQUENCES, max_requests)

    def run(self, work: Sequence[Work]) -> Run:
        begin = time.perf_counter()
        with quiet_transformers():
            answers = generate_in_static_batches(
                self.model, [w.prompt_ids for w in work], [w.output_tokens for w in work], batch_size=self.batch_size
            )
        return Run(time.perf_counter() - begin, [len(answer) for answer in answers])


BASELINES: dict[str, Callable[[str, str, int], System]] = {
    "transformers": TransformersContinuousBatching,
    "static": StaticBatches,
}


def _load(model: str, dtype: str) -> PreTrainedModel:
    with quiet_transformers():
        wanted = TORCH_DTYPES.get(dtype, torch.float32)
        return AutoModelForCausalLM.from_pretrained(**locate(model), dtype=wanted).eval()
