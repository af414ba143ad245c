"""What an answer is held against: ``generate`` of transformers for one prompt alone, and a full recompute."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ops.gpu.shapes import NEED_EAGER


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float32, as transformers runs them: with SDPA, or eagerly where scores are capped or have
    sinks."""
    reference = copy.deepcopy(model).float()
    reference.set_attn_implementation("eager" if needs_eager(model.config) else "sdpa")
    return reference


def needs_eager(config: PreTrainedConfig) -> bool:
    return config.model_type in NEED_EAGER


@torch.inference_mode()
def solo_greedy(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
    )
    return list(made[0, len(prompt) :].tolist())


@dataclass(frozen=True, slots=True)
class Apart:
    """How far answers are from the recompute: errors of their logprobs, and how much better the best token was than the
    one that was chosen (``regret``). In natural logarithms."""

    mean_error: float
    worst_error: float
    worst_regret: float

    def within(self, other: Apart) -> bool:
        """No further away than rounding allows, which ``other`` shows: other kernels round otherwise, not worse."""
        return (
            self.mean_error <= 1.5 * other.mean_error + 0.005
            and self.worst_error <= 3 * other.worst_error + 0.05
            and self.worst_regret <= 3 * max(other.worst_regret, other.worst_error) + 0.05
        )


@torch.inference_mode()
def apart(
    reference: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> Apart:
    """Greedy answers and their logprobs beside one full forward over each prompt and answer. NaN counts as infinite."""
    errors, regrets = [], []
    for prompt, answer, told in zip(prompts, answers, logprobs, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=reference.device)
        logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        known = torch.log_softmax(logits, dim=-1)
        own = known.gather(1, ids[0, len(prompt) :, None])[:, 0]
        errors.append((own.cpu() - torch.tensor(told)).abs().nan_to_num(torch.inf))
        regrets.append((known.amax(1) - own).nan_to_num(torch.inf).cpu())
    each = torch.cat(errors)
    return Apart(float(each.mean()), float(each.max()), float(torch.cat(regrets).max()))
