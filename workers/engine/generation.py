"""Many prompts at once, and their outputs in their order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from batchjobs.types import SamplingParams
from workers.engine.progress import progress
from workers.engine.requests import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from workers.engine.engine import Engine


def generate(
    engine: Engine,
    prompts: Iterable[str | Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    *,
    progress_bar: bool,
) -> list[EngineOutput]:
    """See :meth:`Engine.generate`."""
    encoded = [engine.encode_prompt(p) for p in prompts]
    each = _one_each(sampling, len(encoded))
    for index, (ids, params) in enumerate(zip(encoded, each, strict=True)):
        engine.add(EngineRequest(("generate", index), ids, params))
    outputs: dict[Hashable, EngineOutput] = {}
    with progress(len(encoded), shown=progress_bar) as advance:
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id] = output
                advance()
    return [outputs["generate", index] for index in range(len(encoded))]


def _one_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{count} prompts but {len(sampling)} sampling parameters: give one for all, or one for each")
    return sampling
