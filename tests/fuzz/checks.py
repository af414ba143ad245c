"""Is this outcome the right one? Judged position by position against the solo forward over the same text.

A token that is right at every position, given the tokens before it, is the token of the solo run; and the answer has to
end exactly where the solo run's rules end it. A different token is forgiven, and counted, only where the difference
between a packed and a solo forward in float32 can decide (:func:`within_rounding`); what follows it is judged as ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchjobs.types import FinishReason, SamplingParams, TopLogprobs
from tests.fuzz.choosing import Row, choose, within_rounding
from tests.fuzz.engine_cases import CaseRequest
from tests.fuzz.reference import Ending, Solo
from workers.engine import EngineOutput, PromptError

TOLERANCE = 1e-4
"""Of a logprob."""


@dataclass(slots=True)
class Verdict:
    """What was found in the outcomes of a case."""

    problems: list[str] = field(default_factory=list)
    choices: int = 0
    tokens: int = 0
    scores: int = 0
    forgiven: int = 0
    worst_logprob: float = 0.0

    def problem(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the engine was asked, beside the request itself. ``refusal``: the error code that it has to fail with."""

    max_model_len: int
    page_size: int
    sharing: bool
    refusal: str | None
    cancelled: bool


def judge(
    request: CaseRequest, output: EngineOutput, solo_of: Callable[[EngineOutput], Solo], terms: Terms, verdict: Verdict
) -> None:
    """Check the outcome of one request, all choices, each against its solo run."""
    where = request.request_id
    if len(output.choices) != request.sampling.n or [c.choice for c in output.choices] != [*range(request.sampling.n)]:
        verdict.problem(where, f"{len(output.choices)} choices instead of {request.sampling.n}")
    for choice in output.choices:
        _Judge(request, choice, solo_of(choice), terms, verdict, f"{where} choice {choice.choice}").run()


