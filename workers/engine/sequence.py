"""One choice of one request: its live state inside the engine.

Invariants:
- ``computed`` tokens have their keys and values in ``pages`` once the steps launched so far have run; a step, a prefix
  that is found or pages that come back from the host raise it, giving way sets it back to 0.
- ``in_flight`` tokens are being sampled: they are not in ``tokens`` yet. A token is sampled exactly when ``computed``
  catches up with the tokens known and in flight: decode, chunked prefill and resuming are this one rule.
- ``logprobs``, ``times`` and (when asked for) ``top_logprobs`` grow together with the generated tokens.
- Whatever decides on the next token or on the end follows from the generated tokens: so :meth:`take` alone, with the
  tokens that another engine drew, brings a sequence to where it stood there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from batchjobs.types import FinishReason, Progress, PromptScores, RequestError, VersionSpan
from workers.engine.requests import EngineOutput
from workers.engine.sampling_rows import stream

if TYPE_CHECKING:
    from batchjobs.types import TopLogprobs
    from workers.engine.offload import Offloaded
    from workers.engine.requests import EngineRequest
    from workers.engine.structured import GrammarMatcher
    from workers.engine.text import StopMatcher, Vocabulary

TopIds = list[tuple[int, float]]
"""The most likely tokens of one position, best first: (token id, logprob)."""


class Sequence:
    """Mutable; owned by the scheduler and touched between steps only."""

    __slots__ = (
        "admitted",
        "cached_tokens",
        "chain",
        "choice",
        "computed",
        "ending",
        "error",
        "finish_reason",
        "followers",
        "grammar",
        "in_flight",
        "is_processed",
        "is_stale",
        "is_suspended",
        "is_unbegun",
        "keeps_uses",
        "limit",
        "logprobs",
        "maker",
        "noted",
        "offloaded",
        "pages",
        "prompt_len",
        "prompt_logprobs",
        "prompt_tokens",
        "prompt_tops",
        "reached",
        "registered",
        "released",
        "request",
        "scored",
        "seed",
        "slot",
        "spans",
        "started",
        "started_at",
        "stop_ids",
        "stop_matcher",
        "stream",
        "times",
        "tokens",
        "top_logprobs",
        "uses",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        limit: int,
        seed: int,
        stop_ids: frozenset[int],
        choice: int = 0,
        version: str = "",
        stop_matcher: StopMatcher | None = None,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self.request = request
        self.choice = choice
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.limit = limit  # generated tokens at most, the room in the model's context considered
        self.seed = seed
        self.stop_ids = stop_ids
        self.stop_matcher = stop_matcher
        self.grammar = grammar
        self.followers: list[Sequence] = []  # the other choices, until the prompt is computed for all of them
        self.in_flight = 0

        sampling = request.sampling
        penalises = sampling.presence_penalty or sampling.frequency_penalty
        self.stream = stream(seed, choice)  # of its random numbers
        self.keeps_uses = bool(penalises) or sampling.repetition_penalty != 1.0
        self.uses: Counter[int] = Counter()  # generated tokens by id, kept where penalties ask for it
        self.prompt_tokens = frozenset(self.tokens if sampling.repetition_penalty != 1.0 else ())
        # Whether its logits are changed before a token is chosen; a grammar changes them too.
        self.is_processed = self.keeps_uses or bool(sampling.logit_bias) or sampling.min_tokens > 0

        self.maker = VersionSpan(
            version=version, worker=request.made_by[0], attempt=request.made_by[1]
        )  # of new tokens
        self.noted: VersionSpan | None = None  # the maker of the last token
        self.spans: list[VersionSpan] = []

        self.is_suspended = False  # takes no part in any step
        self.is_stale = False  # whether anything that it holds was computed by weights before these
        self.admitted = 0  # the number of its last admission
        self.is_unbegun = False  # whether it stands for a request of which nothing has run in this engine
        self.slot = -1  # index among the running sequences; -1 while waiting
        self.computed = 0
        self.reached = 0  # the most that was ever computed: below it, a step computes again
        self.pages: list[list[int]] = []  # [groups][...], in order of position; 0 behind a window
        self.released: list[int] = []  # [groups] leading pages that were given back
        self.offloaded: Offloaded | None = None
        self.chain = 0  # node of the last page that is in the prefix tree
        self.registered = 0  # leading pages that are in the tree, or whose twins are
        self.cached_tokens = 0  # prompt tokens that were there when the sequence first ran

        self.score_again()
        self.logprobs: list[float] = []
        self.times: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.started: float | None = None  # monotonic
        self.started_at: datetime | None = None  # the same instant by the wall clock
        self.finish_reason: FinishReason | None = None
        self.ending = None if limit else FinishReason.LENGTH  # the reason to come, when only its prompt is to be scored
        self.error: RequestError | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def length(self) -> int:
        """Tokens known and in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def pending(self) -> int:
        """Tokens to compute next. The last token of an answer is never fed back, so it is never computed."""
        most = self.prompt_len - 1 + (self.limit if self.ending is None else 0)
        return max(0, min(len(self.tokens) + self.in_flight, most) - self.computed)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_scored(self) -> bool:
        """Whether every prompt logprob that was asked for is there."""
        return self.request.sampling.prompt_logprobs is None or len(self.prompt_logprobs) >= self.prompt_len - 1

    def score_again(self) -> None:
        """Nothing is known of the prompt's scores, where they are asked for."""
        scores = self.request.sampling.prompt_logprobs is not None and self.choice == 0
        self.scored = 1 if scores else self.prompt_len  # prompt tokens whose logprob is known or in flight
        self.prompt_logprobs: list[float] = []
        self.prompt_tops: list[TopIds] = []

    def start(self) -> None:
        """Anchor the clocks at the first admission; a resumed sequence keeps its anchor."""
        if self.started is None:
            self.started, self.started_at = time.monotonic(), datetime.now(UTC)

    def resume(self, started_at: datetime) -> None:
        """Anchor the clocks where another engine had them. New times follow the last one, whatever the clocks say."""
        elapsed = (datetime.now(UTC) - started_at).total_seconds()
        self.started_at = started_at
        self.started = time.monotonic() - max(elapsed, *self.times[-1:], 0.0)
        if self.is_finished and self.scored < self.prompt_len:  # the scores of its prompt are still to come
            self.ending, self.finish_reason = self.finish_reason, None

    def accept(self, token: int, logprob: float, top: TopLogprobs | None, now: float) -> None:
        """Append a sampled token (``now`` is monotonic) and decide whether the sequence ends with it."""
        assert self.started is not None
        self.take(token, logprob, top, now - self.started)

    def accept_scores(self, logprobs: list[float], tops: list[TopIds] | None, rows: slice) -> bool:
        """Append the scores of the next prompt tokens; False if they are not numbers. ``tops`` has ``rows`` for it."""
        if any(map(math.isnan, logprobs)):
            return False
        self.prompt_logprobs += logprobs
        wanted = self.request.sampling.prompt_logprobs
        if wanted and tops is not None:
            self.prompt_tops += [top[:wanted] for top in tops[rows]]
        return True

    def take(self, token: int, logprob: float, top: TopLogprobs | None, seconds: float) -> None:
        """As ``accept``, ``seconds`` after the start."""
        if self.maker is not self.noted:
            self._note_maker()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.times.append(seconds)
        if top is not None:
            self.top_logprobs.append(top)
        if self.keeps_uses:
            self.uses[token] += 1
        if self._stops_at(token):
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is None and len(self.tokens) - self.prompt_len >= self.limit:
            self.finish_reason = FinishReason.LENGTH

    def _note_maker(self) -> None:
        """A span begins where the version, the worker or the attempt is another one than for the token before."""
        self.noted = self.maker
        if not self.spans or self.maker != replace(self.spans[-1], from_token=self.maker.from_token):
            self.spans.append(replace(self.maker, from_token=self.generated))

    def _stops_at(self, token: int) -> bool:
        if token in self.stop_ids and self.generated >= self.request.sampling.min_tokens:
            return True
        if self.grammar is not None:
            if not self.grammar.accept(token):
                self.fail("response_format_violated", f"token {token} does not fit the response format")
                return False
            if self.grammar.is_complete:
                return True
        return self.stop_matcher is not None and self.stop_matcher.feed(token, self.generated)

    def fail(self, code: str, message: str) -> None:
        self.finish_reason = FinishReason.ERROR
        self.error = RequestError(code=code, message=message)

    def progress(self, vocabulary: Vocabulary) -> Progress | None:
        """What there is so far; None where there is no token, or none that are worth to go on from."""
        if not self.generated or self.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            return None
        assert self.started_at is not None
        generated = tuple(self.tokens[self.prompt_len :])
        return Progress(
            choice=self.choice,
            token_ids=generated,
            tokens=vocabulary.texts(generated),
            logprobs=tuple(self.logprobs),
            token_times=tuple(self.times),
            top_logprobs=tuple(self.top_logprobs) if self.request.sampling.top_logprobs else None,
            started_at=self.started_at,
            version_spans=tuple(self.spans),
        )

    def output(self, vocabulary: Vocabulary) -> EngineOutput:
        """The outcome of this choice; the sequence has ended."""
        assert self.finish_reason is not None
        self.start()  # a sequence that never ran starts and ends now
        assert self.started is not None
        assert self.started_at is not None
        generated = tuple(self.tokens[self.prompt_len :])
        text = vocabulary.decode(generated)
        if self.stop_matcher is not None and self.finish_reason is FinishReason.STOP:
            text = self.stop_matcher.cut(text)
        now = time.monotonic() - self.started
        return EngineOutput(
            request_id=self.request.request_id,
            choice=self.choice,
            text=text,
            finish_reason=self.finish_reason,
            token_ids=generated,
            tokens=vocabulary.texts(generated),
            logprobs=tuple(self.logprobs),
            token_times=tuple(self.times),
            top_logprobs=tuple(self.top_logprobs) if self.request.sampling.top_logprobs else None,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            started_at=self.started_at,
            first_token_at=self.started_at + timedelta(seconds=self.times[0]) if self.times else None,
            finished_at=self.started_at + timedelta(seconds=self.times[-1] if self.times else now),
            error=self.error,
            prompt_scores=self._prompt_scores(vocabulary),
            version_spans=tuple(self.spans),
            model_version=(self.spans[-1] if self.spans else self.maker).version,
        )

    def _prompt_scores(self, vocabulary: Vocabulary) -> PromptScores | None:
        """None when they were not asked for, or when the sequence ended before they were all there."""
        wanted = self.request.sampling.prompt_logprobs
        if wanted is None or self.choice > 0 or not self.is_scored:
            return None
        prompt = self.request.prompt_ids
        return PromptScores(
            token_ids=prompt,
            tokens=vocabulary.texts(prompt),
            logprobs=(None, *self.prompt_logprobs),
            top_logprobs=(None, *(vocabulary.named(best) for best in self.prompt_tops)) if wanted else None,
        )
