"""From token ids back to text: the text of an answer, the text or bytes of one token, and stop strings.

The text of an answer is the tokenizer's own one-shot decoding of all its ids, without clean-up of spaces. The text of
one token comes from its vocabulary entry, so that the bytes of a character split over several tokens are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchjobs.types import TokenText, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes: printable bytes stand for themselves, the rest from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Vocabulary:
    """What each token id stands for. Without a tokenizer (a model folder that has none) every text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, TokenText] = {}
        self._bytes: dict[int, bytes] = {}
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self._added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._style = _style(tokenizer) if tokenizer is not None else "none"

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer; special tokens are left out."""
        if self._tokenizer is None or not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def is_special(self, token: int) -> bool:
        return token in self._special

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so."""
        return next((i for i in self._special if self.bytes_of(i) == text.encode()), None)

    def text(self, token: int) -> TokenText:
        """The token's text, or its bytes where they are not valid UTF-8 by themselves."""
        known = self._texts.get(token)
        if known is None:
            raw = self.bytes_of(token)
            try:
                known = raw.decode()
            except UnicodeDecodeError:
                known = tuple(raw)
            self._texts[token] = known
        return known

    def named(self, best: Sequence[tuple[int, float]]) -> TopLogprobs:
        """The most likely tokens of a position with their texts."""
        return tuple((token, logprob, self.text(token)) for token, logprob in best)

    def bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # an id beyond the vocabulary: models pad their output layer
            return b""
        if self._style == "byte-level":
            if all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            return piece.encode()
        if self._style == "sentencepiece":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes.fromhex(piece[3:5])
            return piece.replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()


def _style(tokenizer: PreTrainedTokenizerBase) -> str:
    """How the vocabulary spells bytes and spaces, from the decoder of the fast tokenizer."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "other"
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    if "ByteLevel" in decoder:
        return "byte-level"
    if "ByteFallback" in decoder or "Metaspace" in decoder or "▁" in decoder:
        return "sentencepiece"
    return "other"


class StopMatcher:
    """Finds stop strings in the bytes of the tokens as they come, also where a match begins or ends within a token."""

    def __init__(self, stop: Sequence[str], vocabulary: Vocabulary, *, from_token: int) -> None:
        self._stops = [s.encode() for s in stop]
        self._longest = max(len(s) for s in self._stops)
        self._vocabulary = vocabulary
        self._from_token = from_token  # no match ends before this many tokens
        self._seen = bytearray()
        self._cut_at: int | None = None

    def feed(self, token: int, generated: int) -> bool:
        """Take the next token; True when a stop string is complete."""
        if self._vocabulary.is_special(token):
            return False
        raw = self._vocabulary.bytes_of(token)
        window = max(0, len(self._seen) - self._longest + 1)
        self._seen += raw
        if generated < self._from_token:
            return False
        found = [at for stop in self._stops if (at := self._seen.find(stop, window)) >= 0]
        self._cut_at = min(found, default=None)
        return self._cut_at is not None

    def cut(self, text: str) -> str:
        """The text right before the match. A decoder may have dropped the blank before the first word."""
        if self._cut_at is None:
            return text
        kept = self._seen[: self._cut_at].decode(errors="replace")
        return kept if text.startswith(kept) else kept.removeprefix(" ")
