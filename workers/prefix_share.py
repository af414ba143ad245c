"""How much of a file's prompts begin alike, as the engine's cache of pages would find it.

The engine shares whole pages: a page of a prompt is known when another prompt had the same tokens up to its end. Of a
prompt the last token is always computed, and one that is scored is computed whole. Here every page is kept as a hash of
its chain, as in a cache without end: what that would save is the most that sharing can. When there are too many pages
to be kept, only those whose hash falls into a sample are, a sample that halves whenever it is full. It serves to
estimate how many different pages there are; how many there are in all is counted. So a page that all prompts begin with
cannot spoil the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

KEPT_PAGES = 2**20
"""Distinct pages that are kept: 16.8 million tokens in pages of 16. With them the count is exact."""


_UNUSED_BITS = 7
"""The lowest ones of a hash, which its set needs."""


class PrefixShare:
    """For prompts in the order in which they come.

    Args:
        page_size: Tokens in one page.
        kept: Distinct pages to keep at most.
    """

    def __init__(self, page_size: int, kept: int = KEPT_PAGES) -> None:
        self.page_size = page_size
        self.prompt_tokens = 0
        self._kept = kept
        self._pages = 0  # that could be found in the cache
        self._sampled_bits = 0
        self._computed: set[int] = set()  # seen first where they might have been found
        self._other: set[int] = set()  # seen first where no cache would have been asked for them

    @property
    def is_exact(self) -> bool:
        return self._sampled_bits == 0

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be computed, at most."""
        computed = len(self._computed) << self._sampled_bits
        return max(0, self._pages - computed) * self.page_size

    def add(self, prompt_ids: Sequence[int], *, scored: bool = False) -> None:
        """The next prompt; a ``scored`` one finds nothing in the cache, and is found there by others."""
        length, size = len(prompt_ids), self.page_size
        findable = 0 if scored else (length - 1) // size * size
        self.prompt_tokens += length
        self._pages += findable // size
        mask = (1 << self._sampled_bits) - 1
        computed, other = self._computed, self._other
        chain = 0
        for start in range(0, length - size + 1, size):
            chain = hash((chain, *prompt_ids[start : start + size]))
            if not (chain >> _UNUSED_BITS) & mask and chain not in computed and chain not in other:
                (computed if start < findable else other).add(chain)
        if len(computed) + len(other) > self._kept:
            self._halve()

    def _halve(self) -> None:
        self._sampled_bits += 1
        mask = (1 << self._sampled_bits) - 1
        self._computed = {chain for chain in self._computed if not (chain >> _UNUSED_BITS) & mask}
        self._other = {chain for chain in self._other if not (chain >> _UNUSED_BITS) & mask}
