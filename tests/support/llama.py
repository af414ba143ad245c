"""The tiny model that most tests of the engine run on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama without a tokenizer. Nobody writes into it."""
    from tests.support.models import save_model  # imports torch, which tests of other parts do without

    return save_model("llama", tmp_path_factory.mktemp("llama"))
