"""The pages of the KV cache: who holds them, and which prefixes they already contain.

A page that is full belongs to a chain: what it holds depends on its own tokens and on all tokens before them. Chains
are kept as a tree of nodes; a child is found by (node of its parent, its tokens), compared token by token, so two
different prefixes can never be taken for each other. The root stands for the weights: after an update of the model
nothing that the old weights computed can be found again.

Invariants:
- Page 0 is the null page and never handed out.
- Every other page is free, idle (in the tree, held by nobody) or held by one sequence or more.
- Only full pages are in the tree, and pages in the tree are never written again.
- Everything here costs the same however large the cache is; eviction takes the idle page that was used least recently,
  the end of a chain before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known beginning of a token sequence: its pages, in order, and the node at which the chain ends."""

    pages: list[int]
    node: int


class PagePool:
    """Hands out page numbers. ``page_size`` is in tokens; without ``sharing`` every prefix is computed anew."""

    def __init__(self, num_pages: int, page_size: int, *, sharing: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.sharing = sharing
        self._nodes = count(1)
        self._root = next(self._nodes)
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._tree: dict[tuple[int, Tokens], tuple[int, int]] = {}  # (parent, tokens) -> (page, node)
        self._place: dict[int, tuple[int, Tokens]] = {}  # page -> its key in the tree
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold altogether."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages that can be taken now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def usage_ratio(self) -> float:
        return 1 - self.free / self.capacity

    @property
    def root(self) -> int:
        """The node at which every chain begins."""
        return self._root

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def take(self, count: int) -> list[int]:
        """Pages for one holder to write. The caller has seen that ``count`` are free."""
        assert count <= self.free
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Let go of pages, given in the order of their chain."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._place:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int]) -> Prefix:
        """The longest chain of full pages that begins ``tokens``; nothing is taken yet."""
        pages: list[int] = []
        node = self._root
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            found = self._tree.get((node, tuple(tokens[start : start + self.page_size])))
            if found is None:
                break
            page, node = found
            pages.append(page)
        return Prefix(pages, node)

    def hold(self, pages: Sequence[int]) -> None:
        """Become one more holder of pages that :meth:`find` has just found."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def register(self, page: int, parent: int, tokens: Tokens) -> int:
        """Put a full page that its holder has computed into the tree; returns its node.

        Where another page holds the same chain already, that one stays, and this page remains its holder's own.
        """
        if not self.sharing:
            return parent
        key = (parent, tokens)
        if key not in self._tree:
            self._tree[key] = (page, next(self._nodes))
            self._place[page] = key
        return self._tree[key][1]

    def forget(self) -> None:
        """The weights have changed: no chain computed before is found again. Holders keep their pages."""
        self._root = next(self._nodes)
        self._free.extend(self._idle)
        self._idle.clear()
        self._tree.clear()
        self._place.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._tree[self._place.pop(page)]
        return page
