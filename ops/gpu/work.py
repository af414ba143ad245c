"""Whole workloads: this engine and transformers' continuous batching in turns, on the same weights in the same memory.

Every system makes exactly the asked number of tokens for every request, or its turn counts for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ops.gpu import shapes
from ops.gpu.notes import Found, Notes
from ops.gpu.peers import ContinuousBatching, Static
from ops.gpu.setup import Setup
from ops.gpu.speed import about
from workers.bench.bound import Machine, need
from workers.bench.system import OurEngine, System, WithoutSharing, warm_up
from workers.engine.config import EngineConfig
from workers.workloads import Work, workload

ROUNDS = {"mixed-64": 2, "prefix": 1, "random-1024-128": 2}
"""The beginnings of `prefix` may lie in the peer's cache after its first turn."""
RESERVE_SECONDS = 10.0  # of a section, which the peer's turns leave to what follows them
STATIC_SEQUENCES = 64


@dataclass(slots=True)
class Seconds:
    """Of a workload's turns: this engine's first one, and those of each round in which both did all the work."""

    alone: float | None = None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def turns(self) -> int:
        return len(self.ours)

    def add(self, ours: Found | None, theirs: Found | None) -> None:
        """A round. Where one of the two did not do its work there will be no other."""
        if ours is None or theirs is None:
            self.is_over = True
            return
        self.ours.append(ours["seconds"])
        self.theirs.append(theirs["seconds"])


@dataclass(slots=True)
class Systems:
    ours: OurEngine
    peer: ContinuousBatching
    static: Static


def section(notes: Notes, setup: Setup, shape: shapes.Shape) -> None:
    sequences = 3 if setup.tiny else shape.sequences
    works = {name: drawn(name, sequences, tiny=setup.tiny) for name in ROUNDS}

    def start() -> tuple[Systems, Found]:
        systems = _systems(setup, shape, sequences, works)
        warm_up(systems.ours, works["mixed-64"])
        return systems, about(systems.ours.engine)

    if (systems := notes.make("start", start, seconds=15)) is None:
        return
    ready = notes.run("peer is ready", lambda: _ready(systems.peer, works["mixed-64"]), seconds=20)
    found = _measure(notes, systems, works, with_peer=ready is not None)
    for name, seconds in found.items():
        if seconds.alone is not None:
            notes.run(name, partial(_summary, setup, systems.ours, works[name], seconds))
    unshared = partial(_turn, WithoutSharing(systems.ours), works["prefix"])
    notes.run("prefix, nothing shared", unshared, seconds=10 * (found["prefix"].alone or 1.0))
    systems.peer.close()
    _static(notes, systems, works["random-1024-128"])


def drawn(name: str, requests: int, *, tiny: bool) -> list[Work]:
    """The workload; a tiny one has the first tokens of its prompts and answers, in a small vocabulary."""
    work = workload(name, requests)
    if not tiny:
        return work
    vocab_size = shapes.small().vocab_size
    return [Work(tuple(i % vocab_size for i in item.prompt_ids[:20]), min(item.output_tokens, 4)) for item in work]


def _systems(setup: Setup, shape: shapes.Shape, sequences: int, works: dict[str, list[Work]]) -> Systems:
    longest = max(len(item.prompt_ids) + item.output_tokens for work in works.values() for item in work)
    config = shapes.small() if setup.tiny else shape.config()
    model = shapes.build(config, setup.device, torch.float32 if setup.tiny else torch.bfloat16)
    other = shapes.twin(model)
    other.set_attn_implementation("sdpa")
    engine_config = EngineConfig(max_requests_per_batch=sequences, max_model_len=longest + 1)
    ours = OurEngine(shapes.loaded(model, shape.name), engine_config)
    return Systems(
        ours,
        ContinuousBatching(other, sequences, longest, ours.engine.scheduler.max_batch_tokens),
        Static(other, min(STATIC_SEQUENCES, sequences)),
    )


def _ready(peer: ContinuousBatching, work: Sequence[Work]) -> Found:
    warm_up(peer, work)
    return {"attention": str(peer.model.config._attn_implementation)}


def _measure(
    notes: Notes, systems: Systems, works: Mapping[str, Sequence[Work]], *, with_peer: bool
) -> dict[str, Seconds]:
    """Every workload once by this engine; then, in as many rounds as there is time for, by the peer and by this engine
    again. The peer gives up a turn when its part of the time is over."""
    found = {name: Seconds() for name in works}
    for name, work in works.items():
        if (done := notes.run(f"{name}, batchjobs", partial(_turn, systems.ours, work), seconds=5)) is not None:
            found[name].alone = done["seconds"]
    turns = [name for turn in range(max(ROUNDS.values())) for name in works if turn < ROUNDS[name]] if with_peer else []
    for number, name in enumerate(turns, 1):
        seconds = found[name]
        if seconds.alone is None or seconds.is_over:
            continue
        systems.peer.limit_seconds = max(0.0, notes.left - RESERVE_SECONDS) / (len(turns) + 1 - number)
        label, expected = f"{name}, turn {seconds.turns + 1}", seconds.alone + max(seconds.theirs, default=0.0)
        theirs = notes.run(f"{label}, {systems.peer.name}", partial(_turn, systems.peer, works[name]), seconds=expected)
        ours = notes.run(f"{label}, batchjobs", partial(_turn, systems.ours, works[name]), seconds=seconds.alone)
        seconds.add(ours, theirs)
    return found


def _turn(system: System, work: Sequence[Work]) -> Found:
    done = system.run(work)
    wanted = [item.output_tokens for item in work]
    if done.made != wanted:
        wrong = sum(made != want for made, want in zip(done.made, wanted, strict=True))
        raise RuntimeError(f"{wrong} of {len(work)} answers do not have the asked number of tokens")
    return {"seconds": done.seconds, "output_tokens_per_second": sum(wanted) / done.seconds}


def _summary(setup: Setup, ours: OurEngine, work: Sequence[Work], seconds: Seconds) -> Found:
    """``faster_by`` is the median of the rounds' ratios: the systems took turns."""
    tokens, mine = sum(item.output_tokens for item in work), statistics.median(seconds.ours or [seconds.alone or 0.0])
    ratios = [other / own for own, other in zip(seconds.ours, seconds.theirs, strict=True)]
    found: Found = {
        "requests": len(work),
        "prompt_tokens": sum(len(item.prompt_ids) for item in work),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / mine,
        "peer_output_tokens_per_second": tokens / statistics.median(seconds.theirs) if ratios else None,
        "faster_by": statistics.median(ratios) if ratios else None,
        "bound_share": None,
    }
    flops, read = setup.peak("flops"), setup.peak("bytes_per_second")
    needed = need(ours.engine, work)
    if flops and read and needed is not None:
        found["bound_share"] = needed.seconds(Machine(flops, read)) / mine
    return found


def _static(notes: Notes, systems: Systems, work: Sequence[Work]) -> None:
    batches = -(-len(work) // systems.static.batch_size)
    longest = max(item.output_tokens for item in work)
    notes.run(
        f"random-1024-128, {systems.static.name}",
        lambda: _turn(systems.static, work),
        seconds=batches * (3 + longest * 0.05),
    )
