"""The command to update the model: all or nothing, and no row says another version than the one that made it.

A *hot* update puts weights of the same shape in the place of the old ones; the engine goes on with what it holds. Any
other model is a *reload*: the engine must be empty for it, so what it holds is finished or given back before. Either
way everything about the new model is checked before the first write.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from batchjobs.errors import UsageError
from batchjobs.types import Inflight
from workers.commands import Interrupted
from workers.engine.outbox import EngineStopped
from workers.returns import STORE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from batchjobs.store import Store
    from batchjobs.types import Command, Lease
    from workers.checkpointer import Checkpointer
    from workers.commands import Result, Stopping
    from workers.engine.loop import EngineLoop
    from workers.engine.staging import StagedModel
    from workers.engine.update import UpdateReport
    from workers.gate import Gate
    from workers.holdings import Holdings
    from workers.mode import Mode
    from workers.reader import Observer
    from workers.returns import Returns
    from workers.serving import Serving

log = logging.getLogger("batchjobs.worker")

LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Asked:
    model: str
    revision: str | None
    inflight: Inflight
    is_dry_run: bool


class ModelUpdate:
    """Of one worker."""

    def __init__(
        self,
        store: Store,
        worker: str,
        loop: EngineLoop,
        holdings: Holdings,
        gate: Gate,
        returns: Returns,
        serving: Serving,
        mode: Mode,
        stopping: Stopping,
        *,
        checkpoints: Checkpointer | None = None,
        observers: Observer | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._loop = loop
        self._holdings = holdings
        self._gate = gate
        self._returns = returns
        self._serving = serving
        self._mode = mode
        self._stopping = stopping
        self._checkpoints = checkpoints
        self._observers = observers
        self._given_back = self._finished = 0

    def carry_out(self, command: Command) -> Result:
        """The report of it.

        Raises:
            UsageError: It is refused, for the reason in the message; the old model goes on as before.
            Interrupted: The worker is to end.
        """
        try:
            result = self._carry_out(_asked(command))
        except UsageError:
            self._observe("refused")
            raise
        except (Interrupted, EngineStopped):
            raise
        except Exception:
            self._observe("failed")
            raise
        if not result["dry_run"]:
            self._observe("done")
        return result

    def _observe(self, result: Literal["done", "refused", "failed"]) -> None:
        if self._observers is not None:
            self._observers.updated(result)

    def _carry_out(self, asked: _Asked) -> Result:
        self._given_back = self._finished = 0
        started = time.monotonic()
        staged = self._stage(asked)
        loading_seconds = time.monotonic() - started
        log.info("loaded and checked %s (%s) in %.1f s", staged.name, staged.version, loading_seconds)
        self._refuse(staged, asked.inflight)
        if asked.is_dry_run:
            return self._result(staged, loading_seconds) | {"dry_run": True}
        report = self._update(staged, asked)
        return self._result(staged, loading_seconds, report)

    def _stage(self, asked: _Asked) -> StagedModel:
        self._mode.loading = asked.model
        try:
            return self._loop.stage(asked.model, revision=asked.revision)
        finally:
            self._mode.loading = None

    def _refuse(self, staged: StagedModel, inflight: Inflight) -> None:
        if inflight is Inflight.FINISH and self._mode.pause is not None:
            raise UsageError(
                "it is paused, so nothing can be finished: resume it first, or update with another --inflight"
            )
        if not staged.is_hot and inflight not in (Inflight.FINISH, Inflight.RESTART):
            raise UsageError(
                f"{staged.name} cannot take the place of {self._serving.engine.model_name} in place: "
                f"{staged.why_not_hot}. Use --inflight finish or --inflight restart, which reload the worker's model"
            )

    def _update(self, staged: StagedModel, asked: _Asked) -> UpdateReport:
        with self._nothing_begins(asked.inflight):
            if staged.is_hot:
                self._return(self._holdings.for_other_versions(staged.version))
            elif asked.inflight is Inflight.FINISH:
                self._finish()
            else:
                self._return(self._holdings.leases, keeps_tokens=False)
            self._stopping.insist(lambda: self._register(staged, asked.model))
            self._serving.expect(staged.version, staged.name)
            report = self._exchange(staged, asked.inflight)
            self._serving.change({report.new_model, asked.model}, keeps=not report.is_reload)
            with suppress(Interrupted):  # the row of a worker that ends
                self._stopping.insist(self._tell)
                if asked.inflight is Inflight.RESTART:
                    self._stopping.insist(self._forget_beginnings)
        return report

    def _exchange(self, staged: StagedModel, inflight: Inflight) -> UpdateReport:
        """What is paused while it waits for answers is given back by whoever hears the order. What was paused right
        before makes it refuse."""
        while True:
            try:
                return self._loop.update_model(staged, inflight)
            except UsageError:
                suspended = self._holdings.suspended if self._mode.is_finishing else []
                if not suspended:
                    raise
                self._return(suspended)

    def _forget_beginnings(self) -> None:
        """What is stored of answers that were begun anew is of the old model, and nobody's answer any more."""
        if self._checkpoints is not None:
            self._checkpoints.save(STORE_SECONDS, begun_anew=True)

    @contextmanager
    def _nothing_begins(self, inflight: Inflight) -> Iterator[None]:
        """Nothing is claimed or read meanwhile: it would be under one version's terms and run under another."""
        self._mode.is_updating = True
        self._mode.is_finishing = inflight is Inflight.FINISH
        self._mode.on_change()
        held: list[Lease] = []
        try:
            with self._gate.shut_within():
                if self._mode.is_finishing:  # what is paused cannot be finished
                    self._return(self._holdings.suspended)
                held = self._holdings.leases
                yield
        finally:
            self._holdings.let_on(held)  # of an update that was refused after all
            self._mode.is_updating = self._mode.is_finishing = False
            self._mode.on_change()

    def _finish(self) -> None:
        """Waits until what was begun has ended; the rest goes back, at once where nothing of its shard was begun."""
        before, begun = self._holdings.finished, set(self._loop.progress())
        while begun := set(self._holdings.held_requests(begun)):
            leases = self._holdings.leases
            self._holdings.hold_back(leases, but=begun)
            waited_for = {lease for lease, _ in self._holdings.held_requests(begun).values()}
            self._return([lease for lease in leases if lease not in waited_for])
            self._stopping.wait(LOOK_SECONDS)
        self._return(self._holdings.leases)
        self._finished = self._holdings.finished - before

    def _return(self, leases: Collection[Lease], *, keeps_tokens: bool = True) -> None:
        give_back = self._returns.give_back
        self._given_back += self._stopping.insist(lambda: give_back(leases, keeps_tokens=keeps_tokens))

    def _register(self, staged: StagedModel, source: str) -> None:
        """Before the first row that names it."""
        engine = self._serving.engine
        self._store.register_model_version(staged.version, staged.name, source, engine.dtype, staged.details)

    def _tell(self) -> None:
        engine = self._serving.engine
        self._store.change_model(
            self._worker,
            model=engine.model_name,
            model_version=engine.model_version,
            dtype=engine.dtype,
            serves=sorted(self._serving.names),
        )

    def _result(self, staged: StagedModel, loading_seconds: float, report: UpdateReport | None = None) -> Result:
        engine = self._serving.engine
        counts = ("finished", "restarted", "recomputed", "kept")
        result: dict[str, Any] = {
            "old_version": report.old_version if report else engine.model_version,
            "new_version": report.new_version if report else staged.version,  # staged has the old weights by now
            "old_model": report.old_model if report else engine.model_name,
            "new_model": report.new_model if report else staged.name,
            "is_reload": report.is_reload if report else not staged.is_hot,
            "paused_seconds": round(report.seconds, 3) if report else 0.0,
            "loading_seconds": round(loading_seconds, 3),
            **{name: getattr(report, name) if report else 0 for name in counts},
            "given_back": self._given_back,
            "dry_run": False,
        }
        result["finished"] += self._finished
        return result


def _asked(command: Command) -> _Asked:
    arguments = command.arguments
    model, inflight = arguments.get("model"), arguments.get("inflight") or Inflight.RECOMPUTE
    if not isinstance(model, str) or not model:
        raise UsageError("the command names no model")
    try:
        policy = Inflight(inflight)
    except ValueError:
        raise UsageError(f"inflight must be {', '.join(Inflight)}, not {inflight!r}") from None
    return _Asked(model, arguments.get("revision"), policy, bool(arguments.get("dry_run")))
