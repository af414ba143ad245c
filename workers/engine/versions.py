"""What weights are called: by their content, so that the same weights have the same name wherever they lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIXES = (".safetensors", ".bin")
_INDEXES = {SAFE_WEIGHTS_NAME: SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME: WEIGHTS_INDEX_NAME}  # in the order of preference


def snapshot_folder(hub_id: str, revision: str | None) -> Path:
    """Where the cache keeps a hub model whose configuration was loaded just now; its name is the commit."""
    config = cached_file(hub_id, "config.json", revision=revision, local_files_only=True)
    assert config is not None  # else it would have raised
    return Path(config).parent


def weight_files(source: Path) -> list[Path]:
    """A ``.gguf`` file itself, or every weight file of a model folder."""
    return [source] if source.is_file() else sorted(f for f in source.iterdir() if f.suffix in SUFFIXES)


def loaded_files(snapshot: Path) -> list[Path]:
    """The weight files that transformers loads from a snapshot, whatever else of the model was fetched into it."""
    for whole, index in _INDEXES.items():
        if (snapshot / whole).is_file():
            return [snapshot / whole]
        if (snapshot / index).is_file():
            parts = json.loads((snapshot / index).read_text())["weight_map"].values()
            return sorted({snapshot / part for part in parts})
    return weight_files(snapshot)


def weights_digest(files: Sequence[Path]) -> str:
    """64 hex digits over the files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def version_of(digest: str) -> str:
    return f"sha256:{digest[:16]}"


def details(model: PreTrainedModel, files: Sequence[Path], digest: str, revision: str | None) -> dict[str, object]:
    """What is worth to be known of a version later: ``revision`` is the commit of a hub model, else None."""
    return {
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in files),
        "sha256": digest,
        "revision": revision,
    }
