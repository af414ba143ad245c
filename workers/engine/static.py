"""Static batching, for comparison: prompts are padded, and nobody leaves before the longest answer is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def generate_in_static_batches(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int], *, batch_size: int
) -> list[list[int]]:
    """Greedy answers of exactly ``limits`` tokens, end-of-sequence tokens ignored, by ``generate`` of transformers.

    The batch barrier: each batch makes as many tokens for everybody as its longest answer needs.
    """
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch, wanted = prompts[start : start + batch_size], limits[start : start + batch_size]
        width = max(len(prompt) for prompt in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])  # [B, width], padded left
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        longest = max(wanted)
        made = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )
        answers += [row[width : width + count].tolist() for row, count in zip(made, wanted, strict=True)]
    return answers
