"""A model on the host, loaded and checked, before anything of a running engine is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workers.engine.comparison import check_finite, why_different
from workers.engine.layers import probe_layers
from workers.engine.models import LoadedModel, load_model
from workers.engine.swap import own_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, eq=False)
class StagedModel:
    """A model that an engine can be updated to. Once that has succeeded it holds the old one's weights instead, and can
    be used to go back.

    ``is_hot``: its weights can take the place of the running model's. Else ``why_not_hot`` says in a few words what
    differs, and only a full reload leads to it.
    """

    loaded: LoadedModel = field(repr=False)
    why_not_hot: str | None
    _compared_with: PreTrainedModel = field(repr=False)
    _logits: torch.Tensor | None = field(repr=False)

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def version(self) -> str:
        return self.loaded.version

    @property
    def details(self) -> dict[str, object]:
        return self.loaded.details

    @property
    def is_hot(self) -> bool:
        return self.why_not_hot is None

    @property
    def smoke_logits(self) -> torch.Tensor:
        """Its own answer to the smoke prompt, [tokens, V] float32."""
        if self._logits is None:
            self._logits = own_logits(self.loaded.model, _vocab_size(self.loaded))
        return self._logits

    def hold(self, old: LoadedModel, logits: torch.Tensor | None) -> None:
        """It has changed places with the old model."""
        if old.model is not self.loaded.model:
            self._compared_with = old.model  # which does not run any more: it is compared anew
        self.loaded, self._logits = old, logits


def stage(source: str, running: LoadedModel, *, revision: str | None = None) -> StagedModel:
    """Load a model beside the running one, in its dtype, and look at all that can be looked at there.

    Raises:
        UsageError: It is missing, incomplete or broken, its weights are not finite, or no engine can run it.
    """
    dtype = str(running.model.dtype).removeprefix("torch.")
    loaded = load_model(source, device=torch.device("cpu"), dtype=dtype, revision=revision)
    check_finite(loaded.model, source)
    logits = own_logits(loaded.model, _vocab_size(loaded))
    why = why_different(running, loaded)
    if why is not None:
        with torch.inference_mode():
            probe_layers(loaded.model, loaded.name)
    return StagedModel(loaded, why, running.model, logits)


def why_not_hot(running: LoadedModel, staged: StagedModel) -> str | None:
    """As it was found when it was staged, unless the engine has another model by now."""
    if staged._compared_with is not running.model:
        staged.why_not_hot = why_different(running, staged.loaded)
        staged._compared_with = running.model
    return staged.why_not_hot


def _vocab_size(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config(decoder=True).vocab_size)
