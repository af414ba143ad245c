"""One group of two processes on the CPU for many engines: starting a process costs more than most tests do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from workers.engine.parallel.group import Group


class Ranks:
    """Has a group while it is whole, else a new one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._group: Group | None = None

    def group(self) -> Group:
        if self._group is None or self._group._broken.is_set():
            self.end()
            self._group = Group(self._size, torch.device("cpu"))
        return self._group

    def end(self) -> None:
        if self._group is not None:
            Group.close(self._group)


@contextmanager
def shared_ranks(size: int = 2) -> Iterator[Ranks]:
    """Every engine that is made within the block, one after the other, has the same group, and leaves it as it is."""
    ranks = Ranks(size)

    def group(*_: object) -> Group:
        shared = ranks.group()
        patch.setattr(shared, "close", lambda: None)
        return shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.engine.parallel.leading.make_group", group)
        try:
            yield ranks
        finally:
            ranks.end()
