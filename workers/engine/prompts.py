"""From a prompt or a chat to token ids, exactly once each special token, and with errors that concern one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workers.engine.controls import ControlTokens
from workers.engine.requests import PromptError
from workers.engine.templates import RENDERER, TemplateFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Tokenises prompts for one model; safe to call from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._controls = None if tokenizer is None else ControlTokens(tokenizer)

    def prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """A text as the tokenizer encodes it (one BOS where the model has one), or token ids as they are.

        Raises:
            PromptError: The prompt is empty, or an id is outside the vocabulary.
        """
        if not isinstance(prompt, str):
            ids = tuple(prompt)
            if bad := [i for i in ids if not 0 <= i < self._vocab_size]:
                raise PromptError(
                    "invalid_prompt", f"token id {bad[0]} is outside the vocabulary (0 to {self._vocab_size - 1})"
                )
        else:
            ids = self._encode(prompt, special=not self._starts_with_bos(prompt))
        if not ids:
            raise PromptError("empty_prompt", "the prompt is empty: it gives no token to continue from")
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = {}) -> tuple[int, ...]:
        """A conversation in the model's own chat template, ready for the assistant's answer.

        Raises:
            PromptError: The model has no chat template, the template refuses this conversation, or it is too expensive.
        """
        tokenizer = self._require_tokenizer()
        if tokenizer.chat_template is None:
            raise PromptError(
                "chat_template_error", "the model has no chat template; send a prompt instead of messages"
            )
        if not messages:
            raise PromptError("chat_template_error", "messages is an empty conversation: there is nothing to answer")
        assert self._controls is not None
        hidden = self._controls.hidden()
        # As transformers does it: a field that is null is one that is not there.
        given = [{name: value for name, value in hidden.hide(m).items() if value is not None} for m in messages]
        try:
            template = tokenizer.get_chat_template()
            text = RENDERER.render(template, given, {**tokenizer.special_tokens_map, **hidden.hide(template_kwargs)})
        except (TemplateFailed, ValueError) as error:
            raise PromptError("chat_template_error", str(error)) from error
        if hidden.found:
            return hidden.encode(text)
        return self._encode(text, special=False)  # the template has written every special token itself

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._require_tokenizer()(text, add_special_tokens=special)["input_ids"])

    def _starts_with_bos(self, text: str) -> bool:
        bos = self._require_tokenizer().bos_token
        return isinstance(bos, str) and text.startswith(bos)

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise PromptError("invalid_prompt", "the model folder has no tokenizer; send the prompt as token ids")
        return self._tokenizer
