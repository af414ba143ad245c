"""Answers of a real model that differ from the undisturbed run's by rounding alone.

Packed rows of different steps differ by a few millionths. Where two tokens are nearly as good, or a draw falls next to
a border, either is right, and which one comes is a matter of what else was in the step: about one answer in a thousand.
Such an answer is held to the solo reference of the fuzz, token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchjobs.types import SamplingParams


class Rounding:
    """The judge of one model's answers."""

    def __init__(self, model: Path) -> None:
        self._folder = model

    def allows(self, line: Mapping[str, Any], choice: int, tokens: Sequence[int]) -> bool:
        """Whether each of the tokens is the right one behind those before it, or as good within rounding."""
        from tests.fuzz.choosing import within_rounding

        sampling = SamplingParams.from_fields(line)
        prompt = self._encoder.prompt(line["prompt"])
        logits = self._solo.logits([*prompt, *tokens])[len(prompt) - 1 :]
        return len(tokens) <= sampling.max_tokens and all(
            token in within_rounding(row, sampling, choice, position)
            for position, (token, row) in enumerate(zip(tokens, logits, strict=False))
        )

    @cached_property
    def _solo(self) -> Any:
        from tests.fuzz.reference import Solo
        from tests.support.models import load_reference

        return Solo(load_reference(self._folder))

    @cached_property
    def _encoder(self) -> Any:
        from transformers import AutoTokenizer

        from workers.engine.prompts import PromptEncoder

        return PromptEncoder(AutoTokenizer.from_pretrained(self._folder), self._solo.vocab_size)
