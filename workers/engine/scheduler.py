"""Which sequences take part in the next step, with how many tokens.

Strategy: decode rows first, then prefill chunks in the order of admission, inside ``max_batch_tokens``. Waiting
sequences are admitted in the order of the policy while a slot is free and the pages for their prompt and the expected
share of their answer are; the share is learned from finished requests. When pages run out in the middle, the sequence
admitted last gives way and waits at the front: its pages move to CPU memory while there is room, else its tokens are
computed again later; none is lost. A sequence whose beginning is in the cache starts behind it. The choices of a
request follow the first one when it has computed their prompt.

A plan is made before the tokens of the step before it are known: what is planned counts as computed, and a token that
is being sampled counts as a token. Only a sequence whose tokens are all known is admitted.

Invariants:
- One sequence alone always fits (checked when it is added), and the oldest running one never gives way to another: so
  every step computes something or one is in flight, and nothing waits for ever.
- The work of a step depends on the running sequences, never on the length of the queue.
- Only running sequences hold pages; only waiting ones hold host pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchjobs.types import FinishReason
from workers.engine.observer import EngineObserver
from workers.engine.offload import Direction, HostPool, Offloaded, PageCopy
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
    """Holds every live sequence: ``waiting`` in the order of its policy, ``running`` in order of admission."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        policy: str = "fifo",
        host: HostPool | None = None,
    ) -> None:
        self.pool = pool
        self.host = host or HostPool(0)
        self.max_batch_tokens = max_batch_tokens
        self.waiting = WaitingQueue(policy, pool.page_size)
        self.running: list[Sequence] = []
        self.tables = PageTables(len(pool.windows), max_requests_per_batch)
        self.observer = EngineObserver()
        self.preemptions = self.offloads = 0
        self._copies: list[PageCopy] = []
        self._live = 0
        self.unbegun = 0  # requests, however many choices each asks for, of which nothing has run yet
        self._free_slots = list(range(max_requests_per_batch - 1, -1, -1))
        self.expected_answer_share = 1.0

    @property
    def has_work(self) -> bool:
        return self._live > 0

    @property
    def num_waiting(self) -> int:
        return self._live - len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its followers come after it by themselves."""
        self._live += 1 + len(sequence.followers)
        self.unbegun += 1
        sequence.is_unbegun = True
        self.waiting.add(sequence)

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
                self._take_prefix(sequence, self._known_prefix(sequence))
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
        copies, self._copies = self._copies, []
        return copies

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended and free what it held."""
        self._live -= 1
        self._begin(sequence)
        self.observer.left(sequence)
        if sequence.slot >= 0:
            self._stop_running(sequence)
        if sequence.offloaded is not None:
            self.host.give_back(sequence.offloaded.held)
            sequence.offloaded = None
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
        samples = first + count == sequence.length and sequence.generated + sequence.in_flight < sequence.limit
        again = max(0, min(sequence.reached - first, count))
        return Scheduled(sequence, first, count, sequence.slot, samples, scores, again)

    def _advance(self, part: Scheduled) -> None:
        sequence = part.sequence
        sequence.computed += part.count
        sequence.reached = max(sequence.reached, sequence.computed)
        sequence.in_flight += part.samples
        sequence.scored += part.scores
        self._register_full_pages(sequence)
        if sequence.computed >= sequence.prompt_len:
            self._release_followers(sequence)

    def _release_followers(self, leader: Sequence) -> None:
        for follower in reversed(leader.followers):
            self.waiting.put_back(follower)
        leader.followers = []

    # Admission

    def _admit(self) -> None:
        spare = self.pool.free - sum(self._expected_pages(s) for s in self.running)
        while self._free_slots and (sequence := self.waiting.next()) is not None:
            prefix = self._known_prefix(sequence)
            held = sum(self.pool.is_held(page) for pages in prefix.pages for page in pages if page)
            need = self._expected_pages(sequence) - held
            if sequence.in_flight or (need > spare and self.running):
                self.waiting.put_back(sequence)
                return
            self._start_running(sequence, prefix)
            spare -= need

    def _known_prefix(self, sequence: Sequence) -> Prefix:
        """Of its tokens one at least is left to compute: its logits are needed, as are those that score a prompt."""
        usable = min(len(sequence.tokens) - 1, sequence.prompt_len + sequence.limit - 1)
        if sequence.scored < sequence.prompt_len:
            usable = min(usable, sequence.scored - 1)
        return self.pool.find(sequence.tokens[:usable])

    def _expected_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence will probably take beside those it holds."""
        answer = max(sequence.generated + 1, int(sequence.limit * self.expected_answer_share))
        most = self.pool.pages_at_most(sequence.prompt_len + answer, self.max_batch_tokens)
        held = sum(len(pages) for pages in sequence.pages) - sum(sequence.released)
        return max(0, most - held)

    def _start_running(self, sequence: Sequence, prefix: Prefix) -> None:
        sequence.slot = self._free_slots.pop()
        self._take_prefix(sequence, prefix)
        if sequence.offloaded is not None:
            self._bring_back(sequence, sequence.offloaded)
        self._begin(sequence)
        sequence.start()
        self.running.append(sequence)
        self.observer.admitted(sequence)

    def _begin(self, sequence: Sequence) -> None:
        self.unbegun -= sequence.is_unbegun
        sequence.is_unbegun = False

    def _take_prefix(self, sequence: Sequence, prefix: Prefix) -> None:
        """Begin behind what is known. The sequence has a slot, and no page yet."""
        for pages in prefix.pages:
            self.pool.hold(pages)
        sequence.pages = prefix.pages
        sequence.released = [self.pool.first_seen(g, prefix.length * self.pool.page_size) for g in self._groups]
        sequence.chain, sequence.registered = prefix.node, prefix.length
        sequence.computed = prefix.length * self.pool.page_size
        for group, pages in enumerate(sequence.pages):
            self.tables.write(group, sequence.slot, 0, pages)
        if sequence.reached == 0:  # else it gave way, and these may be its own
            of_prompt = (sequence.prompt_len - 1) // self.pool.page_size  # what it would find without its answer so far
            sequence.cached_tokens = min(prefix.length, of_prompt) * self.pool.page_size

    @property
    def _groups(self) -> range:
        return range(len(self.pool.windows))

    # Pages

    def _reserve(self, sequence: Sequence, tokens: int, plan: list[Scheduled]) -> bool:
        """Give the sequence pages for its first ``tokens`` tokens, preempting younger ones; False if it gave way."""
        self._release_behind_windows(sequence)
        wanted = self.pool.pages_for(tokens)
        needs = [max(0, wanted - len(pages)) for pages in sequence.pages]
        while sum(needs) > self.pool.free:
            youngest = self.running[-1]
            assert len(self.running) > 1, "one sequence alone always fits"
            self._preempt(youngest)
            if youngest is sequence:
                return False
            plan[:] = [part for part in plan if part.sequence is not youngest]
        for group, need in enumerate(needs):
            self._give(sequence, group, self.pool.take(need))
        return True

    def _give(self, sequence: Sequence, group: int, pages: list[int]) -> None:
        self.tables.write(group, sequence.slot, len(sequence.pages[group]), pages)
        sequence.pages[group] += pages

    def _release_behind_windows(self, sequence: Sequence) -> None:
        for group in self._groups:
            released, first = sequence.released[group], self.pool.first_seen(group, sequence.computed)
            if first > released:
                pages = sequence.pages[group]
                self.pool.give_back(pages[released:first])
                pages[released:first] = [0] * len(pages[released:first])
                self.tables.clear(group, sequence.slot, released, first)
                sequence.released[group] = min(first, len(pages))

    def _register_full_pages(self, sequence: Sequence) -> None:
        size = self.pool.page_size
        while (sequence.registered + 1) * size <= min(sequence.computed, len(sequence.tokens)):
            index = sequence.registered
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            pages = [group[index] for group in sequence.pages]
            sequence.chain = self.pool.register(sequence.chain, tokens, pages)
            sequence.registered += 1

    # Giving way

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        is_offloaded = self._offload(sequence)
        self.observer.preempted(sequence, offloaded=is_offloaded)
        self._stop_running(sequence)
        sequence.computed = 0
        self.waiting.put_back(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not FinishReason.ERROR:  # an answer that failed may have left anything behind
            self._register_full_pages(sequence)
        self.running.remove(sequence)
        for group, pages in enumerate(sequence.pages):
            self.pool.give_back(pages)
            self.tables.clear(group, sequence.slot, 0, len(pages))
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages, sequence.released = -1, [], []

    def _offload(self, sequence: Sequence) -> bool:
        """Copy its pages to the host, if there is room and anything is left to compute with them."""
        used = self.pool.pages_for(sequence.computed)
        tables = [pages[:used] for pages in sequence.pages]  # a page beyond them has nothing in it yet
        device = [page for pages in tables for page in pages if page]
        if not device or sequence.pending == 0 or len(device) > self.host.free:
            return False
        host = self.host.take(len(device))
        places = iter(host)
        pages = [[next(places) if page else 0 for page in table] for table in tables]
        sequence.offloaded = Offloaded(pages, sequence.computed)
        self._copies.append(PageCopy(Direction.OUT, device, host))
        self.offloads += 1
        return True

    def _bring_back(self, sequence: Sequence, offloaded: Offloaded) -> None:
        """Copy the pages that the prefix tree does not have any more back from the host."""
        sequence.offloaded = None
        length = sequence.registered  # pages that were found
        host = [page for pages in offloaded.pages for page in pages[length:] if page]
        if offloaded.computed <= sequence.computed or len(host) > self.pool.free:
            self.host.give_back(offloaded.held)  # there is more in the tree, or no room but for its beginning
            return
        device = self.pool.take(len(host))
        places = iter(device)
        for group, pages in enumerate(offloaded.pages):
            self._give(sequence, group, [next(places) if page else 0 for page in pages[length:]])
        self._copies.append(PageCopy(Direction.IN, device, host))
        self.host.give_back(offloaded.held)
        sequence.computed = offloaded.computed
