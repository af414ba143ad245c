"""What can be seen of the engine while it works: the events that a trace is made of."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.engine.scheduler import Scheduled
    from workers.engine.sequence import Sequence


class EngineObserver:
    """Does nothing with each event; subclasses note what they want. Called from the engine's thread, so be quick.

    Times are ``time.monotonic()`` seconds.
    """

    def admitted(self, sequence: Sequence) -> None:
        """It runs from now on, in ``sequence.slot``; ``sequence.computed`` tokens were found in a cache."""

    def preempted(self, sequence: Sequence, *, offloaded: bool) -> None:
        """It gives its slot (still set) and pages away, and will be computed again or brought back from CPU memory."""

    def left(self, sequence: Sequence) -> None:
        """It has ended (``finish_reason``); its slot is -1 if it was not running, and still set otherwise."""

    def planned(self, step: int, plan: SequenceOf[Scheduled], started: float, ended: float) -> None:
        """Step ``step`` has been planned and packed in this time; its forward is launched next."""

    def computed(self, step: int, started: float, ended: float) -> None:
        """The device was busy with this step in this time, forward and sampling together."""

    def sampled(self, step: int, sequence: Sequence, token: int) -> None:
        """The step gave this sequence, which is still alive, a token."""
