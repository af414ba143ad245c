"""Runs requests on an engine under observation; what was seen becomes a picture or a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchjobs.errors import InvalidParameter
from batchjobs.models import short_name
from batchjobs.text import plural, visible
from batchjobs.types import Endpoint, Request, RequestError
from workers.engine.engine import Engine
from workers.engine.requests import EngineOutput, EngineRequest, PromptError
from workers.grid import WIDTH, View
from workers.reader import encode
from workers.step_log import Admitted, StepLog

if TYPE_CHECKING:
    from workers.engine.config import EngineConfig

# A small engine and a few prompts on which everything can be seen: a prompt cut into chunks, decode beside prefill, a
# slot that is used again, a beginning that is found in the cache, and, with half of these pages, one that gives way.
DEMO_SETTINGS: Mapping[str, Any] = {
    "page_size": 4,
    "num_blocks": 48,
    "max_batch_tokens": 16,
    "max_requests_per_batch": 3,
}
_GARDEN = "In the garden behind the old house there is a tall tree, and under the tree there is a"
_DEMO: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("sea", "The sea is", {"max_tokens": 9}),
    ("count", "One, two, three,", {"max_tokens": 3}),
    ("garden", _GARDEN, {"max_tokens": 6}),
    ("garden again", f"{_GARDEN} red", {"max_tokens": 5}),
    ("capital", "The capital of France is", {"max_tokens": 8, "stop": ["."]}),
)


def demo_requests() -> list[Request]:
    return [
        Request(
            index=index,
            custom_id=name,
            endpoint=Endpoint.COMPLETIONS,
            body={"prompt": prompt, "temperature": 0, **fields},
        )
        for index, (name, prompt, fields) in enumerate(_DEMO)
    ]


@dataclass(frozen=True, slots=True)
class Trace:
    """What came of it. ``failures`` by request. Not ``is_whole``: enough was seen before the last request had ended."""

    log: StepLog
    engine: Engine
    failures: Mapping[str, RequestError]
    is_whole: bool

    def view(self, encoding: str, width: int = WIDTH) -> View:
        return View(self.engine.vocabulary, self.engine.pool.windows, encoding, width)

    def opening(self) -> str:
        """The engine in one line."""
        engine, config = self.engine, self.engine.config
        return (
            f"{visible(short_name(engine.model_name))}, {engine.dtype}; "
            f"a step has {engine.scheduler.max_batch_tokens:,} rows of "
            f"{plural(config.max_requests_per_batch, 'sequence')} at most, the cache {engine.pool.capacity:,} pages of "
            f"{plural(engine.pool.page_size, 'token')}"
        )

    def summary(self) -> str:
        """The engine's own counters in one line."""
        stats = self.engine.stats()  # it counts what was found for finished requests only, the log for all
        found = sum(e.cached for e in self.log.events if isinstance(e, Admitted) and not e.is_again)
        words = [
            plural(stats.steps, "step"),
            f"{plural(stats.prompt_tokens, 'prompt token')} computed",
            f"{found:,} found in the cache",
            f"{stats.generated_tokens:,} generated",
            plural(stats.preemptions, "preemption"),
        ]
        if stats.preemptions:
            words.append(f"{plural(stats.recomputed_tokens, 'row')} computed again")
        return ", ".join(words) + ("" if self.is_whole else "; not run to the end")


def trace(
    model: str, config: EngineConfig, requests: Sequence[Request] | None = None, *, pictures: int | None, whole: bool
) -> Trace:
    """Run the requests, or the built-in ones, and note what the engine does.

    Args:
        pictures: Keep what this many pictures need, None for a timeline alone.
        whole: Go on to the end of the last request when that is enough.

    Raises:
        UsageError: The model or a setting cannot be used.
    """
    engine = Engine(model, config)
    if requests is None:
        requests = demo_requests()
        # Nobody waits for room in advance, so that a small cache shows who gives way.
        engine.scheduler.expected_answer_share = 0.0
    try:
        engine.warmup()
        log = engine.observer = StepLog(engine.scheduler, packs=pictures is not None)
        failures = _add(engine, requests)
        while engine.has_work:
            _note_failures(engine.step(), failures)
            if log.packs and pictures is not None and log.eventful_steps >= pictures:
                log.packs = False
                if not whole:
                    break
        _note_failures(engine.settle(), failures)
    finally:
        engine.close()
    log.close()
    return Trace(log, engine, failures, not engine.has_work)


def _add(engine: Engine, requests: Sequence[Request]) -> dict[str, RequestError]:
    """Queue what can be run; the reasons why the others cannot."""
    failures: dict[str, RequestError] = {}
    for request in requests:
        try:
            engine.add(EngineRequest(request.custom_id, encode(engine, request), request.sampling))
        except PromptError as reason:
            failures[request.custom_id] = reason.error
        except InvalidParameter as reason:
            failures[request.custom_id] = RequestError(code="invalid_request", message=str(reason))
    return failures


def _note_failures(outputs: Sequence[EngineOutput], failures: dict[str, RequestError]) -> None:
    for output in outputs:
        for choice in output.choices:
            if choice.error is not None:
                failures[str(output.request_id)] = choice.error
