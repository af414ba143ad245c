"""What a worker serves: its model's version, and the names that batches may ask for it by. Read live by its threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.engine.engine import Engine


class Serving:
    """A hot update adds a name and keeps the others, so that batches that wait for them are still served; a reload
    replaces them. ``names`` is replaced as a whole and may be read by any thread."""

    def __init__(self, engine: Engine, names: Iterable[str] = ()) -> None:
        self.engine = engine
        self.names = frozenset({engine.model_name, *names})
        self._models = {engine.model_version: engine.model_name}

    @property
    def version(self) -> str:
        return self.engine.model_version

    def model_of(self, version: str) -> str:
        """The name of the model with that version: outcomes of the former model may still be on their way."""
        return self._models.get(version, self.engine.model_name)

    def expect(self, version: str, model: str) -> None:
        """Outcomes of that version may come from now on."""
        self._models = {**self._models, version: model}

    def change(self, names: Iterable[str], *, keeps: bool) -> None:
        """The engine serves another model now, by these names, and with ``keeps`` by the former ones too."""
        self.names = frozenset(names) | (self.names if keeps else frozenset())
