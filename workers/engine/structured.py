"""Answers that are held to a JSON schema, token by token, by the grammar library llguidance.

A format is compiled once and copied for each answer. Whatever cannot be held is refused before a token is made: an
invalid schema, a keyword that the library does not implement, a schema that is too large. No answer is ever free text
where a format was asked for.

Blanks: between two parts of the JSON text there may be one space, or one line break and up to 16 spaces. That is how
models print JSON, compact or indented, and keeps small ones from running on in blanks for ever.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.engine.requests import PromptError

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

COMPILED_FORMATS = 256  # kept, the least recently used one goes first
MAX_SCHEMA_CHARACTERS = 100_000
WHITESPACE = r"(\n[ ]{0,16}|[ ])?"
_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False}


class GrammarMatcher:
    """Where one answer stands in its format."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit ``i % 32`` of word ``i // 32`` for token i, [ceil(V / 32)].

        A matcher that has met one of the library's limits allows no token, so that the answer fails.
        """
        mask.fill(0)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask.fill(0)

    def accept(self, token: int) -> bool:
        """Go on by a token; False if it may not come here."""
        return bool(self._matcher.consume_token(token))

    def fork(self) -> GrammarMatcher:
        """One that stands at the same place and goes on by itself."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles the response formats of one model's requests. Safe to call from any thread.

    Args:
        tokenizer: A fast tokenizer; without one no format can be held.
        vocab_size: Columns of the model's logits; those beyond the tokenizer's vocabulary are never allowed.
        eos_ids: Tokens that may end an answer where the format allows an end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, response_format: Mapping[str, Any]) -> GrammarMatcher | None:
        """A matcher at the beginning of the format; None for ``{"type": "text"}``.

        Raises:
            PromptError: ``invalid_response_format`` with the library's reason, or ``response_format_not_supported``.
        """
        if response_format.get("type") == "text":
            return None
        schema = json.dumps(_schema(response_format), sort_keys=False)
        with self._lock:
            compiled = self._compiled.get(schema)
            if compiled is None:
                compiled = self._compiled[schema] = self._compile(schema)
                if len(self._compiled) > COMPILED_FORMATS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(schema)
            return GrammarMatcher(compiled.deep_copy())

    def _compile(self, schema: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise _unsupported("the package llguidance is not installed (pip install llguidance)") from error
        if len(schema) > MAX_SCHEMA_CHARACTERS:
            raise _invalid(f"the schema has {len(schema)} characters; {MAX_SCHEMA_CHARACTERS} are the most")
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise _invalid(str(error)) from error
        compiled = LLMatcher(self._grammar_vocabulary(), grammar, log_level=0)
        if compiled.is_error():
            raise _invalid(compiled.get_error())
        return compiled

    def _grammar_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise _unsupported("the model has no fast tokenizer, by which the tokens of JSON texts are known")
            try:
                self._vocabulary = LLTokenizer(
                    backend.to_str(),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_ids or None,
                    slices=LLTokenizer.json_slices(),
                )
            except (ValueError, RuntimeError) as error:
                raise _unsupported(f"the model's tokenizer cannot be used for it: {_one_line(error)}") from error
        return self._vocabulary


def _schema(response_format: Mapping[str, Any]) -> Any:
    """The JSON schema that a response format stands for."""
    kind = response_format.get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise _invalid(f"its type must be text, json_object or json_schema, not {kind!r}")
    named = response_format.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise _invalid("json_schema.schema is missing")
    if not isinstance(named["schema"], Mapping):
        raise _invalid("json_schema.schema must be an object")
    return named["schema"]


def _invalid(reason: str) -> PromptError:
    return PromptError("invalid_response_format", f"response_format cannot be used: {_one_line(reason)}")


def _unsupported(reason: str) -> PromptError:
    return PromptError("response_format_not_supported", f"response_format cannot be held here: {reason}")


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
