"""Does the fuzz find bugs? Plausible ones are put into the engine, one at a time, and random cases run until one fails.

python -m tests.fuzz.mutants [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from batchjobs.types import FinishReason
from tests.fuzz.drive import run_case
from tests.fuzz.engine_cases import draw_case
from tests.fuzz.models import Models
from workers.engine import engine, pipeline, runner, sampling_rows, sequence
from workers.engine.engine import Engine
from workers.engine.inflight import Transition
from workers.engine.offload import HostCache
from workers.engine.page_tables import PageTables
from workers.engine.pages import PagePool
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.engine.text import StopMatcher

MOST_CASES = 300
"""A bug that so many cases do not show counts as missed."""

Mutation = Callable[[], AbstractContextManager[Any]]
MUTANTS: dict[str, Mutation] = {}


def mutant(mutation: Mutation) -> Mutation:
    MUTANTS[mutation.__name__] = mutation
    return mutation


def changed(owner: Any, name: str, wrapper: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``wrapper(original, *arguments)`` instead of a function or method."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


# Packing


def packed(change: Callable[..., None]) -> AbstractContextManager[Any]:
    """``change(batch, index, part, rows)`` is called for every part of every packed step."""

    def pack(original: Callable[..., Any], plan: Any, *rest: Any) -> Any:
        batch, start = original(plan, *rest), 0
        for index, part in enumerate(plan):
            change(batch, index, part, slice(start, start + part.count))
            start += part.count
        return batch

    return changed(engine, "pack", pack)


@mutant
def positions_off_by_one_after_resuming() -> AbstractContextManager[Any]:
    def change(batch: Any, _index: int, part: Any, rows: slice) -> None:
        batch.positions[rows] += part.again > 0

    return packed(change)


@mutant
def positions_restart_with_each_chunk() -> AbstractContextManager[Any]:
    def change(batch: Any, _index: int, part: Any, rows: slice) -> None:
        batch.positions[rows] -= part.first if part.count > 1 else 0

    return packed(change)


@mutant
def tokens_fed_from_the_wrong_slot() -> AbstractContextManager[Any]:
    def change(batch: Any, index: int, _part: Any, _rows: slice) -> None:
        if index == 0:
            batch.fed_slots[:] = np.roll(batch.fed_slots, 1)

    return packed(change)


@mutant
def scores_take_the_token_itself() -> AbstractContextManager[Any]:
    def change(batch: Any, index: int, part: Any, _rows: slice) -> None:
        if index == 0 and part.first and part.scores:
            batch.scored_tokens[: part.scores] = [part.sequence.tokens[r] for r in part.scored_rows]

    return packed(change)


# Pages


@mutant
def two_pages_swapped_in_a_long_table() -> AbstractContextManager[Any]:
    def of(original: Callable[..., Any], *args: Any) -> Any:
        table = original(*args)
        return table[:, [1, 0, *range(2, table.shape[1])]] if table.shape[1] > 4 else table

    return changed(PageTables, "of", of)


@mutant
def prefix_taken_for_one_page_longer() -> AbstractContextManager[Any]:
    def start(original: Callable[..., Any], self: Scheduler, sequence: Sequence, prefix: Any) -> None:
        original(self, sequence, prefix)
        if prefix.length and sequence.pending > self.pool.page_size:
            sequence.computed += self.pool.page_size

    return changed(Scheduler, "_start_running", start)


@mutant
def prefix_compared_by_its_last_page_only() -> AbstractContextManager[Any]:
    def register(original: Callable[..., Any], self: PagePool, _parent: int, tokens: Any, pages: Any) -> int:
        original(self, self.root, tokens, pages)
        return self.root

    return changed(PagePool, "register", register)


@mutant
def pages_leak_where_a_sequence_had_many() -> AbstractContextManager[Any]:
    def give_back(original: Callable[..., Any], self: PagePool, pages: Any) -> None:
        original(self, pages[:-1] if len(pages) > 8 else pages)

    return changed(PagePool, "give_back", give_back)


@mutant
def shared_pages_given_to_others() -> AbstractContextManager[Any]:
    def hold(_original: Callable[..., Any], self: PagePool, pages: Any) -> None:
        for page in filter(None, pages):
            self._holders[page] += 1  # and it stays among the idle ones, to be evicted

    return changed(PagePool, "hold", hold)


@mutant
def window_forgotten() -> AbstractContextManager[Any]:
    def probe(original: Callable[..., Any], *args: Any) -> Any:
        return [(module, replace(spec, sliding_window=None)) for module, spec in original(*args)]

    return changed(runner, "probe_layers", probe)


@mutant
def pages_behind_a_window_freed_too_early() -> AbstractContextManager[Any]:
    def first_seen(original: Callable[..., Any], self: PagePool, group: int, position: int) -> int:
        return int(original(self, group, position + 2))

    return changed(PagePool, "first_seen", first_seen)


# Giving way


@mutant
def token_in_flight_forgotten_when_giving_way() -> AbstractContextManager[Any]:
    def accept(original: Callable[..., Any], self: Sequence, token: int, *rest: Any) -> None:
        original(self, self.tokens[-1] if self.slot < 0 and not self.is_finished else token, *rest)

    return changed(Sequence, "accept", accept)


@mutant
def first_page_not_copied_to_or_from_the_host() -> AbstractContextManager[Any]:
    def copy(original: Callable[..., Any], self: HostCache, copies: Any) -> None:
        original(self, [replace(c, device=c.device[1:] or c.device, host=c.host[1:] or c.host) for c in copies])

    return changed(HostCache, "copy", copy)


@mutant
def host_pages_leak_when_a_waiting_sequence_ends() -> AbstractContextManager[Any]:
    def finish(original: Callable[..., Any], self: Scheduler, sequence: Sequence) -> None:
        sequence.offloaded = None
        original(self, sequence)

    return changed(Scheduler, "finish", finish)


@mutant
def a_cancel_ends_the_first_choice_only() -> AbstractContextManager[Any]:
    def end(original: Callable[..., Any], self: Engine, sequence: Sequence, reason: FinishReason) -> None:
        if reason is not FinishReason.CANCELLED or sequence.choice == 0:
            original(self, sequence, reason)

    return changed(Engine, "_end", end)


# Sampling and text


@mutant
def seed_ignores_the_choice() -> AbstractContextManager[Any]:
    return changed(sequence, "stream", lambda original, seed, _choice: original(seed, 0))


@mutant
def draws_depend_on_the_neighbours() -> AbstractContextManager[Any]:
    def rows(original: Callable[..., Any], *args: Any) -> Any:
        made = original(*args)
        made.point.sort()
        return made

    return changed(pipeline, "sampling_rows", rows)


@mutant
def penalties_lag_one_token_behind() -> AbstractContextManager[Any]:
    def accept(original: Callable[..., Any], self: Sequence, token: int, *rest: Any) -> None:
        last = self.tokens[-1] if self.generated else None
        original(self, token, *rest)
        if token in self.uses:
            self.uses.subtract([token])
            self.uses.update([last] if last is not None else [])

    return changed(Sequence, "accept", accept)


@mutant
def ends_allowed_one_token_early() -> AbstractContextManager[Any]:
    def process(original: Callable[..., Any], rows: Any, row: int, sequence: Sequence, vocab_size: int) -> None:
        original(rows, row, sequence, vocab_size)
        if sequence.generated == sequence.request.sampling.min_tokens - 1:
            rows.banned = sampling_rows.Cells()

    return changed(sampling_rows, "_process", process)


@mutant
def stop_strings_found_within_two_tokens_only() -> AbstractContextManager[Any]:
    def feed(original: Callable[..., Any], self: StopMatcher, *args: Any) -> bool:
        del self._seen[:-1]
        return bool(original(self, *args))

    return changed(StopMatcher, "feed", feed)


@mutant
def last_token_not_streamed() -> AbstractContextManager[Any]:
    def stream(original: Callable[..., Any], self: Engine, sequence: Sequence) -> None:
        if not sequence.is_finished:
            original(self, sequence)

    return changed(Engine, "_stream", stream)


# Updates


@mutant
def prefixes_outlive_an_update() -> AbstractContextManager[Any]:
    return changed(PagePool, "forget", lambda original, pool: None)


@mutant
def what_runs_keeps_its_cache_in_an_update() -> AbstractContextManager[Any]:
    return changed(Transition, "_recompute", lambda original, transition, sequence: None)


class Hunt:
    """Runs cases that pass without a mutation, so that what fails is the mutation's doing."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._passes: dict[int, bool] = {}

    def first_failure(self, mutation: Mutation) -> tuple[int, str] | None:
        """The first case that fails with the mutation, and what was wrong; None if none of the cases shows it."""
        for seed in range(MOST_CASES):
            if not self._clean(seed):
                continue
            with mutation():
                report = run_case(draw_case(seed), self._models)
            if report.problems:
                return seed, report.problems[0]
        return None

    def _clean(self, seed: int) -> bool:
        if seed not in self._passes:
            self._passes[seed] = not run_case(draw_case(seed), self._models).problems
        return self._passes[seed]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], help="default: all")
    names = parser.parse_args().names or list(MUTANTS)
    missed = 0
    with Models() as models:
        hunt = Hunt(models)
        for name in names:
            began = time.monotonic()
            found = hunt.first_failure(MUTANTS[name])
            missed += found is None
            what = f"case {found[0]}: {found[1].splitlines()[0][:140]}" if found else f"MISSED in {MOST_CASES} cases"
            print(f"{name:52} {what} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(names) - missed} of {len(names)} mutants found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
