"""One or two steps on their way: while the device computes one, the host plans the next.

With depth 2 the forward of step k+1 is launched before the tokens of step k are known; its input tokens are fed on the
device, by slot. Then step k is collected, and only then the sampling of step k+1 is launched, behind its forward: so
penalties, grammars and random streams always see every token before. What step k+1 computes for a sequence that ended
with step k is dropped. With depth 1 each step is collected at once; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from workers.engine.batch import PackedBatch
from workers.engine.executor import DeviceExecutor, Inline, OneThread
from workers.engine.sampling_rows import sampling_rows

if TYPE_CHECKING:
    import torch

    from workers.engine.offload import PageCopy
    from workers.engine.results import Result, StepResult
    from workers.engine.runner import Runner
    from workers.engine.scheduler import Scheduled


T = TypeVar("T")


@dataclass(slots=True)
class Step:
    """A launched step. ``logits`` and ``result`` arrive in the order of the launches."""

    number: int
    plan: list[Scheduled]
    batch: PackedBatch
    logits: Future[torch.Tensor]
    result: Future[Result] | None = None

    @property
    def sampling(self) -> list[Scheduled]:
        return [part for part in self.plan if part.samples]


class Pipeline:
    """Launches steps on a runner. ``depth`` is 1 or 2."""

    def __init__(self, runner: Runner, *, depth: int, vocab_size: int) -> None:
        self.depth = depth
        self._runner = runner
        self._vocab_size = vocab_size
        beside = depth > 1 and not runner.path.works_beside
        self._device: DeviceExecutor = OneThread() if beside else Inline()
        self.launched = 0

    def launch(self, plan: list[Scheduled], batch: PackedBatch, copies: Sequence[PageCopy]) -> Step:
        """Start the forward of a step."""
        self.launched += 1
        logits = self._device.submit(self._runner.forward, batch, copies)
        return Step(self.launched, plan, batch, logits)

    def sample(self, step: Step) -> None:
        """Start the sampling of a step. All tokens of the steps before it are known by now."""
        sequences = [part.sequence for part in step.sampling]
        rows = sampling_rows(sequences, self._vocab_size)
        wanted = (part.sequence.request.sampling.prompt_logprobs or 0 for part in step.plan if part.scores)
        top = max(wanted, default=0)
        step.result = self._device.submit(lambda: self._runner.sample(step.logits.result(), step.batch, rows, top))

    def collect(self, step: Step) -> StepResult:
        """Wait for a step whose sampling was started. Raises what the device's side raised."""
        assert step.result is not None
        return step.result.result().wait()

    def warmup(self) -> None:
        self.run(self._runner.warmup)

    def run(self, call: Callable[[], T]) -> T:
        """Have the device's side do something between two steps, and wait for it."""
        return self._device.submit(call).result()

    def close(self) -> None:
        self._device.shutdown()
