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
        page_size: Tokens in one page of the KV cache.
        num_blocks: Pages in the KV cache; None takes a share of the free memory.
        allow_block_sharing: Reuse the pages of prompts that begin alike.
        max_batch_tokens: Rows of one packed step at most: longer prompts are prefilled in chunks.
        max_requests_per_batch: Sequences that run at the same time at most.
        scheduler_type: ``fifo``, ``prefix`` (prompts that begin alike together) or ``longest_first``.
        max_model_len: Tokens of prompt and answer together at most; None takes the model's own limit.
        threads: CPU threads for the forward pass; None leaves torch's choice.

    Raises:
        UsageError: A value is out of range; the message names it.
    """

    device: str = "auto"
    dtype: str = "auto"
    page_size: int = 16
    num_blocks: int | None = None
    allow_block_sharing: bool = True
    max_batch_tokens: int = 2048
    max_requests_per_batch: int = 64
    scheduler_type: str = "fifo"
    max_model_len: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.scheduler_type not in POLICIES:
            raise UsageError(f"scheduler_type must be one of {', '.join(POLICIES)}, not {self.scheduler_type!r}")
        for name in ("page_size", "max_batch_tokens", "max_requests_per_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise UsageError(f"num_blocks must be 2 or more (one page is kept empty), not {self.num_blocks}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(f"max_model_len must be 2 or more, not {self.max_model_len}")
