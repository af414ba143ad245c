"""What a model is called: by its content, wherever it lies, on the hub too."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from batchjobs.errors import UsageError
from tests.support.engines import make
from tests.support.models import save_chat_model, save_model
from workers.engine import Engine, EngineConfig, models
from workers.engine.models import LoadedModel, load_model

COMMITS = ("1" * 40, "2" * 40)
HUB_ID = "some-org/some-model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub that cannot be reached: two commits of a model, the second one is ``main``."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    for seed, commit in enumerate(COMMITS):
        save_chat_model(repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMITS[1])
    (repository / "refs" / "v1").write_text(COMMITS[0])
    return repository


def load(source: object, revision: str | None = None) -> LoadedModel:
    return load_model(str(source), device=torch.device("cpu"), dtype="float32", revision=revision)


def test_a_model_is_called_by_its_content(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "m")
    loaded = load(folder)
    file = folder / "model.safetensors"
    whole = hashlib.sha256(hashlib.sha256(file.read_bytes()).digest()).hexdigest()
    reading = str(loaded.details["reading_sha256"])
    assert loaded.version == "sha256:" + hashlib.sha256(f"{whole} {reading}".encode()).hexdigest()[:16]
    assert loaded.details == {
        "architecture": "LlamaForCausalLM",
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "bytes": file.stat().st_size,
        "weights_sha256": whole,
        "reading_sha256": reading,
        "revision": None,
    }
    assert load(shutil.copytree(folder, tmp_path / "elsewhere")).version == loaded.version


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def swap_two_tokens(folder: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit_json(folder / "tokenizer.json", swap)


def write_another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def turn_faster(folder: Path) -> None:
    edit_json(folder / "config.json", lambda content: content["rope_parameters"].update(rope_theta=5000.0))


def end_elsewhere(folder: Path) -> None:
    edit_json(folder / "generation_config.json", lambda content: content.update(eos_token_id=1))


@pytest.mark.parametrize("change", [swap_two_tokens, write_another_template, turn_faster, end_elsewhere])
def test_whatever_decides_on_an_answer_makes_another_version(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = save_chat_model(tmp_path / "m")
    before = load(folder)
    change(folder)
    after = load(folder)
    assert after.version != before.version
    assert after.details["weights_sha256"] == before.details["weights_sha256"]


def test_who_saved_it_makes_no_other_version(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "m")
    before = load(folder).version
    edit_json(folder / "config.json", lambda content: content.update(transformers_version="5.0.0", use_cache=False))
    assert load(folder).version == before


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = save_model("llama", tmp_path / "m"), save_model("llama", tmp_path / "other", seed=1)
    check = models.check_weights

    def replaced(report: Any, source: str) -> None:
        check(report, source)
        (other / "model.safetensors").rename(folder / "model.safetensors")

    monkeypatch.setattr(models, "check_weights", replaced)
    with pytest.raises(UsageError, match="changed while they were read"):
        load(folder)


def test_a_hub_model_has_the_name_of_the_same_weights_in_a_folder(hub: Path, tmp_path: Path) -> None:
    loaded = load(HUB_ID)
    folder = shutil.copytree(hub / "snapshots" / COMMITS[1], tmp_path / "copy")
    assert loaded.version == load(folder).version
    assert loaded.details["revision"] == COMMITS[1]
    assert loaded.name == HUB_ID


@pytest.mark.parametrize("revision", ["v1", COMMITS[0]])
def test_a_revision_is_a_tag_or_a_commit(hub: Path, revision: str) -> None:
    assert hub.is_dir()
    loaded, newest = load(HUB_ID, revision), load(HUB_ID)
    assert (loaded.details["revision"], newest.details["revision"]) == COMMITS
    assert loaded.version != newest.version
    engine = Engine(HUB_ID, EngineConfig(device="cpu", num_blocks=20), revision=revision)
    assert (engine.model_version, engine.model_details) == (loaded.version, loaded.details)


def test_what_else_lies_in_a_snapshot_changes_no_name(hub: Path) -> None:
    before = load(HUB_ID).version
    (hub / "snapshots" / COMMITS[1] / "consolidated.safetensors").write_bytes(b"of another program")
    (hub / "snapshots" / COMMITS[1] / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert load(HUB_ID).version == before


def test_weights_in_parts(hub: Path) -> None:
    snapshot = hub / "snapshots" / COMMITS[1]
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    (snapshot / "model.safetensors").unlink()
    model.save_pretrained(snapshot, max_shard_size="30KB")
    parts = sorted(snapshot.glob("model-*.safetensors"))
    assert len(parts) > 1
    loaded = load(HUB_ID)
    assert loaded.details["bytes"] == sum(part.stat().st_size for part in parts)
    assert loaded.version == load(snapshot).version


def test_an_engine_is_updated_to_a_revision(hub: Path) -> None:
    engine = make(hub / "snapshots" / COMMITS[1])
    report = engine.update_model(HUB_ID, revision="v1")
    assert (report.new_version, report.new_model) == (load(HUB_ID, "v1").version, HUB_ID)
    assert engine.model_details["revision"] == COMMITS[0]


def test_what_is_here_has_no_revision(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "m")
    with pytest.raises(UsageError, match="only a model of the hub has a revision"):
        load(folder, "main")


def test_an_unknown_revision_is_one_sentence(hub: Path) -> None:
    assert hub.is_dir()
    with pytest.raises(UsageError, match=f"cannot load the model '{HUB_ID}'") as caught:
        load(HUB_ID, "v9")
    assert "\n" not in str(caught.value)
