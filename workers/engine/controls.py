"""Control tokens that a conversation's text spells out: they stay text, so that no message can forge a turn.

Before the template is rendered, each control token in a message gives way to a stand-in. So every control token in the
rendered text was written by the template. The text is then encoded piece by piece between them, as a tokenizer does
anyway, with the stand-ins turned back and read as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST, _LAST = "\ue000", "\uf8ff"  # the private use area, in which no text has a meaning


class ControlTokens:
    """Those of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.ids = {str(token.content): number for number, token in added if token.special and token.content}
        # The longest first: one control token may begin like another.
        spelled = sorted(map(re.escape, self.ids), key=len, reverse=True)
        self.any = re.compile("|".join(spelled)) if spelled else None

    def hidden(self) -> HiddenControls:
        """For one conversation."""
        return HiddenControls(self)


class HiddenControls:
    """The control tokens that one conversation spells out."""

    def __init__(self, controls: ControlTokens) -> None:
        self._tokenizer = controls.tokenizer
        self._ids = controls.ids
        self._any = controls.any
        self._stand_ins: dict[str, str] = {}  # control token -> stand-in

    @property
    def found(self) -> bool:
        """Whether any message spelled a control token."""
        return bool(self._stand_ins)

    def hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with stand-ins for the control tokens in its texts."""
        return {name: self._hidden(value) for name, value in message.items()}

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Token ids of the rendered template."""
        assert self._any is not None
        ids: list[int] = []
        at = 0
        for match in self._any.finditer(rendered):
            ids += self._plain(rendered[at : match.start()])
            ids.append(self._ids[match.group()])
            at = match.end()
        return (*ids, *self._plain(rendered[at:]))

    def _plain(self, piece: str) -> list[int]:
        for control, stand_in in self._stand_ins.items():
            piece = piece.replace(stand_in, control)
        if not piece:
            return []
        return list(self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._any.sub(self._stand_in, value) if self._any else value
        if isinstance(value, Mapping):
            return {name: self._hidden(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hidden(item) for item in value]
        return value

    def _stand_in(self, match: re.Match[str]) -> str:
        return self._stand_ins.setdefault(match.group(), f"{_FIRST}{len(self._stand_ins)}{_LAST}")
