"""Which sequences take part in the next step, with how many tokens.

Strategy: decode rows first, then prefill chunks in the order of admission, inside ``max_batch_tokens``. Waiting
sequences are admitted in the order of the policy while a slot is free and the pages for their prompt and the expected
share of their answer are; the share is learned from finished requests. When pages run out in the middle, the sequence
admitted last gives way and waits at the front: its pages move to CPU memory while there is room, else its tokens are
computed again later; none is lost. A sequence whose beginning is in the cache starts behind it. The choices of a
request follow the first one when it has computed their prompt.

A suspended sequence takes no part. It keeps its slot and its pages until another one lacks them; then it gives way
first, and is parked: it does not wait for its turn, but comes first again when it is resumed.

A plan is made before the tokens of the step before it are known: what is planned counts as computed, and a token that
is being sampled counts as a token. Only a sequence whose tokens are all known is admitted.

Invariants:
- One sequence alone always fits (checked when it is added), suspended ones make room, and the oldest running one never
  gives way to another: so every step computes something or one is in flight, and nothing waits for ever.
- The work of a step depends on the running sequences, never on the length of the queue.
- Only running and suspended sequences hold pages; only waiting and parked ones hold host pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from batchjobs.types import FinishReason
from workers.engine.keeper import PageKeeper
from workers.engine.observer import EngineObserver
from workers.engine.offload import HostPool, PageCopy
from workers.engine.page_tables import PageTables
from workers.engine.pages import PagePool, Prefix
from workers.engine.sequence import Sequence
from workers.engine.waiting import WaitingQueue

SHARE_MEMORY = 0.95  # weight of the past in the learned share of max_tokens that answers really use
MAX_SCORED_ROWS = 512  # prompt rows of a step whose logits are kept: each is as long as the vocabulary


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part in one step: its next ``count`` tokens, from ``first`` on, in the slot it had then.

    ``samples``: a token is drawn after its last row. ``scores``: the number of ``scored_rows``, which tell how likely
    the prompt token after each of them was. ``again``: rows that were computed before.
    """

    sequence: Sequence
    first: int
    count: int
    slot: int = 0
    samples: bool = False
    scores: int = 0
    again: int = 0

    @property
    def prompt_tokens(self) -> int:
        """How many of its tokens are the prompt's."""
        return max(0, min(self.count, self.sequence.prompt_len - self.first))

    @property
    def scored_rows(self) -> range:
        """Positions of the rows whose logits score the prompt token after them."""
        last = min(self.first + self.count, self.sequence.prompt_len - 1)
        return range(last - self.scores, last)


