"""What a model's own attention masks let a row see.

transformers' models describe a mask by a function of a row's and a column's position. Asked about a row far behind any
window, this function says for every layer what no option of the attention call says for sure: whether the layer sees
everything before it, a window, or something that packed rows cannot give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask

LISTENING = "batchjobs_probe"
_LONGEST, _BEYOND = 1 << 20, 8  # positions asked about, and how many times the model's context

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def window_of(mask_function: MaskFunction, length: int = _LONGEST, device: torch.device | str = "cpu") -> int | None:
    """Positions that a row sees, itself included; None when it sees all before it, ``length`` positions at least.

    Raises:
        ValueError: The mask is not causal, or neither full nor a window that moves with the row.
    """
    columns = torch.arange(length + 2, device=device)
    at_last, at_previous = (_seen(mask_function, row, columns) for row in (length, length - 1))
    if (at_last, at_previous) == (length + 1, length):
        return None
    if at_last != at_previous:
        raise ValueError("its masks are neither full nor windows that move with the row")
    return at_last


def _seen(mask_function: MaskFunction, row: int, columns: torch.Tensor) -> int:
    none = columns[0]
    seen = mask_function(none, none, columns[row], columns).expand(len(columns))
    count = int(seen.sum())
    if bool(seen[row + 1 :].any()):
        raise ValueError("its masks let a row see what comes after it")
    if not count or not bool(seen[row - count + 1 : row + 1].all()):
        raise ValueError("its masks let a row see what is not right before it")
    return count


def window_behind(mask: torch.Tensor | None) -> int | None:
    """The window of a mask that was made while ``LISTENING``.

    Raises:
        ValueError: The model made or changed this mask by itself, or uses none, or one that packed rows cannot have.
    """
    look: Callable[[], int | None] | None = getattr(mask, "batchjobs_window", None)
    if look is None:
        raise ValueError("its attention uses no mask, or one of its own, which packed rows do not have")
    return look()


def _listening_mask(
    *, mask_function: MaskFunction, config: Any, device: torch.device | str = "cpu", **options: Any
) -> torch.Tensor | None:
    mask: torch.Tensor | None = eager_mask(mask_function=mask_function, config=config, device=device, **options)
    if mask is not None:
        context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _LONGEST
        length = min(_BEYOND * context, _LONGEST)
        # Asked once for all layers that share the mask, and only if one of them uses it.
        mask.batchjobs_window = cache(lambda: window_of(mask_function, length, device))  # type: ignore[attr-defined]
    return mask


AttentionMaskInterface.register(LISTENING, _listening_mask)
