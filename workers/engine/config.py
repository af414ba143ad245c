"""Settings of the engine. None means: worked out from the device and the model."""

from __future__ import annotations

from dataclasses import dataclass

from batchjobs.errors import UsageError
from workers.engine.waiting import POLICIES

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine uses its device. Names follow transformers' continuous batching where they mean the same.

    Args:
        device: ``auto`` (cuda, then mps, then cpu), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        dtype: ``auto`` (float32 on a CPU, the checkpoint's own elsewhere), ``float32``, ``bfloat16`` or ``float16``.
        page_size: Tokens in one page of the KV cache; None takes what suits the attention kernel (16 on a CPU).
        num_blocks: Pages in the KV cache; None takes a share of the free memory.
        max_memory_percent: That share, over 0 to 1; on a GPU of what is free beside the largest step. None takes 0.25
            on a CPU and 0.9 on a GPU.
        safety_margin: Share of the pages that new sequences leave free for those that run, 0 to 1.
        allow_block_sharing: Reuse the pages of prompts that begin alike.
        max_batch_tokens: Rows of one packed step at most: longer prompts are prefilled in chunks. None takes 2,048 on a
            CPU, and on a GPU up to 8,192, as many as its memory allows.
        max_requests_per_batch: Sequences that run at the same time at most.
        scheduler_type: ``fifo``, ``prefix`` (prompts that begin alike together) or ``longest_first``.
        use_async_batching: Plan a step while the one before it runs; None does so on a GPU.
        use_cuda_graph: Record the decode steps once and have the GPU repeat them; None does so where the attention can.
        native_forward: Run known decoders in C++ on a CPU; None does so where it is faster than transformers' modules.
        cpu_offload_space: GiB of CPU memory for the pages of sequences that have to give way; 0 computes them again.
        cpu_offload_space_safety_threshold: The most of the machine's memory that this may be, 0 to 1.
        max_queue_size: Requests that an EngineLoop lets wait at most; 0 sets no limit.
        seed: What the seeds of requests without one are drawn from; None draws them at random.
        max_model_len: Tokens of prompt and answer together at most; None takes the model's own limit.
        tensor_parallel_size: Devices that share the model, each with a part of every layer; 1 does not split it.
        threads: CPU threads for the forward pass; None leaves torch's choice, within a container's processor quota.

    Raises:
        UsageError: A value is out of range; the message names it.
    """

    device: str = "auto"
    dtype: str = "auto"
    page_size: int | None = None
    num_blocks: int | None = None
    max_memory_percent: float | None = None
    safety_margin: float = 0.0
    allow_block_sharing: bool = True
    max_batch_tokens: int | None = None
    max_requests_per_batch: int = 64
    scheduler_type: str = "fifo"
    use_async_batching: bool | None = None
    use_cuda_graph: bool | None = None
    native_forward: bool | None = None
    cpu_offload_space: float = 2.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    seed: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.scheduler_type not in POLICIES:
            raise UsageError(f"scheduler_type must be one of {', '.join(POLICIES)}, not {self.scheduler_type!r}")
        for name in ("page_size", "max_batch_tokens", "max_requests_per_batch", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise UsageError(f"num_blocks must be 2 or more (one page is kept empty), not {self.num_blocks}")
        for name, least, most in (
            ("max_memory_percent", 0.0, 1.0),
            ("safety_margin", 0.0, 1.0),
            ("cpu_offload_space", 0.0, float("inf")),
            ("cpu_offload_space_safety_threshold", 0.0, 1.0),
            ("max_queue_size", 0, float("inf")),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                wanted = f"from {least:g} to {most:g}" if most < float("inf") else f"{least:g} or more"
                raise UsageError(f"{name} must be {wanted}, not {value}")
        if self.max_memory_percent == 0:
            raise UsageError("max_memory_percent must be over 0")
        if self.tensor_parallel_size > 1:
            for name in ("native_forward", "use_cuda_graph"):
                if getattr(self, name):
                    raise UsageError(f"{name} is for a model on one device: leave it out with tensor_parallel_size")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(f"max_model_len must be 2 or more, not {self.max_model_len}")
