"""From what another engine made of a choice to a sequence that goes on behind it.

What it keeps true:
- The tokens go through the same rules as fresh ones (stops, grammar, penalties, limit), so the sequence stands where it
  would stand if it had drawn them here. Their logprobs, times and top logprobs are kept; only its keys and values are
  missing, and they are computed as after giving way.
- What cannot be replayed never fails its request. It is cut where it goes wrong, and thrown away where a grammar
  refuses it; the log says so, and the answer is generated again from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import TYPE_CHECKING

from batchjobs.types import FinishReason

if TYPE_CHECKING:
    from batchjobs.types import Progress, TopLogprobs
    from workers.engine.requests import EngineRequest
    from workers.engine.sequence import Sequence

log = logging.getLogger("batchjobs.engine")


def begun_parts(request: EngineRequest) -> dict[int, Progress]:
    """What there is of each choice, by its number."""
    parts: dict[int, Progress] = {}
    for part in request.begun:
        if part.choice in parts or not 0 <= part.choice < request.sampling.n:
            log.warning("request %r has no use for a beginning of choice %d", request.request_id, part.choice)
        else:
            parts[part.choice] = part
    return parts


def continued(new: Callable[[], Sequence], begun: Progress, vocab_size: int) -> Sequence:
    """A sequence behind ``begun``; it has ended already where that was the whole answer.

    Args:
        new: Makes the sequence as it is before its first token.
    """
    sequence = new()
    fault = _replay(sequence, begun, vocab_size)
    if sequence.finish_reason is FinishReason.ERROR:
        assert sequence.error is not None
        fault = sequence.error.message
        sequence = new()
    if fault is not None:
        log.warning(
            "request %r, choice %d: of %d tokens that another engine made %d are kept: %s",
            sequence.request.request_id,
            sequence.choice,
            len(begun.token_ids),
            sequence.generated,
            fault,
        )
    if sequence.generated:
        sequence.resume(begun.started_at)
    return sequence


def _replay(sequence: Sequence, begun: Progress, vocab_size: int) -> str | None:
    """Feed what is good to the sequence. Returns what is wrong with the rest; None when there is none."""
    lengths = {len(begun.token_ids), len(begun.logprobs), len(begun.token_times)}
    tops: Iterable[TopLogprobs | None] = repeat(None)
    if sequence.request.sampling.top_logprobs:
        tops = begun.top_logprobs or ()
        lengths.add(len(tops))
    fault = "its lists differ in length" if len(lengths) > 1 else None
    maker, spans = sequence.maker, {span.from_token: span for span in begun.version_spans}
    parts = zip(begun.token_ids, begun.logprobs, begun.token_times, tops, strict=False)
    for position, (token, logprob, seconds, top) in enumerate(parts):
        if sequence.is_finished or sequence.limit == 0:
            fault = "the answer ends there"
            break
        if not 0 <= token < vocab_size:
            fault = f"token {token} is outside the vocabulary"
            break
        if seconds < (sequence.times[-1] if sequence.times else 0.0):
            fault = "its times go backwards"
            break
        sequence.maker = spans.get(position, sequence.maker)
        sequence.take(token, logprob, top, seconds)
    sequence.maker = maker
    return fault
