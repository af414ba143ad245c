"""What a running sequence holds in the cache, and how that changes hands: with the prefix tree, the pool and the host.

Invariants:
- Only a sequence with a slot holds pages, and only one without a slot holds host pages.
- A stale sequence has keys and values of weights that the engine has no more. What it holds is never put into the
  prefix tree, and it takes nothing from there; once it holds nothing, it is stale no more.
"""

from __future__ import annotations

from workers.engine.offload import Direction, HostPool, Offloaded, PageCopy
from workers.engine.page_tables import PageTables
from workers.engine.pages import PagePool, Prefix
from workers.engine.sequence import Sequence


class PageKeeper:
    """Gives pages to sequences and takes them back."""

    def __init__(self, pool: PagePool, tables: PageTables, host: HostPool) -> None:
        self.pool, self.tables, self.host = pool, tables, host
        self.windowed = [group for group, window in enumerate(pool.windows) if window is not None]
        self._copies: list[PageCopy] = []

    @property
    def groups(self) -> range:
        return range(len(self.pool.windows))

    def take_copies(self) -> list[PageCopy]:
        """Copies between device and host pages that have to be made, in this order, before the next plan runs."""
        copies, self._copies = self._copies, []
        return copies

    def known_prefix(self, sequence: Sequence) -> Prefix:
        """Of its tokens one at least is left to compute: its logits are needed, as are those that score a prompt."""
        usable = min(len(sequence.tokens) - 1, sequence.prompt_len + sequence.limit - 1)
        if sequence.scored < sequence.prompt_len:
            usable = min(usable, sequence.scored - 1)
        return self.pool.find(() if sequence.is_stale else sequence.tokens[:usable])

    def take_prefix(self, sequence: Sequence, prefix: Prefix) -> None:
        """Begin behind what is known. The sequence has a slot, and no page yet."""
        for pages in prefix.pages:
            self.pool.hold(pages)
        sequence.pages = prefix.pages
        sequence.released = [self.pool.first_seen(g, prefix.length * self.pool.page_size) for g in self.groups]
        sequence.chain, sequence.registered = prefix.node, prefix.length
        sequence.computed = prefix.length * self.pool.page_size
        for group, pages in enumerate(sequence.pages):
            self.tables.write(group, sequence.slot, 0, pages)
        if sequence.reached == 0:  # else it gave way, and these may be its own
            of_prompt = (sequence.prompt_len - 1) // self.pool.page_size  # what it would find without its answer so far
            sequence.cached_tokens = min(prefix.length, of_prompt) * self.pool.page_size

    def lacking(self, sequence: Sequence, tokens: int) -> list[int]:
        """By group, how many pages it needs more for its first ``tokens`` tokens."""
        wanted = self.pool.pages_for(tokens)
        return [wanted - len(pages) if wanted > len(pages) else 0 for pages in sequence.pages]

    def give(self, sequence: Sequence, group: int, pages: list[int]) -> None:
        self.tables.write(group, sequence.slot, len(sequence.pages[group]), pages)
        sequence.pages[group] += pages

    def release_behind_windows(self, sequence: Sequence) -> None:
        for group in self.windowed:
            released, first = sequence.released[group], self.pool.first_seen(group, sequence.computed)
            if first > released:
                pages = sequence.pages[group]
                self.pool.give_back(pages[released:first])
                pages[released:first] = [0] * len(pages[released:first])
                self.tables.clear(group, sequence.slot, released, first)
                sequence.released[group] = min(first, len(pages))

    def register_full_pages(self, sequence: Sequence) -> None:
        size = self.pool.page_size
        if sequence.is_stale or (sequence.registered + 1) * size > sequence.computed:
            return
        while (sequence.registered + 1) * size <= min(sequence.computed, len(sequence.tokens)):
            index = sequence.registered
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            pages = [group[index] for group in sequence.pages]
            sequence.chain = self.pool.register(sequence.chain, tokens, pages)
            sequence.registered += 1

    def let_go(self, sequence: Sequence) -> None:
        """Give its pages back; what it computed counts no more unless it was offloaded."""
        for group, pages in enumerate(sequence.pages):
            self.pool.give_back(pages)
            self.tables.clear(group, sequence.slot, 0, len(pages))
        sequence.pages, sequence.released = [], []
        sequence.computed = 0
        sequence.is_stale = sequence.is_stale and sequence.offloaded is not None

    def offload(self, sequence: Sequence) -> bool:
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
        return True

    def bring_back(self, sequence: Sequence, offloaded: Offloaded) -> None:
        """Copy the pages that the prefix tree does not have any more back from the host."""
        sequence.offloaded = None
        length = sequence.registered  # pages that were found
        host = [page for pages in offloaded.pages for page in pages[length:] if page]
        if offloaded.computed <= sequence.computed or len(host) > self.pool.free:
            self.host.give_back(offloaded.held)  # there is more in the tree, or no room but for its beginning
            sequence.is_stale = False
            return
        device = self.pool.take(len(host))
        places = iter(device)
        for group, pages in enumerate(offloaded.pages):
            self.give(sequence, group, [next(places) if page else 0 for page in pages[length:]])
        self._copies.append(PageCopy(Direction.IN, device, host))
        self.host.give_back(offloaded.held)
        sequence.computed = offloaded.computed

    def drop_offloaded(self, sequence: Sequence) -> None:
        """Forget what is on the host of it."""
        if sequence.offloaded is not None:
            self.host.give_back(sequence.offloaded.held)
            sequence.offloaded, sequence.is_stale = None, False
