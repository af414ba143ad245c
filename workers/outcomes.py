"""From what the engine says to what the store keeps: one completion a choice, behind the prompt where it is echoed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from batchjobs.echo import following, prompt_text
from batchjobs.types import Completion, FinishReason, RequestError, RequestStatus

if TYPE_CHECKING:
    from batchjobs.types import Lease, Request
    from workers.engine.requests import EngineOutput
    from workers.serving import Serving

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
    serving: Serving

    def of(self, output: EngineOutput, lease: Lease, request: Request) -> tuple[Completion, ...]:
        """Those of all the choices, in order. A failed one has what there was of the answer, without the prompt."""
        prompt = self._echoed(request, output)
        return tuple(self._choice(choice, lease, request.index, prompt) for choice in output.choices)

    def _echoed(self, request: Request, output: EngineOutput) -> str | None:
        if not request.body.get("echo"):
            return None
        prompt = request.body["prompt"]
        if isinstance(prompt, str):
            return prompt_text(prompt, ())
        if output.prompt_scores is not None:
            return prompt_text(prompt, output.prompt_scores.tokens)
        return prompt_text(prompt, map(self.serving.engine.vocabulary.text, prompt))

    def _choice(self, output: EngineOutput, lease: Lease, index: int, prompt: str | None) -> Completion:
        text = output.text
        if prompt is not None and output.finish_reason is not FinishReason.ERROR:
            text = following(prompt, text, output.tokens)
        return Completion(
            index=index,
            choice=output.choice,
            status=_STATUS[output.finish_reason],
            finish_reason=output.finish_reason,
            text=text,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            token_ids=output.token_ids,
            tokens=output.tokens,
            logprobs=output.logprobs,
            token_times=output.token_times,
            top_logprobs=output.top_logprobs,
            # Not the engine's own version: it may have been updated since the last token was drawn.
            model=self.serving.model_of(output.model_version),
            model_version=output.model_version,
            version_spans=output.version_spans,
            worker=self.worker,
            attempt=lease.attempt,
            started_at=output.started_at,
            first_token_at=output.first_token_at,
            finished_at=output.finished_at,
            error=output.error,
            prompt_scores=output.prompt_scores,
        )

    def failed(self, lease: Lease, index: int, error: RequestError) -> tuple[Completion, ...]:
        """Of a request that never got into the engine, or whose answer cannot be stored: one, however many choices it
        asked for."""
        return (self._empty(lease, index, RequestStatus.FAILED, FinishReason.ERROR, error),)

    def cancelled(self, lease: Lease, index: int) -> tuple[Completion, ...]:
        """Of a request that was cancelled before the engine had it: one, however many choices it asked for."""
        return (self._empty(lease, index, RequestStatus.CANCELLED, FinishReason.CANCELLED, None),)

    def _empty(
        self, lease: Lease, index: int, status: RequestStatus, reason: FinishReason, error: RequestError | None
    ) -> Completion:
        version = self.serving.version
        return Completion(
            index=index,
            status=status,
            finish_reason=reason,
            model=self.serving.model_of(version),
            model_version=version,
            worker=self.worker,
            attempt=lease.attempt,
            finished_at=datetime.now(UTC),
            error=error,
        )