class _Judge:
    """One choice of one request."""

    def __init__(
        self, request: CaseRequest, output: EngineOutput, solo: Solo, terms: Terms, verdict: Verdict, where: str
    ) -> None:
        self.request, self.sampling, self.prompt = request, request.sampling, request.prompt
        self.output, self.solo, self.terms, self.verdict, self.where = output, solo, terms, verdict, where
        self.tokens = output.token_ids
        self.limit = min(self.sampling.max_tokens, terms.max_model_len - len(self.prompt))

    def run(self) -> None:
        self.verdict.choices += 1
        self.verdict.tokens += len(self.tokens)
        self._counts()
        if self.terms.refusal is not None and not self.terms.cancelled:
            self._expect("the error", self._code, self.terms.refusal)
            return
        scored = self.limit == 0 and self.output.finish_reason is FinishReason.LENGTH  # by its first choice, for all
        nothing = not self.tokens and self.output.prompt_scores is None and not scored
        if not self.prompt or (self.terms.cancelled and nothing):
            self._expect("the end", self.output.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR), True)
            return
        logits = self.solo.logits(self.prompt + self.tokens)
        self._scores(logits[: len(self.prompt) - 1])
        answer_rows = logits[len(self.prompt) - 1 :]
        if self._tokens(answer_rows):
            self._logprobs(answer_rows[: len(self.tokens)])

    @property
    def _code(self) -> str | None:
        return None if self.output.error is None else self.output.error.code

    def _expect(self, what: str, got: object, wanted: object) -> None:
        if got != wanted:
            self.verdict.problem(self.where, f"{what} is {got!r}, not {wanted!r}")

    def _counts(self) -> None:
        output, count = self.output, len(self.tokens)
        lengths = [len(output.tokens), len(output.logprobs), len(output.token_times)]
        if self.sampling.top_logprobs:
            lengths.append(len(output.top_logprobs or ()))
        self._expect("the lengths", set(lengths), {count})
        self._expect("top_logprobs", output.top_logprobs is None, not self.sampling.top_logprobs)
        self._expect("prompt_tokens", output.prompt_tokens, len(self.prompt))
        times = list(output.token_times)
        self._expect("the order of token_times", times == sorted(times) and all(t >= 0 for t in times), True)
        cached = output.cached_tokens
        fits = 0 <= cached < max(1, len(self.prompt)) and cached % self.terms.page_size == 0
        self._expect(f"cached_tokens {cached}", fits and (self.terms.sharing or not cached), True)

    def _tokens(self, rows: Row) -> bool:
        """Whether the tokens are those of the solo run; then also where and why they end, and the text."""
        grammar = self.solo.matcher(self.sampling)
        ending: Ending | None = None
        for position, token in enumerate(self.tokens):
            if ending is not None:
                self.verdict.problem(self.where, f"goes on at {position} after its end ({ending.reason})")
                return False
            if np.isnan(rows[position]).any():
                self.verdict.problem(self.where, f"has token {token} at {position}, where the logits are not finite")
                return False
            row = self.solo.row(rows[position], self.sampling, self.prompt, self.tokens[:position], grammar)
            if not self._token(row, position, token):
                return False
            known = self.tokens[: position + 1]
            if grammar is not None and token not in self.solo.stop_ids(self.sampling):
                grammar.accept(token)
            ending = self.solo.ending(known, self.sampling, self.limit, grammar)
        self._end(rows, ending)
        return True

    def _token(self, row: Row, position: int, token: int) -> bool:
        wanted = choose(row, self.sampling, self.output.choice, position)
        if token == wanted:
            return True
        if token in within_rounding(row, self.sampling, self.output.choice, position):
            self.verdict.forgiven += 1
            return True
        gap = row[wanted] - row[token]
        self.verdict.problem(
            self.where,
            f"token {position} is {token}, not {wanted} (logits differ by {gap:.3g}); so far {list(self.tokens)}",
        )
        return False

    def _end(self, rows: Row, ending: Ending | None) -> None:
        reason, count = self.output.finish_reason, len(self.tokens)
        if ending is None and self.limit == 0 and reason is FinishReason.LENGTH:
            ending = Ending(FinishReason.LENGTH)
        if ending is not None:
            self._expect("finish_reason", reason, ending.reason)
        elif reason is FinishReason.ERROR:
            nan = np.isnan(rows[count]).any() or (self._wants_scores and np.isnan(rows).any())
            self._expect("the error", self._code, "non_finite_logits" if nan else None)
        else:
            wanted = FinishReason.CANCELLED if self.terms.cancelled else "something else: it has not ended"
            self._expect("finish_reason", reason, wanted)
        text = self.solo.text(self.tokens, ending)
        self._expect("the text", self.output.text, text)
        if self.sampling.response_format is not None and reason is FinishReason.STOP:
            self._expect("the text as JSON", _is_json(text), True)
        spelling = self.solo.spelling
        raw = [spelling.bytes_of(t) if spelling else b"" for t in self.tokens]
        self._expect("the bytes of the tokens", [_raw(t) for t in self.output.tokens], raw)

    def _logprobs(self, rows: Row) -> None:
        tops: Sequence[TopLogprobs | None] = self.output.top_logprobs or [None] * len(self.tokens)
        for position, (row, token, got, top) in enumerate(
            zip(rows, self.tokens, self.output.logprobs, tops, strict=True)
        ):
            self._logprob(f"the logprob of token {position}", row, token, got)
            if top is not None:
                self._top(f"top_logprobs of token {position}", row, top, self.sampling.top_logprobs)

    @property
    def _wants_scores(self) -> bool:
        return self.sampling.prompt_logprobs is not None and self.output.choice == 0

    def _scores(self, rows: Row) -> None:
        """``rows`` are those of the prompt but for its last token."""
        scores = self.output.prompt_scores
        if scores is None:
            ended = self.output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if self._wants_scores and ended:
                self.verdict.problem(self.where, "has no prompt_scores")
            return
        self._expect("prompt_scores", self._wants_scores, True)
        self._expect("their token_ids", scores.token_ids, self.prompt)
        self._expect("their lengths", {len(scores.tokens), len(scores.logprobs)}, {len(self.prompt)})
        self._expect("their first logprob", scores.logprobs[0], None)
        self.verdict.scores += len(rows)
        wanted = self.sampling.prompt_logprobs
        self._expect("their top_logprobs", scores.top_logprobs is None, not wanted)
        tops = scores.top_logprobs or (None,) * len(self.prompt)
        for at, (row, token, got, top) in enumerate(
            zip(rows, self.prompt[1:], scores.logprobs[1:], tops[1:], strict=True), 1
        ):
            self._logprob(f"the score of prompt token {at}", row, token, got)
            if wanted:
                self._top(f"the likeliest at prompt token {at}", row, top or (), wanted)

    def _logprob(self, what: str, row: Row, token: int, got: float | None) -> None:
        wanted = float(_log_softmax(row)[token])
        off = abs(wanted - got) if got is not None else float("inf")
        self.verdict.worst_logprob = max(self.verdict.worst_logprob, off)
        if not off <= TOLERANCE:  # NaN included
            self.verdict.problem(self.where, f"{what} is {got}, not {wanted:.6f}")

    def _top(self, what: str, row: Row, top: TopLogprobs, count: int) -> None:
        """Ids may change places only where they are equally likely."""
        logprobs = _log_softmax(row)
        wanted = -np.sort(-logprobs)[:count]
        got, ids = np.array([p for _, p, _ in top]), [token for token, _, _ in top]
        if len(top) != min(count, len(row)) or len(set(ids)) != len(ids):
            self.verdict.problem(self.where, f"{what} has {len(top)} entries: {ids}")
        elif not (np.abs(got - wanted) <= TOLERANCE).all() or not (np.abs(got - logprobs[ids]) <= TOLERANCE).all():
            self.verdict.problem(self.where, f"{what} is {top}, not {wanted}")


def judge_deltas(
    request: CaseRequest, output: EngineOutput, deltas: Sequence[tuple[int, int, float, float]], verdict: Verdict
) -> None:
    """``deltas`` are (choice, token, logprob, time) of this request, in the order in which they came."""
    wanted = list(_as_deltas(output)) if request.stream else []
    for choice in range(request.sampling.n):
        got = [d for d in deltas if d[0] == choice]
        if got != [w for w in wanted if w[0] == choice]:
            verdict.problem(f"{request.request_id} choice {choice}", f"was streamed as {[d[1] for d in got]}")


def _as_deltas(output: EngineOutput) -> Iterator[tuple[int, int, float, float]]:
    for choice in output.choices:
        for token, logprob, time in zip(choice.token_ids, choice.logprobs, choice.token_times, strict=True):
            yield choice.choice, token, logprob, time


def _log_softmax(row: Row) -> Row:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _raw(text: str | tuple[int, ...]) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def refusal(request: CaseRequest, solo: Solo, *, max_model_len: int, fits: bool) -> str | None:
    """The code with which the engine has to refuse a request, or None. ``fits``: its tokens have room in the cache."""
    sampling: SamplingParams = request.sampling
    if not request.prompt:
        return "empty_prompt"
    if len(request.prompt) + min(1, sampling.max_tokens) > max_model_len:
        return "context_length_exceeded"
    if any(t >= solo.vocab_size for t in (*sampling.logit_bias, *sampling.stop_token_ids)):
        return "invalid_parameter"
    if not fits:
        return "kv_cache_too_small"
    try:
        solo.matcher(sampling)
    except PromptError as error:
        return error.code
    return None
