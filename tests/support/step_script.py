"""The real scheduler and step log without a model: answers are given. And what is drawn of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from batchjobs.types import SamplingParams, TokenText
from workers.engine.offload import HostPool
from workers.engine.pages import PagePool
from workers.engine.requests import EngineRequest
from workers.engine.scheduler import Scheduled, Scheduler
from workers.engine.sequence import Sequence
from workers.explain import explain
from workers.grid import View
from workers.step_log import StepLog


class Characters:
    """A vocabulary whose tokens are code points."""

    def text(self, token: int) -> TokenText:
        return (0xE2, 0x80) if token == 0x2014 else chr(token)


@dataclass
class Script:
    """The real scheduler and log, without a model: answers are given."""

    answers: dict[str, str]
    depth: int = 1
    pages: int = 40
    host: int = 0
    rows: int = 8
    slots: int = 2
    limits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            PagePool(self.pages, 4),
            max_batch_tokens=self.rows,
            max_requests_per_batch=self.slots,
            host=HostPool(self.host),
        )
        self.scheduler.expected_answer_share = 0.0
        self.log = self.scheduler.observer = StepLog(self.scheduler, packs=True)
        self.in_flight: tuple[int, list[Scheduled]] | None = None
        for prompt in self.answers:
            limit = self.limits.get(prompt, len(self.answers[prompt]))
            request = EngineRequest(f"<{prompt}>", tuple(map(ord, prompt)), SamplingParams(max_tokens=limit))
            self.scheduler.add(Sequence(request, limit=limit, seed=0, stop_ids=frozenset({ord(".")})))

    def run(self) -> StepLog:
        number = 0
        while self.scheduler.has_work:
            started = time.monotonic()
            plan = self.scheduler.schedule()
            if plan:
                number += 1
                self.log.planned(number, plan, started, time.monotonic())
            if self.depth == 2:
                self.collect()
            self.in_flight = (number, plan) if plan else None
            if self.depth == 1:
                self.collect()
        self.collect()
        self.log.close()
        return self.log

    def collect(self) -> None:
        if self.in_flight is None:
            return
        (number, plan), self.in_flight = self.in_flight, None
        started = time.monotonic()
        self.log.computed(number, started, time.monotonic())
        for part in plan:
            sequence = part.sequence
            if not part.samples:
                continue
            sequence.in_flight -= 1
            if sequence.is_finished:
                continue
            token = ord(self.answers["".join(map(chr, sequence.request.prompt_ids))][sequence.generated])
            sequence.accept(token, -1.0, None, time.monotonic())
            self.log.sampled(number, sequence, token)
            if sequence.is_finished:
                self.scheduler.finish(sequence)


def view(**changes: Any) -> View:
    return View(**({"vocabulary": Characters(), "windows": (None,)} | changes))


def told(log: StepLog, how: View | None = None, pictures: int = 99) -> str:
    return "\n".join(line.plain for line in explain(log, how or view(), pictures=pictures))
