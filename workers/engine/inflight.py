"""What becomes of unfinished requests when the weights change under them.

What it keeps true:
- Nothing that other weights computed is found again, and none of it is mixed in unmarked: keys and values of the old
  weights stay only under ``keep``, with a sequence that has tokens of theirs, and never reach another sequence.
- A request without a token begins wholly afresh, whatever the policy: what its answer will be like is then clear.
- Prompt scores are of one model: incomplete ones, or those of a sequence without a token, are computed again.
- A streamed token was told: it is never taken back. Such a request goes on as with ``recompute`` where others would
  begin anew.

Between two steps, with nothing in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from batchjobs.types import FinishReason, Inflight

if TYPE_CHECKING:
    from workers.engine.admission import Admission
    from workers.engine.requests import EngineRequest
    from workers.engine.scheduler import Scheduler
    from workers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Restart:
    """What stays of a request that begins anew: nothing but the seed that it has drawn."""

    request: EngineRequest
    seed: int


@dataclass(slots=True)
class Transition:
    """From one version to the next one. ``admission`` is the new model's.

    ``counts`` has the requests that were ``recomputed``, ``kept`` and ``restarted``; those to be begun again are left
    in ``restarting``, taken out of the scheduler, for the caller to make new sequences of.
    """

    policy: Inflight
    scheduler: Scheduler
    admission: Admission
    ends_differ: bool  # other end-of-sequence tokens
    counts: Counter[str] = field(default_factory=Counter)
    restarting: dict[Hashable, Restart] = field(default_factory=dict)

    def apply(self, requests: Mapping[Hashable, list[Sequence]]) -> None:
        for request_id, choices in requests.items():
            if self._begins_anew(choices):
                suspended = any(choice.is_suspended for choice in choices)
                request = replace(choices[0].request, begun=(), suspended=suspended)
                self.restarting[request_id] = Restart(request, choices[0].seed)
                self._withdraw(choices)
                self.counts["restarted"] += 1
                continue
            fates = {self._carry_on(choice) for choice in choices if not choice.is_finished}
            fate = "kept" if "kept" in fates else "recomputed" if "recomputed" in fates else None
            if fate is not None:
                self.counts[fate] += 1
        self.scheduler.pool.forget()

    def _begins_anew(self, choices: list[Sequence]) -> bool:
        if self.policy not in (Inflight.RESTART, Inflight.FINISH) or choices[0].request.stream:
            return False
        new = self.admission.version
        has_tokens = any(span.version != new for choice in choices for span in choice.spans)
        was_begun = not any(choice.is_unbegun for choice in choices)
        return has_tokens or (was_begun and self.policy is Inflight.RESTART)

    def _withdraw(self, choices: list[Sequence]) -> None:
        """Take a request out of the scheduler as if it had never been there."""
        live = live_choices(choices)
        for choice in live:
            choice.finish_reason = FinishReason.CANCELLED
        for choice in live:
            self.scheduler.finish(choice)

    def _carry_on(self, sequence: Sequence) -> str | None:
        """Returns what it is counted as; None for one without a token, which has nothing of the old weights."""
        sequence.maker = replace(sequence.maker, version=self.admission.version)
        if self.ends_differ:
            sequence.stop_ids = self.admission.stop_ids(sequence.request)
            self._hold_to_format_again(sequence)
        has_cache = sequence.computed > 0 or sequence.offloaded is not None
        if self.policy is Inflight.KEEP and sequence.generated and sequence.is_scored and has_cache:
            sequence.is_stale = True
            return "kept"
        self._recompute(sequence)
        return "recomputed" if sequence.generated else None

    def _recompute(self, sequence: Sequence) -> None:
        keeper = self.scheduler.keeper
        keeper.drop_offloaded(sequence)
        if sequence.slot >= 0:
            keeper.let_go(sequence)
        if not sequence.generated:
            sequence.reached = sequence.cached_tokens = 0
        if not sequence.generated or not sequence.is_scored:
            sequence.score_again()

    def _hold_to_format_again(self, sequence: Sequence) -> None:
        """By a matcher that knows the new end tokens. Where the answer so far does not fit it, the old one stays."""
        response_format = sequence.request.sampling.response_format
        if sequence.grammar is None or response_format is None:
            return
        matcher = self.admission.grammar(sequence.request)
        if matcher is not None and all(map(matcher.accept, sequence.tokens[sequence.prompt_len :])):
            sequence.grammar = matcher


def live_choices(choices: list[Sequence]) -> list[Sequence]:
    """Those that the scheduler has. A prompt that is only scored is scored once."""
    return [choice for choice in choices if not choice.is_finished and (choice.limit or choice.choice == 0)]
