"""The pages of the KV cache and who holds them.

Invariants: page 0 is the null page and never handed out; every other page is either free or held by one sequence;
taking and giving back cost the same however large the cache is.
"""

from __future__ import annotations


class PagePool:
    """Hands out page numbers. ``page_size`` is in tokens."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold altogether."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage_ratio(self) -> float:
        return 1 - self.free / self.capacity

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """The caller has seen that ``count`` pages are free."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
