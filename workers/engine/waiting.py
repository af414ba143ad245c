"""The sequences that do not run yet, and in which order they come up.

| policy | order |
| --- | --- |
| fifo | as they arrived |
| longest_first | the most tokens (prompt and limit) first, so that no long answer is left over for the end |
| prefix | prompts that begin alike together: one leads and computes the beginning, the others follow it |

Whatever the policy, a sequence that gave way comes first again. Every step costs the same however many wait: adding and
taking one are constant (a logarithm for longest_first), and a cancelled one is passed over when it comes up.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import Protocol

from workers.engine.sequence import Sequence

POLICIES = ("fifo", "prefix", "longest_first")


class Order(Protocol):
    """One policy. ``next`` removes and returns the sequence that shall run next; None when none should yet."""

    def add(self, sequence: Sequence) -> None: ...

    def next(self) -> Sequence | None: ...


class WaitingQueue:
    """Sequences in the order of a policy, those that gave way before all others."""

    def __init__(self, policy: str, page_size: int) -> None:
        self._begun: deque[Sequence] = deque()
        self._unbegun: deque[Sequence] = deque()  # their turn had come already
        self._order: Order = _ORDERS[policy](page_size)

    def add(self, sequence: Sequence) -> None:
        self._order.add(sequence)

    @property
    def has_begun(self) -> bool:
        """Whether one waits that has begun, and is not suspended."""
        return any(not (sequence.is_finished or sequence.is_suspended) for sequence in self._begun)

    def put_back(self, sequence: Sequence) -> None:
        """It was running or could not run yet: it is the next one again."""
        (self._unbegun if sequence.is_unbegun else self._begun).appendleft(sequence)

    def next(self, *, unbegun: bool = True) -> Sequence | None:
        """Remove and return the sequence that shall run next; None when none waits, or none should run yet.

        Without ``unbegun``, of those only that have begun.
        """
        while (sequence := self._take(unbegun=unbegun)) is not None:
            if not sequence.is_finished:  # cancelled while it waited
                return sequence
        return None

    def _take(self, *, unbegun: bool) -> Sequence | None:
        if self._begun:
            return self._begun.popleft()
        if not unbegun:
            return None
        return self._unbegun.popleft() if self._unbegun else self._order.next()


class _Fifo:
    def __init__(self, page_size: int) -> None:
        self._queue: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def next(self) -> Sequence | None:
        return self._queue.popleft() if self._queue else None


class _LongestFirst:
    def __init__(self, page_size: int) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._arrivals = count()

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (-(sequence.prompt_len + sequence.limit), next(self._arrivals), sequence))

    def next(self) -> Sequence | None:
        return heapq.heappop(self._heap)[2] if self._heap else None


class _Group:
    """Prompts with the same first page; ``leader`` computes it for all."""

    def __init__(self) -> None:
        self.members: deque[Sequence] = deque()
        self.leader: Sequence | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the beginning is computed, or will not be by this leader."""
        return not self.is_led or self.leader is None or self.leader.computed >= self.leader.prompt_len

    @property
    def is_led(self) -> bool:
        return self.leader is not None and not (self.leader.is_finished or self.leader.is_suspended)


class _Prefix:
    """Groups take turns in the order of their first arrival. While a leader computes its prompt, its group waits, and
    the next group leads on: at most one sequence a group runs ahead, so the look for one is bounded by what runs."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._groups: dict[tuple[int, ...], _Group] = {}

    def add(self, sequence: Sequence) -> None:
        beginning = tuple(sequence.tokens[: self._page_size])
        self._groups.setdefault(beginning, _Group()).members.append(sequence)

    def next(self) -> Sequence | None:
        over: list[tuple[int, ...]] = []  # nobody waits in them, and nobody computes their beginning any more
        found = None
        for beginning, group in self._groups.items():
            if not group.is_ready:
                continue
            if group.members:
                found = self._take(group)
                break
            over.append(beginning)
        for beginning in over:
            del self._groups[beginning]
        return found

    def _take(self, group: _Group) -> Sequence:
        sequence = group.members.popleft()
        if not group.is_led and not (sequence.is_finished or sequence.is_suspended):
            group.leader = sequence
        return sequence


_ORDERS: dict[str, type[_Fifo] | type[_LongestFirst] | type[_Prefix]] = {
    "fifo": _Fifo,
    "prefix": _Prefix,
    "longest_first": _LongestFirst,
}
