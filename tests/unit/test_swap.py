"""The exchange of two models' weights, in both of its ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.support.models import FAMILIES, load_reference, save_random
from workers.engine import swap
from workers.engine.comparison import weights

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two tiny models whose embeddings are tied to their heads."""
    config = LlamaConfig(**{**FAMILIES["llama"].to_dict(), "tie_word_embeddings": True})
    made = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")]
    for seed, folder in enumerate(made):
        save_random(config, folder, seed=seed)
    return made


@pytest.fixture
def pair(folders: list[Path]) -> list[PreTrainedModel]:
    return [load_reference(folder) for folder in folders]


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("keeps_addresses", [False, True], ids=["on the host", "on a device"])
def test_each_becomes_the_other_and_back_again(
    pair: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch, keeps_addresses: bool
) -> None:
    if keeps_addresses:  # what is done on a device can be done on the host, too
        monkeypatch.setattr(swap, "exchange_memory", swap.exchange_contents)
    one, other = pair
    first, second = logits(one), logits(other)
    addresses = {name: tensor.data_ptr() for name, tensor in weights(one).items()}
    swap.exchange(one, other)
    assert torch.equal(logits(one), second)
    assert torch.equal(logits(other), first)
    stayed = [tensor.data_ptr() == addresses[name] for name, tensor in weights(one).items()]
    assert all(stayed) if keeps_addresses else not any(stayed)
    for model in pair:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    swap.exchange(one, other)
    assert torch.equal(logits(one), first)
    assert torch.equal(logits(other), second)
