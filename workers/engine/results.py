"""What a step gave: at once, or when it has arrived from the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from workers.engine.sequence import TopIds
    from workers.engine.transfer import Array, Arriving, Download


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host. The lists follow the plan's parts that sample, and the rows that score."""

    tokens: list[int]
    logprobs: list[float]  # NaN where the logits were not finite
    allowed: list[bool]
    tops: list[TopIds] | None
    scores: list[float]
    score_tops: list[TopIds] | None
    started: float  # monotonic: when the device began with the step, and when it had finished
    ended: float


class Result(Protocol):
    def wait(self) -> StepResult:
        """The result, when it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """A result that is there."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(frozen=True, slots=True)
class Chosen:
    """Of R sampled and P scored rows, on the device. ``logprobs`` and ``scores`` are NaN where logits were not finite.

    The most likely tokens and their logprobs stand in two tensors, or None where nobody asks for them.
    """

    tokens: torch.Tensor  # [R] int64
    logprobs: torch.Tensor  # [R] float32
    allowed: torch.Tensor  # [R] bool
    tops: tuple[torch.Tensor, torch.Tensor] | None  # [R, N] int64, [R, N] float32
    scores: torch.Tensor  # [P] float32
    score_tops: tuple[torch.Tensor, torch.Tensor] | None  # [P, N] int64, [P, N] float32


class Clock:
    """When steps ran on a device that works beside the host, as the host sees it.

    A step began when it was launched, but not before the one before it ended; it ended when the host had its result.
    """

    def __init__(self) -> None:
        self._ended = 0.0

    def end(self, launched: float) -> tuple[float, float]:
        """Of a step that has just ended: when it began, and now."""
        started, self._ended = max(launched, self._ended), time.monotonic()
        return started, self._ended


class Pending:
    """A result on its way: one copy from the device. Results are waited for in the order of their steps."""

    def __init__(self, chosen: Chosen, download: Download, clock: Clock, launched: float) -> None:
        self._clock, self._launched = clock, launched
        self._has_tops, self._has_score_tops = chosen.tops is not None, chosen.score_tops is not None
        tensors = (chosen.tokens, chosen.logprobs, chosen.allowed, chosen.scores)
        self._arriving: Arriving = download((*tensors, *(chosen.tops or ()), *(chosen.score_tops or ())))
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            tokens, logprobs, allowed, scores, *tops = self._arriving.wait()
            started, ended = self._clock.end(self._launched)
            self._result = StepResult(
                tokens=tokens.tolist(),
                logprobs=logprobs.tolist(),
                allowed=allowed.tolist(),
                tops=_pairs(*tops[:2]) if self._has_tops else None,
                scores=scores.tolist(),
                score_tops=_pairs(*tops[-2:]) if self._has_score_tops else None,
                started=started,
                ended=ended,
            )
        return self._result


def _pairs(ids: Array, logprobs: Array) -> list[TopIds]:
    return [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]
