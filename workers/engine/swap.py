"""Two models of the same shape exchange their weights, in place.

What it keeps true:
- An exchange is its own inverse: doing it again brings every bit back.
- Tied weights stay tied, since each tensor is exchanged once and stays the same object in its module.
- On a CPU two tensors exchange their memory and nothing is copied. Elsewhere the contents are copied through the host
  and addresses stay, because a captured graph will keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.engine.comparison import weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMOKE_IDS = (3, 5, 8, 13, 21, 34, 55, 89)
TOLERANCE = 1e-3  # of the largest logit, in float32; rounding alone stays far below
COARSE_TOLERANCE = 0.1  # in bfloat16 and float16


@torch.no_grad()
def exchange(running: PreTrainedModel, staged: PreTrainedModel) -> None:
    """``staged`` lies on the host. The caller has seen that names, shapes and dtypes are the same."""
    theirs = weights(staged)
    for name, mine in weights(running).items():
        (exchange_memory if mine.device.type == "cpu" else exchange_contents)(mine, theirs[name])


def exchange_memory(mine: torch.Tensor, its: torch.Tensor) -> None:
    mine.data, its.data = its.data, mine.data


def exchange_contents(mine: torch.Tensor, its: torch.Tensor) -> None:
    """Addresses stay."""
    old = mine.detach().to("cpu", copy=True)
    mine.copy_(its)
    its.copy_(old)


def smoke_ids(vocab_size: int) -> list[int]:
    """A prompt that any model can read."""
    return [token % vocab_size for token in SMOKE_IDS]


@torch.inference_mode()
def own_logits(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """What the model says to the smoke prompt by transformers' own attention: [tokens, V] float32, on the host."""
    ids = torch.tensor([smoke_ids(vocab_size)], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return logits


def smoke_fault(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with logits [tokens, V] of the engine; None when they are those of the model alone.

    ``wanted`` may have more tokens. A token that can never come has a logit of minus infinity in both.
    """
    wanted = wanted[: len(found)]
    never = wanted == -torch.inf
    if not torch.equal(found == -torch.inf, never) or not bool(found[~never].isfinite().all()):
        return "the smoke prompt gave logits that are not finite"
    exact = dtype in (torch.float32, torch.float64)
    most = (TOLERANCE if exact else COARSE_TOLERANCE) * float(wanted[~never].abs().max().clamp(min=1e-6))
    worst = float((found - wanted)[~never].abs().max())
    if worst > most:
        return f"the smoke prompt gave other logits than the new model by itself (they differ by {worst:.3g})"
    return None
