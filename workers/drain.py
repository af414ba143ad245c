"""The command to drain a worker: it claims nothing more, finishes what it holds or gives it back, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.commands import Interrupted

if TYPE_CHECKING:
    from batchjobs.types import Command
    from workers.commands import Result, Stopping
    from workers.gate import Gate
    from workers.holdings import Holdings
    from workers.intake import Intake
    from workers.mode import Mode
    from workers.recorder import Recorder
    from workers.returns import Returns

LOOK_SECONDS = 0.05


class Drain:
    """Of one worker, which ends afterwards: nothing is undone."""

    def __init__(
        self,
        holdings: Holdings,
        intake: Intake,
        recorder: Recorder,
        gate: Gate,
        returns: Returns,
        mode: Mode,
        stopping: Stopping,
    ) -> None:
        self._holdings = holdings
        self._intake = intake
        self._recorder = recorder
        self._gate = gate
        self._returns = returns
        self._mode = mode
        self._stopping = stopping

    def carry_out(self, command: Command) -> Result:
        """Returns when nothing is held any more, or the worker was told to end anyway; that gives back the rest."""
        self._mode.is_draining = True
        self._mode.on_change()
        self._intake.close()
        before = self._holdings.finished
        try:
            given_back = self._give_back_all() if command.arguments.get("release") else self._finish()
        except Interrupted:
            given_back = self._holdings.unfinished_requests
        return {"finished": self._holdings.finished - before, "given_back": given_back}

    def _give_back_all(self) -> int:
        with self._gate.shut_within():  # nothing that is being claimed is overlooked
            return self._stopping.insist(lambda: self._returns.give_back(self._holdings.leases))

    def _finish(self) -> int:
        """What is paused cannot be finished; it goes back."""
        given_back = 0
        while self._holdings.active or self._recorder.backlog:
            self._stopping.wait(LOOK_SECONDS)
            given_back += self._stopping.insist(lambda: self._returns.give_back(self._holdings.suspended))
        with self._gate.shut_within():
            return given_back + self._stopping.insist(lambda: self._returns.give_back(self._holdings.leases))
