"""What a model is called: by all of its content that decides on answers, so that it has one name wherever it lies.

That is the weights, byte by byte, and how they are read: the configuration (but for what changes no logit), the
tokenizer with its special tokens, the chat template, and the tokens that end an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from workers.engine.comparison import HARMLESS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SUFFIXES = (".safetensors", ".bin")
_INDEXES = {SAFE_WEIGHTS_NAME: SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME: WEIGHTS_INDEX_NAME}  # in the order of preference


def snapshot_folder(hub_id: str, revision: str | None) -> Path:
    """Where the cache keeps a hub model whose configuration was loaded just now; its name is the commit."""
    config = cached_file(hub_id, "config.json", revision=revision, local_files_only=True)
    assert config is not None  # else it would have raised
    return Path(config).parent


def model_files(source: Path) -> list[Path]:
    """A ``.gguf`` file itself, or the weight files that transformers loads from a folder, whatever else lies in it."""
    if source.is_file():
        return [source]
    for whole, index in _INDEXES.items():
        if (source / whole).is_file():
            return [source / whole]
        if (source / index).is_file():
            parts = json.loads((source / index).read_text())["weight_map"].values()
            return sorted({source / part for part in parts})
    return sorted(file for file in source.iterdir() if file.suffix in SUFFIXES)


def state_of(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """Differs where one of them was written or replaced in between."""
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files)]


def weights_digest(files: Sequence[Path]) -> str:
    """64 hex digits over the files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def reading_digest(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, eos_ids: Collection[int]
) -> str:
    """64 hex digits over everything beside the weights, as it was loaded: how a file spells it does not matter."""
    parts = {"config": _plain(config.to_dict()), "eos": sorted(eos_ids), "tokenizer": _described(tokenizer)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in HARMLESS and not name.startswith("_")}
    return {name: _plain(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _described(tokenizer: PreTrainedTokenizerBase | None) -> list[Any] | None:
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow ones have none
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return [rules, sorted(tokenizer.all_special_ids), tokenizer.chat_template]


def version_of(weights: str, reading: str) -> str:
    """From the digests of both."""
    return f"sha256:{hashlib.sha256(f'{weights} {reading}'.encode()).hexdigest()[:16]}"


def details(
    model: PreTrainedModel, files: Sequence[Path], weights: str, reading: str, revision: str | None
) -> dict[str, object]:
    """What is worth to be known of a version later, both digests among it: ``revision`` is the commit of a hub model,
    else None."""
    return {
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in files),
        "weights_sha256": weights,
        "reading_sha256": reading,
        "revision": revision,
    }
