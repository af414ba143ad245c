"""Encodes many requests at once: what the engine's encoder does one by one, with one call of the tokenizer for all.

A tokenizer reads a list of texts faster than each of them, and gives the same ids. Everything else, templates, control
tokens and errors, is the encoder's own doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchjobs.text import shortened
from batchjobs.types import Endpoint, Request
from workers.engine.prompts import PromptEncoder
from workers.engine.requests import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LATER = (-1,)
"""Stands for ids that are still to come."""


class BatchEncoder(PromptEncoder):
    """For one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size)
        self._texts: dict[bool, list[str]] = {True: [], False: []}  # by whether special tokens are added
        self._many = tokenizer is not None and tokenizer.is_fast

    def encode(self, requests: Sequence[Request]) -> list[Sequence[int] | PromptError]:
        """The prompt of each request as token ids, or why a worker would refuse it."""
        self._texts = {True: [], False: []}
        made: list[Sequence[int] | PromptError] = []
        waiting: dict[bool, list[int]] = {True: [], False: []}
        for place, request in enumerate(requests):
            before = len(self._texts[True])
            encoded = self._one(request)
            made.append(encoded)
            if encoded is _LATER:
                waiting[len(self._texts[True]) > before].append(place)
        for special, places in waiting.items():
            for place, ids in zip(places, self._all(self._texts[special], special), strict=True):
                made[place] = ids or _EMPTY
        return made

    def _one(self, request: Request) -> Sequence[int] | PromptError:
        body = request.body
        try:
            if request.endpoint == Endpoint.CHAT:
                return self.chat(body["messages"], body.get("chat_template_kwargs") or {})
            return self.prompt(body["prompt"])
        except PromptError as problem:
            return problem
        except Exception as error:  # noqa: BLE001  as in a worker: it concerns this request alone
            return PromptError("tokenization_failed", shortened(f"{type(error).__name__}: {error}", 300))

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if not self._many:
            return super()._encode(text, special=special)
        self._texts[special].append(text)
        return _LATER

    def _all(self, texts: Sequence[str], special: bool) -> Sequence[Sequence[int]]:
        if not texts:
            return ()
        read = self._require_tokenizer()
        encoded = read(
            list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )
        ids: Sequence[Sequence[int]] = encoded["input_ids"]
        return ids


_EMPTY = PromptError("empty_prompt", "the prompt is empty: it gives no token to continue from")
