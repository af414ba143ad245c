"""The pages of the KV cache: who holds them, and which prefixes they already contain.

A page belongs to one group of layers: a token position takes one page in each group, and a group whose layers have a
sliding window lets go of the pages behind it. A position that is full in all groups belongs to a chain: what it holds
depends on its own tokens and on all tokens before them. Chains are kept as a tree of nodes; a child is found by (its
parent, its tokens), compared token by token, so two different prefixes can never be taken for each other. The root
stands for the weights: after an update of the model nothing that the old weights computed can be found again.

Invariants:
- Page 0 is the null page and never handed out; in a table it stands for "behind the window".
- Every other page is free, idle (in the tree, held by nobody) or held by one sequence or more.
- Only full pages are in the tree, and pages in the tree are never written again.
- Everything here costs the same however large the cache is; eviction takes the idle page that was used least recently,
  the end of a chain before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known beginning of a token sequence: by group its pages in order, and the node where it ends."""

    length: int  # in pages
    pages: list[list[int]]  # [groups][length], 0 behind the group's window
    node: int


class _Node:
    """One full page position of a chain, with its page in each group (0: that group's page is gone)."""

    __slots__ = ("children", "identity", "key", "pages")

    def __init__(self, identity: int, key: tuple[int, Tokens], groups: int) -> None:
        self.identity = identity
        self.key = key
        self.pages = [0] * groups
        self.children = 0


class PagePool:
    """Hands out page numbers.

    Args:
        num_pages: All pages, the null page included.
        page_size: In tokens.
        windows: The sliding window of each group of layers in tokens, None where a row sees everything.
        sharing: Without it every prefix is computed anew.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, windows: Sequence[int | None] = (None,), sharing: bool = True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = tuple(windows)
        self.sharing = sharing
        self._identities = count(1)
        self._root = next(self._identities)
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._tree: dict[tuple[int, Tokens], _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._place: dict[int, tuple[_Node, int]] = {}  # page -> its node and group
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
        """Positions of a page table that ``tokens`` take up."""
        return -(-tokens // self.page_size)

    def pages_at_most(self, tokens: int, chunk: int) -> int:
        """Pages that a sequence of ``tokens`` holds at once, in all groups, when up to ``chunk`` rows run together."""
        everything = self.pages_for(tokens)
        bounds = (everything if w is None else self.pages_for(w - 1 + chunk) + 1 for w in self.windows)
        return sum(min(everything, bound) for bound in bounds)

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first page that a row at ``position`` sees in this group."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

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
        """Let go of one group's pages, given in the order of their chain; null pages are passed over."""
        for page in reversed(pages):
            if not page:
                continue
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._place:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int]) -> Prefix:
        """The longest chain of full pages that begins ``tokens`` and whose windows are whole; nothing is taken yet."""
        size, groups = self.page_size, range(len(self.windows))
        chain: list[_Node] = []
        whole_since = [0] * len(self.windows)  # by group: from this page on nothing is missing
        length, parent = 0, self._root
        for start in range(0, len(tokens) - size + 1, size):
            node = self._tree.get((parent, tuple(tokens[start : start + size])))
            if node is None:
                break
            chain.append(node)
            parent = node.identity
            for group in groups:
                if not node.pages[group]:
                    whole_since[group] = len(chain)
            if all(whole_since[g] <= self.first_seen(g, len(chain) * size) for g in groups):
                length = len(chain)
        pages = [self._seen_pages(chain[:length], group) for group in groups]
        return Prefix(length, pages, chain[length - 1].identity if length else self._root)

    def hold(self, pages: Iterable[int]) -> None:
        """Become one more holder of pages that :meth:`find` has just found; null pages are passed over."""
        for page in pages:
            if page:
                self._idle.pop(page, None)
                self._holders[page] += 1

    def register(self, parent: int, tokens: Tokens, pages: Sequence[int]) -> int:
        """Put a full position that its holder has computed into the tree, with its page in each group (0: none).

        Returns its node. Where another sequence's page holds the same already, that one stays, and this sequence's page
        remains its own.
        """
        if not self.sharing:
            return parent
        node = self._tree.get((parent, tokens))
        if node is None:
            node = self._add((parent, tokens))
        for group, page in enumerate(pages):
            if page and not node.pages[group] and page not in self._place:
                node.pages[group] = page
                self._place[page] = (node, group)
        return node.identity

    def forget(self) -> None:
        """The weights have changed: no chain computed before is found again. Holders keep their pages."""
        self._root = next(self._identities)
        self._free.extend(self._idle)
        self._idle.clear()
        self._tree.clear()
        self._nodes.clear()
        self._place.clear()

    def _seen_pages(self, chain: Sequence[_Node], group: int) -> list[int]:
        first = self.first_seen(group, len(chain) * self.page_size)
        return [0 if index < first else node.pages[group] for index, node in enumerate(chain)]

    def _add(self, key: tuple[int, Tokens]) -> _Node:
        node = _Node(next(self._identities), key, len(self.windows))
        self._tree[key] = self._nodes[node.identity] = node
        if parent := self._nodes.get(key[0]):
            parent.children += 1
        return node

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        node, group = self._place.pop(page)
        node.pages[group] = 0
        self._prune(node)
        return page

    def _prune(self, node: _Node | None) -> None:
        """Drop nodes that hold no page and lead nowhere."""
        while node is not None and not node.children and not any(node.pages):
            del self._tree[node.key], self._nodes[node.identity]
            node = self._nodes.get(node.key[0])
            if node is not None:
                node.children -= 1
