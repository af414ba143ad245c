"""Which sequences take part in the next step, with how many tokens.

Strategy: decode rows first, then prefill chunks in the order of admission, inside ``max_batch_tokens``. Waiting
sequences are admitted in the order of the policy while a slot is free and the pages for their prompt and the expected
share of their answer are; the share is learned from finished requests. When pages run out in the middle, the sequence
admitted last gives its pages back and waits at the front: its tokens are computed again later, none is lost. A sequence
whose beginning is in the cache starts behind it.

Invariants:
- One sequence alone always fits (checked when it is added), and the oldest running one is never preempted: so every
  step computes something, and nothing waits for ever.
- The work of a step depends on the running sequences, never on the length of the queue.
- Only running sequences hold pages.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from batchjobs.types import FinishReason
from workers.engine.pages import PagePool, Prefix
from workers.engine.sequence import Sequence
from workers.engine.waiting import WaitingQueue

SHARE_MEMORY = 0.95  # weight of the past in the learned share of max_tokens that answers really use


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part in one step: its next ``count`` tokens, from ``first`` on."""

    sequence: Sequence
    first: int
    count: int

    @property
    def prompt_tokens(self) -> int:
        """How many of its tokens are the prompt's."""
        return max(0, min(self.count, self.sequence.prompt_len - self.first))

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after its last row: its computed tokens have caught up with the known ones."""
        return self.first + self.count == len(self.sequence.tokens)


class Scheduler:
    """Holds every live sequence: ``waiting`` in the order of its policy, ``running`` in order of admission."""

    def __init__(
        self, pool: PagePool, *, max_batch_tokens: int, max_requests_per_batch: int, policy: str = "fifo"
    ) -> None:
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.waiting = WaitingQueue(policy, pool.page_size)
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._by_id: dict[Hashable, Sequence] = {}
        self._free_slots = list(range(max_requests_per_batch - 1, -1, -1))
        self.expected_answer_share = 1.0

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._by_id

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self.running)

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.add(sequence)

    def schedule(self) -> list[Scheduled]:
        """Plan the next step. Takes the pages that it needs; an empty plan means that there is nothing to do."""
        self._admit()
        plan: list[Scheduled] = []
        left = self.max_batch_tokens
        for sequence in [*self._decoding(), *self._prefilling()]:
            count = min(sequence.pending, left)
            if count == 0 or sequence.slot < 0:  # no room left, or preempted for one before it
                continue
            if not self._reserve(sequence, sequence.computed + count, plan):
                continue
            plan.append(Scheduled(sequence, sequence.computed, count))
            left -= count
        return plan

    def computed(self, plan: list[Scheduled]) -> None:
        """The step of this plan has written its keys and values."""
        for part in plan:
            part.sequence.computed += part.count
            self._register_full_pages(part.sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it held."""
        del self._by_id[sequence.request.request_id]
        if sequence.slot >= 0:
            self._stop_running(sequence)
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            share = sequence.generated / sequence.limit
            self.expected_answer_share = SHARE_MEMORY * self.expected_answer_share + (1 - SHARE_MEMORY) * share

    def cancel(self, request_id: Hashable) -> Sequence | None:
        """End a sequence between two steps; None when it is not here (any more)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = FinishReason.CANCELLED
        self.finish(sequence)  # a waiting one is passed over when it comes up in the queue
        return sequence

    def _decoding(self) -> list[Sequence]:
        return [s for s in self.running if s.pending == 1]

    def _prefilling(self) -> list[Sequence]:
        return [s for s in self.running if s.pending > 1]

    def _admit(self) -> None:
        spare = self.pool.free - sum(self._expected_pages(s) for s in self.running)
        while self._free_slots and (sequence := self.waiting.next()) is not None:
            prefix = self._known_prefix(sequence)
            need = self._expected_pages(sequence) - sum(map(self.pool.is_held, prefix.pages))
            if need > spare and self.running:
                self.waiting.put_back(sequence)
                return
            self._start_running(sequence, prefix)
            spare -= need

    def _known_prefix(self, sequence: Sequence) -> Prefix:
        """Of its tokens one at least is left to compute: its logits are needed."""
        return self.pool.find(sequence.tokens[:-1])

    def _start_running(self, sequence: Sequence, prefix: Prefix) -> None:
        self.pool.hold(prefix.pages)
        sequence.pages = prefix.pages
        sequence.chain, sequence.registered = prefix.node, len(prefix.pages)
        sequence.computed = len(prefix.pages) * self.pool.page_size
        if sequence.started is None:
            sequence.cached_tokens = sequence.computed
        sequence.slot = self._free_slots.pop()
        sequence.start()
        self.running.append(sequence)

    def _register_full_pages(self, sequence: Sequence) -> None:
        size = self.pool.page_size
        while (sequence.registered + 1) * size <= sequence.computed:
            start = sequence.registered * size
            tokens = tuple(sequence.tokens[start : start + size])
            sequence.chain = self.pool.register(sequence.pages[sequence.registered], sequence.chain, tokens)
            sequence.registered += 1

    def _expected_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence will probably take beside those it holds."""
        answer = max(sequence.generated + 1, int(sequence.limit * self.expected_answer_share))
        return max(0, self.pool.pages_for(sequence.prompt_len + answer) - len(sequence.pages))

    def _reserve(self, sequence: Sequence, tokens: int, plan: list[Scheduled]) -> bool:
        """Give the sequence pages for its first ``tokens`` tokens, preempting younger ones; False if it gave way."""
        need = self.pool.pages_for(tokens) - len(sequence.pages)
        while need > self.pool.free:
            youngest = self.running[-1]
            if youngest is sequence and len(self.running) > 1:
                self._preempt(sequence)
                return False
            self._preempt(youngest)
            plan[:] = [part for part in plan if part.sequence is not youngest]
        if need > 0:
            sequence.pages += self.pool.take(need)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._stop_running(sequence)
        sequence.computed = 0
        self.waiting.put_back(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.give_back(sequence.pages)
        sequence.slot, sequence.pages = -1, []
