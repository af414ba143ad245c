"""A workload from an input file: its prompts as the engine reads them, its limits, its top logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError
from workers.engine.requests import PromptError
from workers.reader import encode
from workers.workloads import Work

if TYPE_CHECKING:
    from batchjobs.types import Request
    from workers.engine.engine import Engine


def work_of(engine: Engine, requests: Sequence[Request]) -> list[Work]:
    """All answers are greedy and one choice each, and as long as ``max_tokens`` says or as the context has room for.

    Raises:
        UsageError: A prompt cannot be run; the message names the request.
    """
    work = []
    for request in requests:
        try:
            prompt = encode(engine, request)
        except PromptError as reason:
            raise UsageError(f"request {request.custom_id} cannot be run: {reason.message}") from None
        room = engine.max_model_len - len(prompt)
        if not prompt or room < 1 or not request.sampling.max_tokens:
            raise UsageError(f"request {request.custom_id} cannot be measured: it leaves no room for an answer")
        sampling = request.sampling
        work.append(Work(prompt, min(sampling.max_tokens, room), sampling.top_logprobs))
    return work
