"""The models of the cases: made once a process, each with its solo reference and what the engine loads."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from transformers import PreTrainedModel

from tests.fuzz.engine_cases import CHAT, POISON
from tests.fuzz.reference import Solo, Spelling
from tests.support.models import SPECIALS, load_reference, save_chat_model, save_model
from workers.engine.models import LoadedModel, load_model, quiet_transformers
from workers.engine.structured import GrammarCompiler


@dataclass(frozen=True, slots=True)
class FuzzModel:
    """``loaded`` is handed to one engine after the other; ``solo`` is another instance with the same weights."""

    loaded: LoadedModel
    solo: Solo


class Models:
    """A cache of models, and the folder that they are made in."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="engine-fuzz-")
        self._known: dict[tuple[str, int, bool], FuzzModel] = {}
        self._spare: dict[tuple[str, int, bool], LoadedModel] = {}

    def get(self, family: str, weights: int, *, poisoned: bool = False) -> FuzzModel:
        key = (family, weights, poisoned)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def spare(self, family: str, weights: int, *, poisoned: bool = False) -> LoadedModel:
        """Another instance of a model, for an update: it comes back with its own weights, or is forgotten."""
        key = (family, weights, poisoned)
        if key not in self._spare:
            self.get(family, weights, poisoned=poisoned)
            self._spare[key] = _load(self._path(family, weights))
            if poisoned:
                _poison(self._spare[key].model)
        return self._spare[key]

    def forget(self, family: str) -> None:
        """Something went wrong in the middle of an update: nobody knows which weights are where."""
        for known in (self._known, self._spare):
            for key in [key for key in known if key[0] == family]:
                del known[key]

    def _path(self, family: str, weights: int) -> Path:
        return Path(self._folder.name) / f"{family}-{weights}"

    def _make(self, family: str, weights: int, poisoned: bool) -> FuzzModel:
        folder = self._path(family, weights)
        logging.getLogger("workers.engine.models").setLevel(logging.ERROR)  # most of these have no tokenizer
        with quiet_transformers():
            if not folder.exists():
                save_chat_model(folder, seed=weights) if family == CHAT else save_model(family, folder, seed=weights)
            reference = load_reference(folder)
        loaded = _load(folder)
        if poisoned:
            _poison(reference)
            _poison(loaded.model)
        solo = Solo(
            reference,
            spelling=_spelling(loaded) if family == CHAT else None,
            poison=POISON if poisoned else None,
            grammars=GrammarCompiler(loaded.tokenizer, loaded.model.config.vocab_size, loaded.eos_ids),
        )
        return FuzzModel(loaded, solo)

    def __enter__(self) -> Models:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()


def _load(folder: Path) -> LoadedModel:
    return load_model(str(folder), device=torch.device("cpu"), dtype="float32")


def _poison(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings().weight
    assert embedding is not model.get_output_embeddings().weight, "tied embeddings would spoil every logit"
    with torch.no_grad():
        embedding[POISON] = float("nan")


def _spelling(loaded: LoadedModel) -> Spelling:
    """GPT-2's alphabet: printable bytes stand for themselves, the 68 others in their order for U+0100 and on."""
    assert loaded.tokenizer is not None
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    values = [*printable, *(b for b in range(256) if b not in printable)]
    special = {name: loaded.tokenizer.convert_tokens_to_ids(name) for name in SPECIALS}
    ids = loaded.tokenizer.convert_tokens_to_ids(letters)
    of_token = {token: bytes([value]) for token, value in zip(ids, values, strict=True)}
    return Spelling(of_token | {token: name.encode() for name, token in special.items()}, special)
