"""What an engine did, as a timeline in the Trace Event Format, which Perfetto and chrome://tracing read.

One track for each slot (who had it, and within that every step it took part in), one for the device, one for the host's
planning, and counters. Times are whole microseconds since the log began. Within a track events are sorted, and they
nest or follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from batchjobs.text import shortened
from workers.step_log import Admitted, Event, GaveWay, Left, Part, Step, StepLog

Record: TypeAlias = dict[str, Any]

PROCESS, HOST, DEVICE, FIRST_SLOT = 1, 1, 2, 10
NAME_CHARACTERS = 80


@dataclass(slots=True)
class Occupancy:
    """The time in which a sequence has a slot; ``how`` it ends."""

    admitted: Admitted
    ended: float
    how: str = "unfinished"
    parts: list[tuple[Step, Part]] = field(default_factory=list)


def timeline(log: StepLog, *, process: str) -> Iterator[bytes]:
    """A JSON array in pieces, one event a line."""
    opening = b"[\n"
    for record in records(log, process=process):
        yield opening + orjson.dumps(record)
        opening = b",\n"
    yield b"\n]\n"


def records(log: StepLog, *, process: str) -> list[Record]:
    """The events as plain values: names of tracks first, then the rest by time, an outer span before its inner ones."""
    slots = occupancies(log)
    tracks = {HOST: "host: planning", DEVICE: "device: forward and sampling"}
    tracks |= {FIRST_SLOT + slot: f"slot {slot}" for slot in sorted({o.admitted.slot for o in slots})}
    draw = _Drawing(log.began)
    found = [draw.planning(step) for step in log.steps]
    found += [draw.computing(step) for step in log.steps if step.computed is not None]
    found += [counter for step in log.steps for counter in draw.counters(step)]
    found += [record for occupancy in slots for record in draw.occupancy(occupancy)]
    found.sort(key=lambda record: (record["ts"], -record.get("dur", 0)))
    return [*_names(process, tracks), *found]


def occupancies(log: StepLog) -> list[Occupancy]:
    """Who had which slot when, in order of admission, each with the steps that it took part in."""
    found: list[Occupancy] = []
    current: dict[int, Occupancy] = {}  # by slot
    for event in log.events:
        if isinstance(event, Admitted):
            current[event.slot] = Occupancy(event, log.ended)
            found.append(current[event.slot])
        elif (open_one := current.pop(event.slot, None)) is not None:
            open_one.ended, open_one.how = event.at, _how(event)
    _share_out(log, found)
    return found


def _how(event: Event) -> str:
    if isinstance(event, Left):
        return str(event.reason)
    return "preempted, offloaded" if isinstance(event, GaveWay) and event.offloaded else "preempted"


def _share_out(log: StepLog, found: list[Occupancy]) -> None:
    """Each part of a step belongs to the last occupancy of its sequence that began before the step was planned."""
    of_sequence: dict[str, list[Occupancy]] = {}
    for occupancy in found:
        of_sequence.setdefault(occupancy.admitted.who.label, []).append(occupancy)
    for step in log.steps:
        for part in step.parts:
            begun = [o for o in of_sequence[part.who.label] if o.admitted.at <= step.planned[1]]
            begun[-1].parts.append((step, part))


class _Drawing:
    """Turns what was noted into events."""

    def __init__(self, began: float) -> None:
        self._began = began

    def planning(self, step: Step) -> Record:
        args = {"step": step.number, "sequences": len(step.parts), "tokens": step.num_rows}
        return self._span(HOST, f"plan {step.number}", step.planned, args)

    def computing(self, step: Step) -> Record:
        assert step.computed is not None
        args = {
            "step": step.number,
            "tokens": step.num_rows,
            "prefill_rows": step.prompt_rows,
            "decode_rows": step.num_rows - step.prompt_rows,
            "recomputed_rows": sum(part.again for part in step.parts),
            "sampled": sum(part.sampled is not None for part in step.parts),
        }
        return self._span(DEVICE, f"step {step.number}", step.computed, args)

    def counters(self, step: Step) -> Iterator[Record]:
        gauges, at = step.gauges, self._microseconds(step.planned[1])
        for name, args in (
            ("sequences", {"running": gauges.running, "waiting": gauges.waiting}),
            ("KV cache", {"pages used": gauges.pages_used}),
        ):
            yield {"ph": "C", "name": name, "pid": PROCESS, "tid": 0, "ts": at, "args": args}

    def occupancy(self, occupancy: Occupancy) -> Iterator[Record]:
        admitted, track = occupancy.admitted, FIRST_SLOT + occupancy.admitted.slot
        args = {
            "request": admitted.who.name,
            "cached_tokens": admitted.cached,
            "restored_tokens": admitted.restored,
            "ended": occupancy.how,
        }
        span = admitted.at, occupancy.ended
        yield self._span(track, shortened(admitted.who.name, NAME_CHARACTERS), span, args)
        for step, part in occupancy.parts:
            if step.computed is not None:
                # With async batching a step may still run for a sequence that has lost its slot to another one.
                inside = max(step.computed[0], span[0]), min(step.computed[1], span[1])
                if inside[0] < inside[1]:
                    yield self._span(track, _kind(part), inside, _part(step, part))

    def _span(self, track: int, name: str, span: tuple[float, float], args: Record) -> Record:
        start, end = map(self._microseconds, span)
        return {"ph": "X", "name": name, "pid": PROCESS, "tid": track, "ts": start, "dur": end - start, "args": args}

    def _microseconds(self, moment: float) -> int:
        return int((moment - self._began) * 1e6)


def _kind(part: Part) -> str:
    return "decode" if part.is_decode else "prefill" if not part.again else "recompute"


def _part(step: Step, part: Part) -> Record:
    return {
        "step": step.number,
        "first_position": part.first,
        "tokens": part.count,
        "samples": part.samples,
        "dropped": step.is_dropped(part),
    }


def _names(process: str, tracks: dict[int, str]) -> Iterator[Record]:
    def name(kind: str, track: int, **args: object) -> Record:
        return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "ts": 0, "args": args}

    yield name("process_name", 0, name=process)
    for track, title in tracks.items():
        yield name("thread_name", track, name=title)
        yield name("thread_sort_index", track, sort_index=track)
