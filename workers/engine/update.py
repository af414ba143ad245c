"""A new model for a running engine: loaded and checked beside it, and put in its place between two steps.

What it keeps true:
- All checks that can be made come before the first write; if the smoke prompt then fails, the weights are exchanged
  back, and the engine is bit for bit as before.
- A hot update exchanges weights and touches nothing else of the device. Any other model needs an engine without
  requests, whose parts are then assembled anew; if that fails, the old model's are, when the failed ones are gone.
- Nothing here refers to a staged model when the update has ended, not even an error's traceback: who staged it decides
  how long its memory is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, Inflight
from workers.engine.inflight import Transition
from workers.engine.layers import unbind
from workers.engine.parts import Parts, assemble, carry_over, read
from workers.engine.staging import StagedModel, why_not_hot
from workers.engine.swap import exchange, smoke_fault, smoke_ids

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.sequence import Sequence

__all__ = ["StagedModel", "Update", "UpdateRefused", "UpdateReport"]

log = logging.getLogger("batchjobs.engine")

STUCK = "answers that were begun are suspended, so they would never be finished: resume or cancel them first"


class UpdateRefused(UsageError):
    """The model was not updated, for the reason in the message; the old one is bit for bit as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What an update did. No token was made for ``seconds``.

    The counts are of requests: ``finished`` by the old weights during the update, without those that were cancelled
    then; ``restarted`` from their beginning; ``recomputed`` whose tokens so far the new weights read anew; ``kept``
    that went on with what the old ones computed.
    """

    old_version: str
    new_version: str
    old_model: str
    new_model: str
    is_reload: bool
    seconds: float
    finished: int = 0
    restarted: int = 0
    recomputed: int = 0
    kept: int = 0


class Update:
    """One update of an engine: ``begin``, then steps until it is ready, then ``apply``. Or ``abandon`` it."""

    def __init__(self, engine: Engine, staged: StagedModel, inflight: Inflight | str) -> None:
        if inflight not in tuple(Inflight):
            raise UsageError(f"inflight must be one of {', '.join(Inflight)}, not {inflight!r}")
        self.policy = Inflight(inflight)
        self._engine = engine
        self._staged = staged
        self._why_not_hot: str | None = None
        self._awaited: dict[Hashable, list[Sequence]] = {}  # the choices of each: an id can come a second time

    @property
    def is_reload(self) -> bool:
        return self._why_not_hot is not None

    def begin(self) -> None:
        """From here on nothing begins where requests are to be finished first. Raises UpdateRefused."""
        engine, self._why_not_hot = self._engine, why_not_hot(self._engine._parts.loaded, self._staged)
        if self.is_reload and self.policy in (Inflight.RECOMPUTE, Inflight.KEEP):
            raise UpdateRefused(
                f"{self._staged.name!r} cannot take the place of {engine.model_name!r} in place: "
                f"{self._why_not_hot}; a full reload can (inflight finish or restart)"
            )
        if self.policy is Inflight.FINISH:
            self._awaited = _begun(engine)
            if any(map(_is_suspended, self._awaited.values())):
                raise UpdateRefused(STUCK)
        if self.is_reload and engine._requests.keys() - self._awaited.keys():
            raise UpdateRefused(self._occupied)
        engine.scheduler.admits_unbegun = self.policy is not Inflight.FINISH

    @property
    def is_ready(self) -> bool:
        """Whether there is nothing left to wait for. It waits for what was suspended since it began, too: that will be
        resumed or cancelled."""
        return not self._unfinished

    @property
    def is_stuck(self) -> bool:
        """Whether all that is waited for is suspended: steps alone will never make it ready."""
        return not self.is_ready and all(map(_is_suspended, self._unfinished))

    @property
    def _unfinished(self) -> list[list[Sequence]]:
        requests = self._engine._requests
        return [choices for name, choices in self._awaited.items() if requests.get(name) is choices]

    def abandon(self) -> None:
        self._engine.scheduler.admits_unbegun = True

    def apply(self) -> UpdateReport:
        """Between two steps, when it is ready. Raises UpdateRefused."""
        started = time.monotonic()
        engine = self._engine
        engine._collect()
        try:
            if self.is_reload and engine._requests:
                raise UpdateRefused(self._occupied)
            old = engine._parts.loaded
            counts = self._reload() if self.is_reload else self._swap()
        finally:
            engine.scheduler.admits_unbegun = True
        report = UpdateReport(
            old_version=old.version,
            new_version=engine.model_version,
            old_model=old.name,
            new_model=engine.model_name,
            is_reload=self.is_reload,
            seconds=time.monotonic() - started,
            finished=sum(not any(map(_is_cancelled, choices)) for choices in self._awaited.values()),
            **counts,
        )
        log.info("%s %s took the place of %s %s", engine.model_name, engine.model_version, old.name, old.version)
        return report

    @property
    def _occupied(self) -> str:
        return (
            f"{self._staged.name!r} needs a full reload ({self._why_not_hot}), and the engine has requests that were "
            f"made for {self._engine.model_name!r}: let them end or take them back first"
        )

    # Hot

    def _swap(self) -> dict[str, int]:
        engine, staged = self._engine, self._staged
        parts, new = engine._parts, staged.loaded
        ids = smoke_ids(parts.vocab_size)
        before, wanted = parts.pipeline.run(lambda: parts.runner.smoke(ids)), staged.smoke_logits
        exchange(parts.loaded.model, new.model)
        try:
            fault = _smoke_fault(parts, wanted)
        except BaseException:
            exchange(parts.loaded.model, new.model)
            raise
        if fault is not None:
            exchange(parts.loaded.model, new.model)
            raise UpdateRefused(f"{staged.name!r} was loaded, but {fault}; the old weights are back")
        ends_differ = parts.loaded.eos_ids != new.eos_ids
        reading = read(
            replace(new, model=parts.loaded.model),
            parts.runner.shortage.most_rows,
            parts.pool,
            parts.max_model_len,
            parts.vocab_size,
            seeds=parts.reading.admission.seeds,
            grammars=None if ends_differ else parts.reading.grammars,
        )
        staged.hold(replace(parts.loaded, model=new.model), before)
        engine._use(replace(parts, loaded=replace(new, model=parts.loaded.model), reading=reading))
        transition = Transition(self.policy, parts.scheduler, reading.admission, ends_differ)
        transition.apply(engine._requests)
        engine._begin_again(transition.restarting.values())
        return dict(transition.counts)

    # Reload

    def _reload(self) -> dict[str, int]:
        """The old model waits on the host: both may not fit on the device."""
        engine, staged = self._engine, self._staged
        old, device = engine._parts, engine.runner.device
        ids = smoke_ids(old.vocab_size)
        before = old.pipeline.run(lambda: old.runner.smoke(ids))
        old.runner.release()
        old.loaded.model.to("cpu")
        parts = self._put_in(device)
        if isinstance(parts, str):
            old.loaded.model.to(device)
            self._take(assemble(old.loaded, replace(engine.config, num_blocks=old.runner.num_pages)))
            raise UpdateRefused(f"{staged.name!r} cannot run here: {parts}; the old model is back")
        self._take(parts)
        staged.hold(old.loaded, before)
        return {}

    def _put_in(self, device: torch.device) -> Parts | str:
        """What the new model runs in, or why it cannot. Of a failure nothing stays on the device, where the old model
        needs all the room that it had."""
        loaded, parts = self._staged.loaded, None
        try:
            loaded.model.to(device)
            parts = assemble(loaded, self._engine.config, seeds=self._engine._admission.seeds)
            fault = _smoke_fault(parts, self._staged.smoke_logits)
        except UsageError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the old model must come back
            fault = f"{type(error).__name__}: {error}"
        # Here the error is gone, and with its traceback whatever was half made.
        if parts is not None and fault is None:
            return parts
        if parts is not None:
            parts.pipeline.close()
            parts.runner.release()
        unbind(loaded.model)
        loaded.model.to("cpu")
        return str(fault)

    def _take(self, parts: Parts) -> None:
        old = self._engine._parts
        old.pipeline.close()
        carry_over(old, parts)
        self._engine._use(parts)


def update(engine: Engine, staged: StagedModel, inflight: Inflight | str) -> UpdateReport:
    """From its beginning to its end, with the steps that it takes; their outputs come out of the next one."""
    one, ended = Update(engine, staged, inflight), engine._take_ended()
    try:
        one.begin()
        while not one.is_ready:
            if one.is_stuck:
                raise UpdateRefused(STUCK)  # nobody else is here to resume or to cancel
            ended += engine.step()
        return one.apply()
    finally:
        one.abandon()
        engine._ended = ended + engine._ended


def _begun(engine: Engine) -> dict[Hashable, list[Sequence]]:
    """The requests of which something has run there."""
    return {name: choices for name, choices in engine._requests.items() if not any(c.is_unbegun for c in choices)}


def _is_suspended(choices: list[Sequence]) -> bool:
    return any(choice.is_suspended for choice in choices)


def _is_cancelled(choice: Sequence) -> bool:
    return choice.finish_reason is FinishReason.CANCELLED


def _smoke_fault(parts: Parts, wanted: torch.Tensor) -> str | None:
    """What is wrong with what these parts say to the smoke prompt."""
    try:
        found = parts.pipeline.run(lambda: parts.runner.smoke(smoke_ids(parts.vocab_size)))
    except Exception as error:  # noqa: BLE001  # whatever it is, the old weights must come back
        return f"the smoke prompt failed: {type(error).__name__}: {error}"
    return smoke_fault(found, wanted, parts.loaded.model.dtype)
