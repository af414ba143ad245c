"""What the check was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """``tiny`` takes small shapes and few tokens, so that the check itself can be tried on a CPU.

    ``before`` is what earlier sections found: parts by name, by section.
    """

    device: str = "cuda"
    tiny: bool = False
    before: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def peak(self, name: str) -> float | None:
        """A figure of the part ``peaks``, if it was measured: operations or bytes a second."""
        found = self.before.get("machine", {}).get("peaks", {}).get(name)
        return float(found) if found else None
