"""From what the engine says to what the store keeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchjobs.types import Completion, FinishReason, RequestError, RequestStatus

if TYPE_CHECKING:
    from batchjobs.types import Lease
    from workers.engine.engine import Engine
    from workers.engine.requests import EngineOutput

_STATUS = {
    FinishReason.STOP: RequestStatus.COMPLETED,
    FinishReason.LENGTH: RequestStatus.COMPLETED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Makes the completions of one worker: each says who made it, with which model, at which attempt."""

    worker: str
    engine: Engine

    def of(self, output: EngineOutput, lease: Lease, index: int) -> Completion:
        return Completion(
            index=index,
            status=_STATUS[output.finish_reason],
            finish_reason=output.finish_reason,
            text=output.text,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            token_ids=output.token_ids,
            tokens=output.tokens,
            logprobs=output.logprobs,
            token_times=output.token_times,
            top_logprobs=output.top_logprobs,
            model=self.engine.model_name,
            model_version=self.engine.model_version,
            worker=self.worker,
            attempt=lease.attempt,
            started_at=output.started_at,
            first_token_at=output.first_token_at,
            finished_at=output.finished_at,
            error=output.error,
        )

    def failed(self, lease: Lease, index: int, error: RequestError) -> Completion:
        """Of a request that never got into the engine, or whose answer cannot be stored."""
        return self._empty(lease, index, RequestStatus.FAILED, FinishReason.ERROR, error)

    def cancelled(self, lease: Lease, index: int) -> Completion:
        """Of a request that was cancelled before the engine had it."""
        return self._empty(lease, index, RequestStatus.CANCELLED, FinishReason.CANCELLED, None)

    def _empty(
        self, lease: Lease, index: int, status: RequestStatus, reason: FinishReason, error: RequestError | None
    ) -> Completion:
        return Completion(
            index=index,
            status=status,
            finish_reason=reason,
            model=self.engine.model_name,
            model_version=self.engine.model_version,
            worker=self.worker,
            attempt=lease.attempt,
            finished_at=datetime.now(UTC),
            error=error,
        )
