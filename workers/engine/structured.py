"""Answers that are held to a JSON schema. Not supported yet: a request that asks for one fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.engine.requests import PromptError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class GrammarMatcher:
    """Where one answer stands in its grammar."""

    is_complete = False

    def fill(self, mask: NDArray[np.int32]) -> None:
        raise NotImplementedError

    def accept(self, token: int) -> bool:
        raise NotImplementedError

    def fork(self) -> GrammarMatcher:
        raise NotImplementedError


class GrammarCompiler:
    """Compiles response formats for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: frozenset[int]) -> None: ...

    def matcher(self, response_format: Mapping[str, Any]) -> GrammarMatcher | None:
        if response_format.get("type") == "text":
            return None
        raise PromptError("response_format_not_supported", "response_format is not supported yet")
