"""What an engine did, step by step, as its observer was told: the facts that pictures and timelines are made of.

Kept true here:
- Nothing is worked out that the engine did not say. The packed rows of a step are those of its plan, by the same
  function and at the same moment as the engine's own.
- Token ids are looked up when they are shown: with async batching a step is planned before its input is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from workers.engine.batch import pack
from workers.engine.observer import EngineObserver

if TYPE_CHECKING:
    from batchjobs.types import FinishReason, RequestError
    from workers.engine.attention.interface import PackedRows
    from workers.engine.scheduler import Scheduled, Scheduler
    from workers.engine.sequence import Sequence

Span: TypeAlias = tuple[float, float]
"""Start and end, in seconds by the monotonic clock."""


@dataclass(slots=True, eq=False)
class Traced:
    """One sequence under observation. ``label`` is A, B, C … in the order of first admission."""

    label: str
    sequence: Sequence
    ended_at_step: int | None = None  # the step that was collected last when it left

    @property
    def name(self) -> str:
        """Its request's id, with the number of the choice where there are several."""
        request, choice = self.sequence.request, self.sequence.choice
        return f"{request.request_id}" + (f", choice {choice}" if request.sampling.n > 1 else "")

    def token(self, position: int) -> int | None:
        """The token there, or None when none was ever sampled."""
        tokens = self.sequence.tokens
        return tokens[position] if position < len(tokens) else None


@dataclass(frozen=True, slots=True)
class Admitted:
    """``cached`` of its ``tokens`` were found in the prefix tree, ``restored`` came back from CPU memory."""

    at: float
    who: Traced
    slot: int
    tokens: int
    cached: int
    restored: int
    is_again: bool
    previous: Traced | None  # who had the slot before


@dataclass(frozen=True, slots=True)
class GaveWay:
    at: float
    who: Traced
    slot: int
    computed: int
    offloaded: bool


@dataclass(frozen=True, slots=True)
class Left:
    """``slot`` is -1 for a sequence that was not running."""

    at: float
    who: Traced
    slot: int
    reason: FinishReason
    tokens: int
    error: RequestError | None


Event: TypeAlias = Admitted | GaveWay | Left


@dataclass(slots=True)
class Part:
    """A sequence's rows in one step, and the token that they gave."""

    who: Traced
    first: int
    count: int
    slot: int
    prompt_rows: int
    again: int
    samples: bool
    sampled: int | None = None

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.prompt_rows == 0 and self.again == 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Figures at the end of a step's planning."""

    running: int
    waiting: int
    pages_used: int


