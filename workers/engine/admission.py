"""From a request to its sequences, or to the reason why it can never run."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

from workers.engine.continuation import begun_parts, continued
from workers.engine.requests import EngineRequest, PromptError
from workers.engine.sequence import Sequence
from workers.engine.text import StopMatcher, Vocabulary

if TYPE_CHECKING:
    from workers.engine.pages import PagePool
    from workers.engine.structured import GrammarCompiler, GrammarMatcher


class Admission:
    """Knows the limits of the model and of the cache. ``max_chunk`` is the most rows that a sequence has in a step;
    ``seeds`` gives those of requests without one."""

    def __init__(
        self,
        *,
        pool: PagePool,
        max_chunk: int,
        max_model_len: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        vocabulary: Vocabulary,
        grammars: GrammarCompiler,
        version: str,
        seeds: random.Random,
    ) -> None:
        self._pool = pool
        self._max_chunk = max_chunk
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary = vocabulary
        self._grammars = grammars
        self.version = version
        self.seeds = seeds

    def sequences(self, request: EngineRequest, *, seed: int | None = None) -> list[Sequence]:
        """One sequence a choice. The first that has not ended has the others as its followers; where nothing is
        generated, only the first ever runs. Choices that were begun elsewhere go on, or have ended. ``seed`` is that of
        a request without one which has drawn one before.

        Raises:
            PromptError: The request can never run.
        """
        self.check(request)
        sampling = request.sampling
        if seed is None:
            seed = self.seeds.getrandbits(53) if sampling.seed is None else sampling.seed
        grammar = self.grammar(request)
        stop_ids, texts = self._stops(request)
        begun = begun_parts(request)

        def new(choice: int) -> Sequence:
            return Sequence(
                request,
                choice=choice,
                limit=min(sampling.max_tokens, self._max_model_len - len(request.prompt_ids)),
                seed=seed,
                version=self.version,
                stop_ids=stop_ids,
                stop_matcher=StopMatcher(texts, self._vocabulary, from_token=sampling.min_tokens) if texts else None,
                grammar=grammar.fork() if grammar is not None else None,
            )

        sequences = [
            continued(partial(new, choice), begun[choice], self._vocab_size) if choice in begun else new(choice)
            for choice in range(sampling.n)
        ]
        if sampling.max_tokens:
            leader, *followers = [sequence for sequence in sequences if not sequence.is_finished] or sequences[:1]
            leader.followers = followers
        return sequences

    def refused(self, request: EngineRequest, reason: PromptError) -> list[Sequence]:
        """The choices of a request that cannot run, each failed with the reason."""
        sequences = [
            Sequence(request, choice=choice, limit=1, seed=0, stop_ids=frozenset(), version=self.version)
            for choice in range(request.sampling.n)
        ]
        for sequence in sequences:
            sequence.fail(reason.code, reason.message)
        return sequences

    def grammar(self, request: EngineRequest) -> GrammarMatcher | None:
        """At the beginning of its response format. Raises PromptError."""
        wanted = request.sampling.response_format
        return None if wanted is None else self._grammars.matcher(wanted)

    def stop_ids(self, request: EngineRequest) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._stops(request)[0]

    def _stops(self, request: EngineRequest) -> tuple[frozenset[int], SequenceOf[str]]:
        """Ids and texts that end an answer."""
        sampling = request.sampling
        ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos_ids)
        texts = []
        for stop in sampling.stop:
            special = self._vocabulary.special_id(stop)
            if special is None:
                texts.append(stop)
            else:
                ids.add(special)  # special tokens never show in the text, so the token itself is watched for
        # Some tokenizers know tokens that their model has no logits for: they can never come.
        return frozenset(i for i in ids if i < self._vocab_size), texts

    def check(self, request: EngineRequest) -> None:
        length, sampling = len(request.prompt_ids), request.sampling
        if length == 0:
            raise PromptError("empty_prompt", "the prompt is empty: it gives no token to continue from")
        more = 1 if sampling.max_tokens else 0
        if length + more > self._max_model_len:
            wanted = "must hold one more" if more else "is shorter"
            raise PromptError(
                "context_length_exceeded",
                f"the prompt has {length} tokens; the model's context of {self._max_model_len} {wanted}",
            )
        ids = [*sampling.logit_bias, *sampling.stop_token_ids]
        if bad := [i for i in ids if i >= self._vocab_size]:
            raise PromptError(
                "invalid_parameter", f"token id {bad[0]} is outside the vocabulary (0 to {self._vocab_size - 1})"
            )
        # The last token of an answer is never fed back, so its keys and values take no room.
        most = min(length + sampling.max_tokens, self._max_model_len) - 1
        if self._pool.pages_at_most(most, self._max_chunk) > self._pool.capacity:
            room = self._pool.capacity * self._pool.page_size // len(self._pool.windows)
            raise PromptError(
                "kv_cache_too_small",
                f"the prompt of {length} tokens and max_tokens {sampling.max_tokens} need room for {most} tokens; "
                f"the KV cache holds {room}",
            )
