"""From token ids back to text: the text of an answer at once or as it comes, the text of one token, and stop strings.

The text of an answer is the tokenizer's own one-shot decoding of all its ids, without clean-up of spaces. The text of
one token comes from its vocabulary entry, so that the bytes of a character split over several tokens are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchjobs.types import TokenText, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from batchjobs.types import SamplingParams


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes: printable bytes stand for themselves, the rest from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_LONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNREADABLE = "\ufffd"


class Vocabulary:
    """What each token id stands for. Without a tokenizer (a model folder that has none) every text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, TokenText] = {}
        self._bytes: dict[int, bytes] = {}
        self._added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        named = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self._special = named | {number for number, token in self._added.items() if token.special}
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

    def is_left_out(self, token: int) -> bool:
        """Whether :meth:`decode` passes over it: a special token, or an id beyond the vocabulary."""
        if self._tokenizer is None or token in self._special:
            return True
        return token not in self._added and not isinstance(self._tokenizer.convert_ids_to_tokens(token), str)

    def is_lone_byte(self, token: int) -> bool:
        """Whether the token is one byte, spelled ``<0x0A>``. What a run of these reads as depends on the whole run."""
        if self._tokenizer is None or self._style == "byte-level":
            return False
        return _LONE_BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))) is not None

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

    def texts(self, tokens: Sequence[int]) -> tuple[TokenText, ...]:
        """Of many tokens, most of which were met before."""
        try:
            return tuple(map(self._texts.__getitem__, tokens))
        except KeyError:
            return tuple(map(self.text, tokens))

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
        if token in self._added and (self._added[token].special or self._style != "byte-level"):
            return str(self._added[token].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # an id beyond the vocabulary: models pad their output layer
            return b""
        if self._style == "byte-level":
            if all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            return piece.encode()
        if self._style == "sentencepiece":
            if _LONE_BYTE.fullmatch(piece):
                return bytes.fromhex(piece[3:5])
            return piece.replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()


def _style(tokenizer: PreTrainedTokenizerBase) -> str:
    """How the vocabulary spells bytes and spaces, from the decoder of the fast tokenizer."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "other"
    # The whole tokenizer as JSON has it too, but of a large vocabulary that takes a third of a second.
    decoder = (
        "" if backend.decoder is None else json.dumps(json.loads(backend.decoder.__getstate__()), ensure_ascii=False)
    )
    if "ByteLevel" in decoder:
        return "byte-level"
    if "ByteFallback" in decoder or "Metaspace" in decoder or "▁" in decoder:
        return "sentencepiece"
    return "other"


class StopMatcher:
    """Finds stop strings in the bytes of the tokens as they come, also where a match begins or ends within a token."""

    def __init__(self, stop: Sequence[str], vocabulary: Vocabulary, *, from_token: int) -> None:
        self._stops = [s.encode() for s in stop]
        self._vocabulary = vocabulary
        self._from_token = from_token  # no match ends before this many tokens
        self._seen = bytearray()
        self._cut_at: int | None = None

    def feed(self, token: int, generated: int) -> bool:
        """Take the next token; True when a stop string is complete."""
        if self._vocabulary.is_left_out(token):
            return False
        before = len(self._seen)
        self._seen += self._vocabulary.bytes_of(token)
        if generated < self._from_token:
            return False
        # A match ends within the new token: one that ended earlier was too early to count.
        found = [self._seen.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        self._cut_at = min((at for at in found if at >= 0), default=None)
        return self._cut_at is not None

    def cut(self, text: str) -> str:
        """The text right before the match. A decoder may have dropped the blank before the first word."""
        if self._cut_at is None:
            return text
        matched = self._seen[self._cut_at :]
        for ending in (matched.decode(errors="replace"), _UNREADABLE * len(matched)):
            if text.endswith(ending):
                return text.removesuffix(ending)
        kept = self._seen[: self._cut_at].decode(errors="replace")
        return kept if text.startswith(kept) else kept.removeprefix(" ")

    def beginning(self) -> bytes:
        """The longest end of what was seen that a stop string begins with; the whole of it is not one yet."""
        longest = max(len(stop) for stop in self._stops) - 1
        ends = (bytes(self._seen[-n:]) for n in range(min(longest, len(self._seen)), 0, -1))
        return next((end for end in ends if any(s.startswith(end) and s != end for s in self._stops)), b"")


class TextStream:
    """The text of one answer piece by piece, while its tokens come. The pieces together are exactly its text.

    A piece holds what no later token can change: no part of a character, nothing of a run of lone bytes that may go on,
    and nothing that may turn out to be the beginning of a stop string. What was held back comes with :meth:`flush`.
    """

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams) -> None:
        self._vocabulary = vocabulary
        stops = [s for s in sampling.stop if vocabulary.special_id(s) is None]
        self._matcher = StopMatcher(stops, vocabulary, from_token=sampling.min_tokens) if stops else None
        # The newest ids are decoded together with the ones right before them, because neighbours decide on blanks.
        self._ids: list[int] = []
        self._known = 0  # leading ids of these whose text is known
        self._known_length = 0  # characters of it
        self._held = ""
        self._fed = self._given = 0  # tokens, characters
        self._in_bytes = self._is_matched = False

    def feed(self, token: int) -> str:
        """Take the next token; the text that is certain now, often empty."""
        self._fed += 1
        self._ids.append(token)
        if self._matcher is not None:
            self._is_matched |= self._matcher.feed(token, self._fed)
        if not self._vocabulary.is_left_out(token):
            self._in_bytes = self._vocabulary.is_lone_byte(token)
        if self._in_bytes or self._is_matched:
            return ""
        text = self._vocabulary.decode(self._ids)
        if len(text) <= self._known_length or text.endswith(_UNREADABLE):
            return ""
        self._held += text[self._known_length :]
        del self._ids[: self._known]
        self._known, self._known_length = len(self._ids), len(self._vocabulary.decode(self._ids))
        return self._give()

    def flush(self, text: str) -> str:
        """The rest, when the answer has ended and ``text`` is the whole of it."""
        rest, self._given, self._held = text[self._given :], len(text), ""
        return rest

    def _give(self) -> str:
        sure = len(self._held)
        if self._matcher is not None and (beginning := self._matcher.beginning()):
            shown = beginning.decode(errors="replace")
            # Where the text does not show these bytes as they are, each of them is one character at most.
            sure -= len(shown) if self._held.endswith(shown) else len(beginning)
        given, self._held = self._held[: max(0, sure)], self._held[max(0, sure) :]
        self._given += len(given)
        return given