@dataclass(slots=True)
class Step:
    """``before`` is what its planning did, ``after`` what its tokens did. ``rows`` by group of layers, if kept."""

    number: int
    parts: list[Part]
    planned: Span
    gauges: Gauges
    before: list[Event]
    rows: list[PackedRows]
    after: list[Event] = field(default_factory=list)
    computed: Span | None = None

    @property
    def num_rows(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def prompt_rows(self) -> int:
        return sum(part.prompt_rows for part in self.parts)

    def is_dropped(self, part: Part) -> bool:
        """Whether the sequence had ended when this step was collected: it was planned before that was known."""
        return part.who.ended_at_step is not None and part.who.ended_at_step < self.number

    def only_goes_on(self, previous: Step) -> bool:
        """Whether it gives the same sequences one more token each, as the step before did, and nothing else happens."""
        return (
            not self.before
            and not self.after
            and [p.who for p in self.parts] == [p.who for p in previous.parts]
            and all(p.is_decode for p in (*self.parts, *previous.parts))
            and not any(self.is_dropped(p) for p in self.parts)
        )


class StepLog(EngineObserver):
    """Notes everything. ``packs``: keep the packed rows of each step too, for pictures of them."""

    def __init__(self, scheduler: Scheduler, *, packs: bool = False) -> None:
        self.packs = packs
        self.steps: list[Step] = []
        self.events: list[Event] = []
        self.began = time.monotonic()
        self.ended = self.began
        self._scheduler = scheduler
        self._traced: dict[int, Traced] = {}  # by the sequence's identity; each is kept, so none is used twice
        self._occupants: dict[int, Traced] = {}  # the last one of each slot
        self._before: list[Event] = []
        self._collected: Step | None = None
        self._parts: dict[int, Part] = {}  # of the step that was collected last
        self._settled = self._eventful = 0

    @property
    def sequences(self) -> list[Traced]:
        return list(self._traced.values())

    @property
    def eventful_steps(self) -> int:
        """How many of the steps before the newest two, which may still change, do more than go on."""
        for index in range(self._settled, len(self.steps) - 2):
            self._eventful += index == 0 or not self.steps[index].only_goes_on(self.steps[index - 1])
            self._settled = index + 1
        return self._eventful

    def close(self) -> None:
        """The engine has nothing more to do."""
        self.ended = time.monotonic()

    # What the engine tells

    def admitted(self, sequence: Sequence) -> None:
        is_again = id(sequence) in self._traced
        who, slot = self._who(sequence), sequence.slot
        cached = min(sequence.registered * self._scheduler.pool.page_size, sequence.computed)
        restored = sequence.computed - cached
        previous = self._occupants.get(slot)
        tokens = len(sequence.tokens)
        self._note(Admitted(time.monotonic(), who, slot, tokens, cached, restored, is_again, previous), self._before)
        self._occupants[slot] = who

    def preempted(self, sequence: Sequence, *, offloaded: bool) -> None:
        now, who = time.monotonic(), self._who(sequence)
        self._note(GaveWay(now, who, sequence.slot, sequence.computed, offloaded), self._before)

    def left(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        who, step = self._who(sequence), self._collected
        who.ended_at_step = step.number if step is not None else 0
        left = Left(time.monotonic(), who, sequence.slot, sequence.finish_reason, sequence.generated, sequence.error)
        self._note(left, step.after if step is not None else self._before)

    def planned(self, step: int, plan: SequenceOf[Scheduled], started: float, ended: float) -> None:
        pool, tables = self._scheduler.pool, self._scheduler.tables
        gauges = Gauges(len(self._scheduler.running), self._scheduler.num_waiting, pool.capacity - pool.free)
        parts = [
            Part(self._who(p.sequence), p.first, p.count, p.slot, p.prompt_tokens, p.again, p.samples) for p in plan
        ]
        rows = pack(plan, tables, pool.page_size).rows if self.packs else []
        self.steps.append(Step(step, parts, (started, ended), gauges, self._before, rows))
        self._before = []

    def computed(self, step: int, started: float, ended: float) -> None:
        self._collected = next(known for known in reversed(self.steps) if known.number == step)
        self._collected.computed = (started, ended)
        self._parts = {id(part.who.sequence): part for part in self._collected.parts}

    def sampled(self, step: int, sequence: Sequence, token: int) -> None:
        self._parts[id(sequence)].sampled = token

    def _note(self, event: Event, place: list[Event]) -> None:
        self.events.append(event)
        place.append(event)

    def _who(self, sequence: Sequence) -> Traced:
        known = self._traced.get(id(sequence))
        if known is None:
            known = self._traced[id(sequence)] = Traced(_letters(len(self._traced)), sequence)
        return known


def chapters(steps: SequenceOf[Step]) -> Iterator[tuple[Step, list[Step]]]:
    """The steps that were computed: each eventful one, with those after it that only go on from it."""
    eventful: Step | None = None
    following: list[Step] = []
    for step in steps:
        if step.computed is None:
            continue
        if eventful is not None and step.only_goes_on(following[-1] if following else eventful):
            following.append(step)
            continue
        if eventful is not None:
            yield eventful, following
        eventful, following = step, []
    if eventful is not None:
        yield eventful, following


def _letters(number: int) -> str:
    """A to Z, then AA, AB, …"""
    letters = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters
