"""What a prompt gives alone: transformers' own forward over the whole text, one prompt at a time, no cache, no engine.

``Solo`` answers a request token by token (``answer``), and gives what is needed to judge an answer that exists: the
logits at each of its positions by one forward over all of it, and whether and why it ends at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from batchjobs.types import FinishReason, SamplingParams
from tests.fuzz.choosing import Row, choose, processed
from workers.engine.structured import GrammarCompiler, GrammarMatcher

KEPT_FORWARDS = 400


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes of each token of a model with one token a byte; special tokens show in no text."""

    of_token: dict[int, bytes]
    special: dict[str, int]

    def bytes_of(self, token: int) -> bytes:
        return self.of_token[token]

    def bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.of_token[t] for t in tokens if t not in self.special.values())


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ends with its last token, and where its text is cut (in bytes; None: not at all)."""

    reason: FinishReason
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    reason: FinishReason
    text: str


class Solo:
    """Args:
    model: In float32, with transformers' own attention.
    spelling: None for a model without a tokenizer, whose texts are empty.
    poison: A token whose embedding is NaN: from it on every logit is.
    grammars: What the engine holds structured answers to; here it only says which tokens are allowed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        spelling: Spelling | None = None,
        poison: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.model = model
        self.spelling = spelling
        self.poison = poison
        eos = model.generation_config.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self._grammars = grammars
        self._forwards: dict[tuple[int, ...], Row] = {}

    def logits(self, ids: Sequence[int]) -> Row:
        """[len(ids), V]: row i is the distribution of the token after ``ids[i]``."""
        key = tuple(ids)
        known = self._forwards.get(key)
        if known is None:
            if len(self._forwards) >= KEPT_FORWARDS:
                self._forwards.clear()
            known = self._forwards[key] = self._forward(key)
        return known

    @torch.inference_mode()
    def _forward(self, ids: tuple[int, ...]) -> Row:
        rows = np.full((len(ids), self.vocab_size), np.nan)
        finite = ids.index(self.poison) if self.poison in ids else len(ids)
        if finite:
            output = self.model(input_ids=torch.tensor([ids[:finite]]), use_cache=False)
            rows[:finite] = output.logits[0].double().numpy()
        return rows

    def matcher(self, sampling: SamplingParams) -> GrammarMatcher | None:
        if sampling.response_format is None:
            return None
        assert self._grammars is not None
        return self._grammars.matcher(sampling.response_format)

    def row(
        self,
        logits: Row,
        sampling: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int],
        grammar: GrammarMatcher | None,
    ) -> Row:
        """``logits`` [V] after penalties, bias, bans and grammar, for the token after ``answer``."""
        banned = self.stop_ids(sampling) if len(answer) < sampling.min_tokens else ()
        allowed = None if grammar is None else self._allowed(grammar)
        return processed(logits, sampling, prompt, answer, banned, allowed)

    def ending(
        self, answer: Sequence[int], sampling: SamplingParams, limit: int, grammar: GrammarMatcher | None = None
    ) -> Ending | None:
        """Why ``answer`` ends with its last token, which ``grammar`` has accepted; None when it goes on."""
        count = len(answer)
        if count >= sampling.min_tokens:
            if answer[-1] in self.stop_ids(sampling):
                return Ending(FinishReason.STOP)
            cut = self._match(answer, sampling)
            if cut is not None:
                return Ending(FinishReason.STOP, cut)
        if grammar is not None and grammar.is_complete:
            return Ending(FinishReason.STOP)
        return Ending(FinishReason.LENGTH) if count >= limit else None

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer: the model's own, the request's, and special tokens named as stop strings."""
        special = self.spelling.special if self.spelling else {}
        named = frozenset(special[s] for s in sampling.stop if s in special)
        return named.union(sampling.stop_token_ids, () if sampling.ignore_eos else self.eos_ids)

    def text(self, answer: Sequence[int], ending: Ending | None) -> str:
        if self.spelling is None:
            return ""
        return self.spelling.bytes(answer)[: ending.cut if ending else None].decode(errors="replace")

    def answer(self, prompt: Sequence[int], sampling: SamplingParams, limit: int, choice: int = 0) -> Answer:
        """Token by token, each by a full forward. ``limit``: the most tokens that the context leaves room for."""
        tokens: list[int] = []
        grammar, ending = self.matcher(sampling), None
        while ending is None:
            row = self.row(self.logits([*prompt, *tokens])[-1], sampling, prompt, tokens, grammar)
            tokens.append(choose(row, sampling, choice, len(tokens)))
            if grammar is not None and tokens[-1] not in self.stop_ids(sampling):
                grammar.accept(tokens[-1])
            ending = self.ending(tokens, sampling, limit, grammar)
        return Answer(tuple(tokens), ending.reason, self.text(tokens, ending))

    def _match(self, answer: Sequence[int], sampling: SamplingParams) -> int | None:
        """Where the earliest stop string begins that ends within the last token; in bytes of the text."""
        if self.spelling is None:
            return None
        before, whole = len(self.spelling.bytes(answer[:-1])), self.spelling.bytes(answer)
        stops = [s.encode() for s in sampling.stop if s not in self.spelling.special]
        ends = ((s, end) for s in stops for end in range(before + 1, len(whole) + 1))
        return min((end - len(s) for s, end in ends if whole[:end].endswith(s)), default=None)

    def _allowed(self, grammar: GrammarMatcher) -> NDArray[np.bool_]:
        mask = np.zeros(-(-self.vocab_size // 32), np.int32)
        grammar.fill(mask)
        words = mask.view(np.uint32)
        return np.array([bool(words[t // 32] >> (t % 32) & 1) for t in range(self.vocab_size)])


class SplicedSolo(Solo):
    """An answer that several models had a part in: each judges the tokens that are said to be its own.

    Args:
        parts: From which token of the answer on, and whose; the prompt's rows are the first one's.
    """

    def __init__(self, parts: Sequence[tuple[int, Solo]], prompt_len: int) -> None:
        self.__dict__.update(parts[0][1].__dict__)  # rules, vocabulary and spelling are the same for all
        self._parts, self._prompt_len = parts, prompt_len

    def logits(self, ids: Sequence[int]) -> Row:
        rows = self._parts[0][1].logits(ids)
        for first, solo in self._parts[1:]:
            start = self._prompt_len - 1 + first
            rows = np.concatenate((rows[:start], solo.logits(ids)[start:]))
        return rows
