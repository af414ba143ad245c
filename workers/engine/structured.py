"""Answers that are held to a JSON schema, token by token, by the grammar library llguidance.

A format is compiled once and copied for each answer. Whatever cannot be held is refused before a token is made: an
invalid schema, a keyword that the library does not implement, a schema that is too large or takes too long. No answer
is ever free text where a format was asked for.

Blanks: between two parts of the JSON text there may be one space, or one line break and up to 16 spaces. That is how
models print JSON, compact or indented, and keeps small ones from running on in blanks for ever.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.engine.requests import PromptError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

COMPILED_FORMATS = 256  # kept, the least recently used one goes first
MAX_SCHEMA_BYTES = 128 * 2**10
MAX_COMPILE_SECONDS = 3  # of processor time
MAX_TRIAL_SECONDS = 60  # by the clock, on a machine that is busy otherwise
WHITESPACE = r"(\n[ ]{0,16}|[ ])?"
_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False}


class GrammarMatcher:
    """Where one answer stands in its format."""

    def __init__(self, matcher: LLMatcher, columns: _Columns) -> None:
        self._matcher = matcher
        self._columns = columns

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit ``i % 32`` of word ``i // 32`` for token i, [ceil(V / 32)].

        A matcher that has met one of the library's limits allows no token, so that the answer fails.
        """
        mask.fill(0)
        if self._matcher.is_error():
            return
        known = np.zeros(self._columns.words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(known.ctypes.data, known.nbytes)
        if self._matcher.is_error():
            return
        columns = self._columns.all if self._matcher.is_accepting() else self._columns.but_ends
        np.bitwise_and(known[: len(mask)], columns, out=mask)

    def accept(self, token: int) -> bool:
        """Go on by a token; False if it may not come here."""
        return bool(self._matcher.consume_token(token))

    def fork(self) -> GrammarMatcher:
        """One that stands at the same place and goes on by itself."""
        return GrammarMatcher(self._matcher.deep_copy(), self._columns)


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
        self._eos_ids = eos_ids
        self._vocabulary: LLTokenizer | None = None
        self._columns = _Columns.of(vocab_size, vocab_size, eos_ids)
        self._trial = _Trial()
        self._compiled: OrderedDict[str, LLMatcher | str] = OrderedDict()  # or why it is refused
        self._lock = threading.Lock()  # of the compiled ones
        self._compiling = threading.Lock()  # one schema at a time; nobody whose format is known waits for it

    def matcher(self, response_format: Mapping[str, Any]) -> GrammarMatcher | None:
        """A matcher at the beginning of the format; None for ``{"type": "text"}``.

        Raises:
            PromptError: ``invalid_response_format`` with the library's reason, or ``response_format_not_supported``.
        """
        if response_format.get("type") == "text":
            return None
        schema = _text(_schema(response_format))
        if (matcher := self._known(schema)) is not None:
            return matcher
        with self._compiling:
            if (matcher := self._known(schema)) is not None:  # another thread wanted it too
                return matcher
            compiled = self._compile(schema)
            with self._lock:
                self._compiled[schema] = compiled
                if len(self._compiled) > COMPILED_FORMATS:
                    self._compiled.popitem(last=False)
            return self._known(schema)

    def _known(self, schema: str) -> GrammarMatcher | None:
        """A matcher of a schema that was compiled before. Raises PromptError if it was refused then."""
        with self._lock:
            compiled = self._compiled.get(schema)
            if compiled is None:
                return None
            self._compiled.move_to_end(schema)
            if isinstance(compiled, str):
                raise _invalid(compiled)
            return GrammarMatcher(compiled.deep_copy(), self._columns)

    def _compile(self, schema: str) -> LLMatcher | str:
        """A matcher at the beginning of the schema, or why there is none."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise _unsupported("the package llguidance is not installed (pip install llguidance)") from error
        vocabulary = self._grammar_vocabulary()
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        if (reason := self._trial.fault(grammar)) is not None:
            return reason
        compiled = LLMatcher(vocabulary, grammar, log_level=0)
        compiled.compute_bitmask()
        if compiled.get_error().startswith("NoExtension"):
            return "no text fits the schema"
        return compiled.get_error() if compiled.is_error() else compiled

    def _grammar_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise _unsupported("the model has no fast tokenizer, by which the tokens of JSON texts are known")
            known = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
            size = max(known, self._vocab_size)  # some tokenizers know tokens that their model has no logits for
            ends = sorted(token for token in self._eos_ids if token < known)
            self._columns = _Columns.of(size, self._vocab_size, ends)
            try:
                self._vocabulary = LLTokenizer(
                    backend.to_str(), n_vocab=size, eos_token=ends or None, slices=LLTokenizer.json_slices()
                )
            except (ValueError, RuntimeError) as error:
                raise _unsupported(f"the model's tokenizer cannot be used for it: {_one_line(error)}") from error
        return self._vocabulary


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of the logits there are, as masks of the library's bits."""

    words: int  # of the library's mask, which covers the tokenizer's tokens also where the model has fewer
    all: NDArray[np.int32]  # [ceil(V / 32)]
    but_ends: NDArray[np.int32]  # [ceil(V / 32)]; an end token can be an ordinary text too, and would cut the answer

    @classmethod
    def of(cls, size: int, vocab_size: int, ends: Iterable[int]) -> _Columns:
        bits = np.zeros(-(-vocab_size // 32) * 32, bool)
        bits[:vocab_size] = True
        every = np.packbits(bits, bitorder="little").view(np.int32)
        bits[[token for token in ends if token < vocab_size]] = False
        return cls(-(-size // 32), every, np.packbits(bits, bitorder="little").view(np.int32))


_TRIAL = """
import json, signal, sys
from llguidance import LLMatcher, LLTokenizer
signal.signal(signal.SIGPROF, signal.SIG_DFL)
for line in sys.stdin:
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    LLMatcher(LLTokenizer("byte"), json.loads(line), log_level=0).compute_bitmask()
    signal.setitimer(signal.ITIMER_PROF, 0)
    print("done", flush=True)
"""


class _Trial:
    """A process that compiles each grammar first, and is ended by a timer where that takes too long.

    The library's limits do not hold for every schema (two dozen patterns for one string), and native code cannot be
    interrupted where it runs.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def fault(self, grammar: str) -> str | None:
        """Why the grammar must not be compiled here; None where it may, though it can have errors."""
        process, self._process = self._running(), None  # whatever interrupts this, the next grammar gets its own answer
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(grammar), file=process.stdin, flush=True)
            if not select.select([process.stdout], [], [], MAX_TRIAL_SECONDS)[0]:
                process.kill()  # stopped, or left without a processor
            if process.stdout.readline():
                self._process = process
                return None
        except BrokenPipeError:
            pass  # it has just ended, as its code says
        self._end()
        if process.returncode == -signal.SIGPROF:
            return f"the schema takes more than {MAX_COMPILE_SECONDS} seconds to compile"
        raise _unsupported(f"its compiler ended with code {process.returncode}")  # may go better the next time

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-P", "-c", _TRIAL, str(MAX_COMPILE_SECONDS)]
        pipe = subprocess.PIPE
        try:  # in a session of its own: an interrupt from the keyboard is for the worker alone
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
        except OSError as error:
            raise _unsupported(f"no process can be started to try it: {error}") from error
        self._end = weakref.finalize(self, _close, process)
        return process


def _close(process: subprocess.Popen[str]) -> None:
    with suppress(BrokenPipeError):  # what was written to it last may not have been read
        process.__exit__(None, None, None)


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, its keys in their order: an answer has its properties in that order.

    The library's own options inside a schema (x-guidance) are left out: some make texts that are not JSON.
    """
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"json_schema.schema is not JSON: {error}") from error
    if (size := len(text.encode(errors="replace"))) > MAX_SCHEMA_BYTES:
        raise _invalid(f"the schema has {size} bytes; {MAX_SCHEMA_BYTES} are the most")
    return text


def _invalid(reason: str) -> PromptError:
    return PromptError("invalid_response_format", f"response_format cannot be used: {_one_line(reason)}")


def _unsupported(reason: str) -> PromptError:
    return PromptError("response_format_not_supported", f"response_format cannot be held here: {reason}")


def _one_line(reason: object) -> str:
    text = str(reason)
    for not_for_readers in ("<state>", " Enable 'coerce_one_of'"):  # the library's inside, and what cannot be set here
        text = text.partition(not_for_readers)[0]
    return " ".join(text.split())[:300]
