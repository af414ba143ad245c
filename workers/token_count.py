"""What a model makes of an input's requests before it answers them: tokens, room in the context, keys and values.

Prompts are encoded as a worker encodes them. A request that a worker would refuse is told of with the reason that the
worker would give, because the same code is asked. Memory stays flat: lengths are kept as a histogram.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.types import Request
from workers.engine.admission import Admission
from workers.engine.attention.interface import DEFAULT_PAGE_SIZE
from workers.engine.pages import PagePool
from workers.engine.requests import EngineRequest, PromptError
from workers.engine.structured import COMPILED_FORMATS, GrammarCompiler
from workers.engine.text import Vocabulary
from workers.model_outline import ModelOutline, kv_sizes
from workers.prefix_share import PrefixShare
from workers.prompt_batches import BatchEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 100_000
"""Refusals and cut answers that are named; more are counted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that a worker with this model would refuse, by its index, with the worker's own code and message."""

    index: int
    custom_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A request whose answer may be ``wanted`` tokens long, where the context has ``room`` for fewer behind the
    prompt."""

    index: int
    custom_id: str
    prompt_tokens: int
    wanted: int
    room: int


@dataclass(slots=True)
class Lengths:
    """Lengths of prompts in tokens, as a histogram."""

    counts: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(length * count for length, count in self.counts.items())

    @property
    def number(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> int:
        """The least length that this share of the prompts does not exceed."""
        wanted, seen = share * self.number, 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= wanted:
                return length
        return 0


@dataclass(slots=True)
class KVNeed:
    """Pages that sequences need at their longest. ``pages`` sums them up over ``sequences``, one a choice; ``largest``
    holds those of the largest sequences, as many as run together; ``of_request`` is the most that one request needs
    with all its choices, and ``index`` that request."""

    sequences: int = 0
    pages: int = 0
    largest: list[int] = field(default_factory=list)
    of_request: int = 0
    index: int = 0


class TokenCount:
    """Takes chunks of requests, in input order.

    Args:
        outline: The model.
        page_size: Tokens in a page of the cache; None takes what a CPU takes.
        num_blocks: Pages of the cache; None says that there are enough for any request.
        together: Sequences that run at the same time at most.
        chunk: Rows of one packed step at most.
    """

    def __init__(
        self,
        outline: ModelOutline,
        *,
        page_size: int | None = None,
        num_blocks: int | None = None,
        together: int = 64,
        chunk: int = 2048,
    ) -> None:
        page_size = page_size or DEFAULT_PAGE_SIZE
        self.outline = outline
        self.sizes = kv_sizes(outline, page_size, num_blocks)
        self.lengths = Lengths()
        self.longest: tuple[int, int] = (0, 0)  # tokens, index of the request
        self.choices = self.answer_tokens = 0
        self.refused = self.cut = 0
        self.refusals: list[Refusal] = []
        self.cuts: list[Cut] = []
        self.share = PrefixShare(page_size)
        self.kv = KVNeed()
        self.together, self._chunk = together, chunk
        self._is_scarce = num_blocks is not None
        self._encoder = BatchEncoder(outline.tokenizer, outline.vocab_size)
        self._grammars = GrammarCompiler(outline.tokenizer, outline.vocab_size, outline.eos_ids)
        self._pages: dict[int, int] = {}  # tokens -> pages; as many as the context is long, at most
        self._formats: dict[bytes, PromptError | None] = {}
        self._admission = self._new_admission(page_size)

    def add(self, requests: Sequence[Request]) -> None:
        """The next chunk."""
        for request, encoded in zip(requests, self._encoder.encode(requests), strict=True):
            try:
                if isinstance(encoded, PromptError):
                    raise encoded
                self._check_format(request.body.get("response_format"))
                self._check(request, encoded)
            except PromptError as problem:
                self.refused += 1
                if self.refused <= KEPT:
                    self.refusals.append(Refusal(request.index, request.custom_id, problem.code, problem.message))
            else:
                self._count(request, encoded)

    # What a worker would refuse

    def _check_format(self, response_format: Mapping[str, Any] | None) -> None:
        if response_format is None:
            return
        key = orjson.dumps(response_format)
        if key not in self._formats:
            if len(self._formats) >= COMPILED_FORMATS:
                self._formats.clear()
            self._formats[key] = self._why_not(response_format)
        if problem := self._formats[key]:
            raise problem

    def _why_not(self, response_format: Mapping[str, Any]) -> PromptError | None:
        try:
            self._grammars.matcher(response_format)
        except PromptError as problem:
            return problem
        return None

    def _check(self, request: Request, prompt_ids: Sequence[int]) -> None:
        """Asks the engine's own check wherever it could have anything to say. Raises PromptError."""
        body = request.body
        fits = len(prompt_ids) < self.outline.max_model_len
        if self._is_scarce or not fits or "logit_bias" in body or "stop_token_ids" in body:
            self._admission.check(EngineRequest(request.index, tuple(prompt_ids), request.sampling))

    def _new_admission(self, page_size: int) -> Admission:
        outline = self.outline
        enough = PagePool(-(-outline.max_model_len // page_size) + 2, page_size)
        return Admission(
            pool=self.sizes.pool if self.sizes else enough,
            max_chunk=self._chunk,
            max_model_len=outline.max_model_len,
            vocab_size=outline.vocab_size,
            eos_ids=outline.eos_ids,
            vocabulary=Vocabulary(outline.tokenizer),
            grammars=self._grammars,
            version="",
            seeds=random.Random(0),
        )

    # What it would have to do

    def _count(self, request: Request, prompt_ids: Sequence[int]) -> None:
        length, wanted = len(prompt_ids), int(request.body["max_tokens"])
        room = self.outline.max_model_len - length
        limit, choices = min(wanted, room), request.n
        self.lengths.counts[length] += 1
        self.longest = max(self.longest, (length, request.index), key=_first)
        self.choices += choices
        self.answer_tokens += limit * choices
        self.share.add(prompt_ids, scored="prompt_logprobs" in request.body)
        if limit < wanted:
            self.cut += 1
            if self.cut <= KEPT:
                self.cuts.append(Cut(request.index, request.custom_id, length, wanted, room))
        if self.sizes is not None:
            self._count_pages(request.index, length, limit, choices if limit else 1)

    def _count_pages(self, index: int, length: int, limit: int, choices: int) -> None:
        assert self.sizes is not None
        pool, kv = self.sizes.pool, self.kv
        # The last token of an answer is never fed back, so its keys and values take no room.
        tokens = length + limit - 1
        pages = self._pages.get(tokens, 0)
        if not pages:
            pages = self._pages[tokens] = pool.pages_at_most(tokens, self._chunk)
        kv.sequences += choices
        kv.pages += pages * choices
        for _ in range(choices):
            if len(kv.largest) < self.together:
                heapq.heappush(kv.largest, pages)
            elif pages > kv.largest[0]:
                heapq.heapreplace(kv.largest, pages)
            else:
                break
        # Choices share the full pages of their prompt.
        shared = length // pool.page_size * pool.windows.count(None)
        of_request = pages + (choices - 1) * max(pages - shared, 0)
        if of_request > kv.of_request:
            kv.of_request, kv.index = of_request, index


def _first(pair: tuple[int, int]) -> int:
    return pair[0]
