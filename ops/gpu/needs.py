"""What has to be installed for the check, beside this tree. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

REQUIRED = ("torch", "transformers", "numpy", "psutil", "safetensors", "tokenizers")
"""What the measured parts of the engine import at once. A test holds this against their import statements."""

OPTIONAL = {
    "flash_attn": "attention runs on torch's own kernels",
    "flash_attn_interface": "FlashAttention 3 is not looked at",
}
"""What may be missing, and what follows."""


def missing(names: Iterable[str] = REQUIRED) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def complaint(names: list[str]) -> str:
    """One sentence that names them and says what to do."""
    listed = ", ".join(names)
    return (
        f"the check needs {listed}, which this Python does not have: `pip install {' '.join(names)}`, or carry the "
        "wheels as docs/gpu.md says"
    )