class Scheduler:
    """Holds every live sequence: ``waiting`` in the order of its policy, ``running`` in order of admission.

    ``standing`` are the suspended ones that have a slot, in order of admission; ``parked`` those that have none and
    whose turn has come. A suspended one whose turn has not come is still among the waiting. While ``admits_unbegun`` is
    False, nothing begins that has not begun yet.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        policy: str = "fifo",
        host: HostPool | None = None,
        safety_margin: float = 0.0,
    ) -> None:
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self._margin = int(safety_margin * pool.capacity)  # pages that whoever begins leaves free, unless it is alone
        self.waiting = WaitingQueue(policy, pool.page_size)
        self.running: list[Sequence] = []
        self.standing: list[Sequence] = []
        self.parked: dict[Sequence, None] = {}
        self.suspended = 0  # choices
        self.admits_unbegun = True
        self.tables = PageTables(len(pool.windows), max_requests_per_batch)
        self.keeper = PageKeeper(pool, self.tables, host or HostPool(0))
        self.observer = EngineObserver()
        self.preemptions = self.offloads = 0
        self._live = self._admissions = 0
        self.unbegun = 0  # requests, not suspended, however many choices each asks for, of which nothing has run yet
        self._free_slots = list(range(max_requests_per_batch - 1, -1, -1))
        self.expected_answer_share = 1.0

    @property
    def host(self) -> HostPool:
        return self.keeper.host

    @host.setter
    def host(self, host: HostPool) -> None:
        self.keeper.host = host

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: what is suspended does not count, nor what may not begin."""
        if not self.admits_unbegun:
            return bool(self.running) or self.waiting.has_begun
        return self._live > self.suspended

    @property
    def num_waiting(self) -> int:
        return self._live - self.suspended - len(self.running)

    def add(self, sequence: Sequence, *, again: bool = False) -> None:
        """Queue a sequence; its followers come after it by themselves. One that begins ``again`` is the next one."""
        self._live += 1 + len(sequence.followers)
        if again:
            self.waiting.put_back(sequence)
            return
        self.unbegun += 1
        sequence.is_unbegun = True
        self.waiting.add(sequence)

    def suspend(self, sequences: Iterable[Sequence]) -> None:
        """Live sequences take no part any more. What they have computed stays theirs while there is room."""
        for sequence in sequences:
            if sequence.is_suspended:
                continue
            self.unbegun -= sequence.is_unbegun
            self.suspended += 1
            sequence.is_suspended = True
            if sequence.slot >= 0:
                self.running.remove(sequence)
                insort(self.standing, sequence, key=_admitted)

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """They go on: in their old order, and before whatever waits where they were parked."""
        parked: set[Sequence] = set()
        for sequence in sequences:
            if not sequence.is_suspended:
                continue
            self.unbegun += sequence.is_unbegun
            self.suspended -= 1
            sequence.is_suspended = False
            if sequence.slot >= 0:
                self.standing.remove(sequence)
                insort(self.running, sequence, key=_admitted)
            elif sequence in self.parked:
                parked.add(sequence)
        if not parked:
            return
        # By admission; those that never ran come behind, in the order in which their turn came.
        in_order = sorted((s for s in self.parked if s in parked), key=lambda s: s.admitted or self._admissions + 1)
        for sequence in reversed(in_order):
            del self.parked[sequence]
            self.waiting.put_back(sequence)

    def schedule(self) -> list[Scheduled]:
        """Plan the next step. Takes the pages that it needs; an empty plan means that nothing can be computed now."""
        self._admit()
        plan: list[Scheduled] = []
        left, scores_left = self.max_batch_tokens, MAX_SCORED_ROWS
        for sequence in self._in_order():
            if left == 0:
                break
            if sequence.slot < 0:  # it gave way to one before it
                continue
            if sequence.computed == 0:  # what it waited beside may have computed its beginning meanwhile
                self.keeper.take_prefix(sequence, self.keeper.known_prefix(sequence))
            part = self._part(sequence, left, scores_left)
            if part is None or not self._reserve(sequence, part.first + part.count, plan):
                continue
            plan.append(part)
            left -= part.count
            scores_left -= part.scores
        for part in plan:
            self._advance(part)
        return plan

    def take_copies(self) -> list[PageCopy]:
        """Copies between device and host pages that have to be made, in this order, before the plan runs."""
        return self.keeper.take_copies()

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended and free what it held."""
        self.parked.pop(sequence, None)
        self.resume((sequence,))
        self._live -= 1
        self._begin(sequence)
        self.observer.left(sequence)
        if sequence.slot >= 0:
            self._stop_running(sequence)
        self.keeper.drop_offloaded(sequence)
        self._release_followers(sequence)
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.limit:
            share = sequence.generated / sequence.limit
            self.expected_answer_share = SHARE_MEMORY * self.expected_answer_share + (1 - SHARE_MEMORY) * share

    # Planning

    def _in_order(self) -> list[Sequence]:
        """Decode rows first. A sequence whose last token is in flight has nothing to compute."""
        pending = [(s, s.pending) for s in self.running]
        return [s for s, n in pending if n == 1] + [s for s, n in pending if n > 1]

    def _part(self, sequence: Sequence, left: int, scores_left: int) -> Scheduled | None:
        first, count = sequence.computed, min(sequence.pending, left)
        scores = 0
        if sequence.scored < sequence.prompt_len:
            # Prompt tokens are scored in order, so that nothing is missing after a sequence gave way.
            count = min(count, scores_left)
            scores = max(0, min(first + count + 1, sequence.prompt_len) - max(sequence.scored, first + 1))
        if count == 0:
            return None
        length = sequence.length
        samples = first + count == length and length - sequence.prompt_len < sequence.limit
        again = max(0, min(sequence.reached - first, count))
        return Scheduled(sequence, first, count, sequence.slot, samples, scores, again)

    def _advance(self, part: Scheduled) -> None:
        sequence = part.sequence
        sequence.computed += part.count
        sequence.reached = max(sequence.reached, sequence.computed)
        sequence.in_flight += part.samples
        sequence.scored += part.scores
        self.keeper.register_full_pages(sequence)
        if sequence.followers and sequence.computed >= sequence.prompt_len:
            self._release_followers(sequence)

    def _release_followers(self, leader: Sequence) -> None:
        for follower in reversed(leader.followers):
            self.waiting.put_back(follower)
        leader.followers = []

    # Admission

    def _admit(self) -> None:
        spare: int | None = None  # pages that nobody is expected to need
        while (sequence := self._next()) is not None:
            if spare is None:
                spare = self.pool.free - self._margin - sum(self._expected_pages(s) for s in self.running)
            prefix = self.keeper.known_prefix(sequence)
            held = sum(self.pool.is_held(page) for pages in prefix.pages for page in pages if page)
            need = self._expected_pages(sequence) - held
            lacks_room = not self._free_slots or need > spare
            if not sequence.in_flight and lacks_room and self.standing:
                before = self.pool.free
                self._preempt(self.standing[-1])
                spare += self.pool.free - before
            elif sequence.in_flight or not self._free_slots or (need > spare and self.running):
                self.waiting.put_back(sequence)
                return
            else:
                self._start_running(sequence, prefix)
                spare -= need
                continue
            self.waiting.put_back(sequence)

    def _next(self) -> Sequence | None:
        """The one whose turn it is. Suspended ones whose turn has come are parked."""
        if not self._free_slots and not self.standing:
            return None
        while (sequence := self.waiting.next(unbegun=self.admits_unbegun)) is not None and sequence.is_suspended:
            self.parked[sequence] = None
        return sequence

    def _expected_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence will probably take beside those it holds."""
        answer = max(sequence.generated + 1, int(sequence.limit * self.expected_answer_share))
        most = self.pool.pages_at_most(sequence.prompt_len + answer, self.max_batch_tokens)
        held = sum(len(pages) for pages in sequence.pages) - sum(sequence.released)
        return max(0, most - held)

    def _start_running(self, sequence: Sequence, prefix: Prefix) -> None:
        self._admissions += 1
        sequence.slot, sequence.admitted = self._free_slots.pop(), self._admissions
        self.keeper.take_prefix(sequence, prefix)
        if sequence.offloaded is not None:
            self.keeper.bring_back(sequence, sequence.offloaded)
        self._begin(sequence)
        sequence.start()
        self.running.append(sequence)
        self.observer.admitted(sequence)

    def _begin(self, sequence: Sequence) -> None:
        self.unbegun -= sequence.is_unbegun
        sequence.is_unbegun = False

    # Pages

    def _reserve(self, sequence: Sequence, tokens: int, plan: list[Scheduled]) -> bool:
        """Give the sequence pages for its first ``tokens`` tokens; False if it gave way.

        Suspended sequences give way first, then younger ones.
        """
        self.keeper.release_behind_windows(sequence)
        needs = self.keeper.lacking(sequence, tokens)
        if not any(needs):
            return True
        while sum(needs) > self.pool.free:
            youngest = (self.standing or self.running)[-1]
            assert self.standing or len(self.running) > 1, "one sequence alone always fits"
            self._preempt(youngest)
            if youngest is sequence:
                return False
            plan[:] = [part for part in plan if part.sequence is not youngest]
        for group, need in enumerate(needs):
            self.keeper.give(sequence, group, self.pool.take(need))
        return True

    # Giving way

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        is_offloaded = self.keeper.offload(sequence)
        self.offloads += is_offloaded
        self.observer.preempted(sequence, offloaded=is_offloaded)
        self._stop_running(sequence)
        if sequence.is_suspended:
            self.parked[sequence] = None
        else:
            self.waiting.put_back(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not FinishReason.ERROR:  # an answer that failed may have left anything behind
            self.keeper.register_full_pages(sequence)
        (self.standing if sequence.is_suspended else self.running).remove(sequence)
        self.keeper.let_go(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1


def _admitted(sequence: Sequence) -> int:
    return sequence.admitted
