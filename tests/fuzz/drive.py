"""Runs a case on an engine, watches every step, and judges what comes out."""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

from tests.fuzz.checks import Terms, Verdict, judge, judge_deltas, refusal
from tests.fuzz.engine_cases import STRANGER, Case, CaseRequest, Event
from tests.fuzz.models import FuzzModel, Models
from tests.fuzz.reference import Solo, SplicedSolo
from tests.support.rehearsal import rehearsed_path
from workers.engine import Engine, EngineConfig, EngineOutput, EngineRequest, StagedModel, UpdateRefused
from workers.engine.attention.torch_paged import TorchPagedAttention
from workers.engine.observer import EngineObserver
from workers.engine.pages import PagePool
from workers.engine.scheduler import Scheduled
from workers.engine.sequence import Sequence as EngineSequence

STEPS_PER_TOKEN = 3
"""A case whose steps exceed this share of its tokens thrashes: every step has to bring the oldest sequence forward."""
GIB = 2**30

Log = Callable[[str], None]


class Broken(Exception):
    """The engine did something that no outcome could make good."""


@dataclass(slots=True)
class Report:
    """What a case showed. ``counts`` tell which paths were met."""

    case: Case
    verdict: Verdict = field(default_factory=Verdict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems


class Watch(EngineObserver):
    """Checks every plan, and counts. ``zombies`` are rows whose sequence ended while they were computed."""

    def __init__(self, case: Case, counts: Counter[str], log: Log) -> None:
        self._case, self._counts, self._log = case, counts, log

    def planned(self, step: int, plan: Sequence[Scheduled], started: float, ended: float) -> None:
        rows, limit = sum(part.count for part in plan), self._case.settings["max_batch_tokens"]
        self._log(f"  step {step}: " + " ".join(map(_part, plan)))
        if rows > limit or len(plan) > self._case.settings["max_requests_per_batch"]:
            raise Broken(f"step {step} has {rows} rows of {len(plan)} sequences")
        if len({id(part.sequence) for part in plan}) < len(plan) or any(part.count < 1 for part in plan):
            raise Broken(f"step {step} has a sequence twice or an empty part")
        self._counts["steps"] += 1
        self._counts["steps of a device"] += self._case.rehearsed
        self._counts["rows"] += rows
        self._counts["chunks"] += sum(part.first + part.count < part.sequence.prompt_len for part in plan)
        self._counts["drawn"] += sum(part.samples for part in plan)

    def admitted(self, sequence: EngineSequence) -> None:
        self._log(f"  {_name(sequence)} runs in slot {sequence.slot} with {sequence.computed} tokens found")
        self._counts["prefix hits"] += sequence.computed > 0

    def preempted(self, sequence: EngineSequence, *, offloaded: bool) -> None:
        self._log(f"  {_name(sequence)} gives way{', offloaded' if offloaded else ''}")
        self._counts["preemptions"] += 1
        self._counts["offloads"] += offloaded

    def left(self, sequence: EngineSequence) -> None:
        self._log(f"  {_name(sequence)} ends: {sequence.finish_reason}")

    def sampled(self, step: int, sequence: EngineSequence, token: int) -> None:
        self._counts["kept"] += 1


def _name(sequence: EngineSequence) -> str:
    return f"{sequence.request.request_id}.{sequence.choice}"


def _part(part: Scheduled) -> str:
    return f"{_name(part.sequence)}[{part.first}:{part.first + part.count}]{'*' if part.samples else ''}"


def run_case(case: Case, models: Models, log: Log = lambda line: None) -> Report:
    """Everything that the case says, once or twice on one engine. Whatever goes wrong is a problem of the report."""
    report = Report(case)
    model = models.get(case.family, case.weights, poisoned=case.poisoned)
    try:
        engine = build_engine(case, model)
        updates = _Updates(case, engine, models) if case.is_updated else None
        try:
            for run in range(case.runs):
                log(f"run {run + 1}")
                _Run(case, engine, model, updates, report, log).play()
            if updates is not None:
                updates.undo()
        finally:
            engine.close()
    except Exception as error:  # noqa: BLE001  # the next case has to run whatever this one raised
        at = "".join(traceback.format_tb(error.__traceback__)[-3:])
        report.verdict.problem("the engine", f"raised {type(error).__name__}: {error}\n{at}")
        if case.is_updated:
            models.forget(case.family)
    report.counts["cases"] += 1
    return report


def build_engine(case: Case, model: FuzzModel) -> Engine:
    """With the pages that the case asks for: so many beside those of its largest request."""
    size = case.settings["page_size"]
    with patch("workers.engine.engine.load_model", lambda *_, **__: model.loaded):
        probe = Engine(case.family, EngineConfig(device="cpu", page_size=size, num_blocks=2, cpu_offload_space=0))
        probe.close()
        largest = max(_pages(case, index, probe.pool, probe.max_model_len) for index in range(len(case.requests)))
        chosen = choose_attention(case.compiled)
        rehearsed = patch("workers.engine.runner.path_of", rehearsed_path) if case.rehearsed else nullcontext()
        with patch("workers.engine.runner.choose_backend", chosen) if chosen else nullcontext(), rehearsed:
            return Engine(
                case.family,
                EngineConfig(
                    device="cpu",
                    num_blocks=max(2, 1 + largest + case.spare_pages),
                    cpu_offload_space=case.offload_pages * probe.runner.cache.page_bytes / GIB,
                    **case.settings,
                ),
            )


def choose_attention(compiled: bool) -> Callable[..., TorchPagedAttention] | None:
    return None if compiled else lambda *_: TorchPagedAttention()


def _pages(case: Case, index: int, pool: PagePool, max_model_len: int) -> int:
    """Pages that a request holds at most. The last token of an answer is never computed."""
    request = case.requests[index]
    context = min(case.settings["max_model_len"] or max_model_len, max_model_len)
    tokens = max(0, min(len(request.prompt) + request.sampling.max_tokens, context) - 1)
    return pool.pages_at_most(tokens, case.settings["max_batch_tokens"])


class _Updates:
    """From one model of the family to the other, and back again at the end."""

    def __init__(self, case: Case, engine: Engine, models: Models) -> None:
        self._engine, self._first = engine, engine.model_version
        other = models.get(case.family, 1 - case.weights, poisoned=case.poisoned)
        spare = models.spare(case.family, 1 - case.weights, poisoned=case.poisoned)
        self._staged = StagedModel(spare, None, engine.runner.model, None)
        first = models.get(case.family, case.weights, poisoned=case.poisoned)
        self.solos = {self._first: first.solo, spare.version: other.solo}

    def update(self, policy: str) -> None:
        """Raises UpdateRefused."""
        self._engine.update_model(self._staged, inflight=policy)

    def undo(self) -> None:
        if self._engine.model_version != self._first:
            self.update("restart")


class _Run:
    """One time through the events of a case."""

    def __init__(
        self, case: Case, engine: Engine, model: FuzzModel, updates: _Updates | None, report: Report, log: Log
    ) -> None:
        self.case, self.engine, self.solo, self.log = case, engine, model.solo, log
        self.updates = updates
        self.ended_before: dict[str, str] = {}  # by request id, until it is judged: the version that an update ended
        self.verdict, self.counts = report.verdict, report.counts
        self.live: dict[str, int] = {}  # request id -> index of the request that has it now
        self.deltas: dict[int, list[tuple[int, int, float, float]]] = {}
        self.pages = [_pages(case, i, engine.pool, engine.max_model_len) for i in range(len(case.requests))]

    def play(self) -> None:
        self.engine.observer = Watch(self.case, self.counts, self.log)
        if self.case.optimistic:
            self.engine.scheduler.expected_answer_share = 0.0
        events = list(self.case.events)
        for step in itertools.count():
            while events and events[0].step <= step:
                self._happen(events.pop(0))
            if not events and not self.engine.has_work:
                break
            self._take(self.engine.step())
            if step > self._most_steps():
                raise Broken(f"no end after {step} steps; {sorted(self.live)} are left")
        self._empty()

    def _most_steps(self) -> int:
        most = sum((len(r.prompt) + r.sampling.max_tokens) * r.sampling.n for r in self.case.requests)
        return (100 + STEPS_PER_TOKEN * most) * (1 + sum(event.action == "update" for event in self.case.events))

    def _happen(self, event: Event) -> None:
        self.log(f"  {event.action} {self.case.requests[event.index].request_id if event.index >= 0 else ''}")
        if event.action == "add":
            self._add(event.index)
        elif event.action == "cancel":
            self._cancel(self.case.requests[event.index].request_id)
        elif event.action == "suspend":
            self.engine.suspend([self.case.requests[event.index].request_id])
            self.counts["suspended"] += self.engine.stats().suspended
        elif event.action == "resume":
            self.engine.resume([self.case.requests[event.index].request_id])
        elif event.action == "update":
            self._update(event.policy)
        elif event.action == "stray":
            if self.engine.cancel(STRANGER) is not None:
                raise Broken("a request that never was has been cancelled")
        else:
            self._take(self.engine.settle())

    def _update(self, policy: str) -> None:
        assert self.updates is not None
        before = self.engine.model_version
        with_tokens = len(self.engine.progress())
        try:
            self.updates.update(policy)
        except UpdateRefused as refused:
            if "are suspended, so they would never be finished" not in str(refused):
                raise
            self.counts["refused updates"] += 1
            return
        self.counts["updated answers"] += with_tokens
        self.ended_before |= {str(output.request_id): before for output in self.engine._ended}

    def _add(self, index: int) -> None:
        request = self.case.requests[index]
        self.live[request.request_id] = index
        self.engine.add(EngineRequest(request.request_id, request.prompt, request.sampling, request.stream))

    def _cancel(self, request_id: str) -> None:
        output = self.engine.cancel(request_id)
        if (output is None) != (request_id not in self.live):
            raise Broken(f"cancelling {request_id} gave {output}")
        if output is not None:
            self.counts["cancelled"] += 1
            self._judge(output, cancelled=True)

    def _take(self, outputs: Sequence[EngineOutput]) -> None:
        for delta in self.engine.take_deltas():
            known = self.deltas.setdefault(self.live[str(delta.request_id)], [])
            known.append((delta.choice, delta.token_id, delta.logprob, delta.token_time))
        for output in outputs:
            self._judge(output, cancelled=False)

    def _judge(self, output: EngineOutput, *, cancelled: bool) -> None:
        index = self.live.pop(str(output.request_id), None)
        if index is None:
            raise Broken(f"{output.request_id} ended and was not there")
        request, limit = self.case.requests[index], self.engine.max_model_len
        fits = self.pages[index] <= self.engine.pool.capacity
        terms = Terms(
            max_model_len=limit,
            page_size=self.case.settings["page_size"],
            sharing=self.case.settings["allow_block_sharing"],
            refusal=refusal(request, self.solo, max_model_len=limit, fits=fits),
            cancelled=cancelled,
        )
        version = self.ended_before.pop(str(output.request_id), self.engine.model_version)
        judge(request, output, lambda choice: self._solo(request, choice, version), terms, self.verdict)
        judge_deltas(request, output, self.deltas.pop(index, []), self.verdict)
        self.counts["refused"] += terms.refusal is not None
        self.counts["failed"] += output.error is not None and output.error.code == "non_finite_logits"
        self.counts["cached tokens"] += output.cached_tokens

    def _solo(self, request: CaseRequest, choice: EngineOutput, version: str) -> Solo:
        """Who judges it: its spans' models. Without a token that is the ``version`` that was there at its end."""
        if self.updates is None:
            return self.solo
        solos = self.updates.solos
        parts = [(span.from_token, solos[span.version]) for span in choice.version_spans] or [(0, solos[version])]
        return SplicedSolo(parts, len(request.prompt))

    def _empty(self) -> None:
        """Nothing is left: no request, no page on either side, no event."""
        engine, stats = self.engine, self.engine.stats()
        left = {
            "requests": len(self.live),
            "running": stats.running,
            "waiting": stats.waiting,
            "suspended": stats.suspended,
            "pages": engine.pool.capacity - engine.pool.free,
            "offloaded pages": stats.offloaded_pages,
            "outputs": len(engine.settle()),
            "deltas": len(engine.take_deltas()),
        }
        if any(left.values()):
            raise Broken(f"left at the end: { {k: v for k, v in left.items() if v} }")
        self.counts["zombies"] = self.counts["drawn"] - self.counts["kept"]
