"""The native forward at sizes that no register divides, and what is refused before the kernel could follow it."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen3Config

import workers.engine.native as native
from tests.support.engines import make
from tests.support.models import EOS_ID, save_random
from workers.engine import Engine
from workers.engine.attention.compiler import COMPILERS
from workers.engine.attention.interface import LayerCache, PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.layers import probe_model
from workers.engine.models import load_model
from workers.engine.native.architectures import read_decoder
from workers.engine.native.forward import NativeForward
from workers.engine.native.operations import Kernel
from workers.engine.native.program import BoundProgram
from workers.engine.swap import exchange

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")

IDS = {"bos_token_id": 0, "eos_token_id": EOS_ID, "pad_token_id": 2, "max_position_embeddings": 256}
ODD: dict[str, PreTrainedConfig] = {
    "llama, nothing divides by two": LlamaConfig(
        **IDS, vocab_size=101, hidden_size=33, intermediate_size=7, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=10, attention_bias=True, mlp_bias=True, hidden_act="gelu",
    ),
    "qwen3, seven heads on one, values of 18 numbers": Qwen3Config(
        **IDS, vocab_size=257, hidden_size=52, intermediate_size=77, num_hidden_layers=2, num_attention_heads=7,
        num_key_value_heads=1, head_dim=18, attention_bias=True,
    ),
    "phi3, parts of merged weights that begin at odd rows": Phi3Config(
        **IDS, vocab_size=99, hidden_size=30, intermediate_size=31, num_hidden_layers=1, num_attention_heads=5,
        num_key_value_heads=1,
    ),
    "gemma2, a vocabulary of 151,936": Gemma2Config(
        **IDS, vocab_size=151_936, hidden_size=18, intermediate_size=1, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, query_pre_attn_scalar=6, sliding_window=5,
    ),
}  # fmt: skip


def step(ids: list[int], cached: int, page_size: int, groups: int) -> PackedBatch:
    """One sequence that goes on behind ``cached`` tokens, in pages 1, 2 and so on; all logits are wanted."""
    count = len(ids)
    tables = 1 + np.arange(-(-(cached + count) // page_size), dtype=np.int32)[None]
    rows = PackedRows(np.array([0, count], np.int32), np.array([cached], np.int32), tables, page_size)
    none = np.zeros(0, np.int64)
    positions, wanted = np.arange(cached, cached + count), np.arange(count)
    return PackedBatch(np.array(ids), positions, none, none, wanted, none, none, none, [rows] * groups)


def logits_of(engine: Engine, ids: list[int], cut: int) -> torch.Tensor:
    """The logits after each token, in two steps."""
    runner = engine.runner
    parts = ((ids[:cut], 0), (ids[cut:], cut))
    steps = [step(part, cached, runner.page_size, len(runner.groups)) for part, cached in parts]
    return torch.cat([runner.forward(batch, ()).clone() for batch in steps])


@torch.no_grad()
def enliven(engine: Engine) -> None:
    """Biases and norms are plain when they are made."""
    torch.manual_seed(5)
    for name, parameter in engine.runner.model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)


@pytest.mark.parametrize("form", ODD)
def test_odd_sizes_give_the_logits_of_the_modules(form: str, tmp_path: Path) -> None:
    save_random(ODD[form], tmp_path)
    ours, own = make(tmp_path, page_size=5), make(tmp_path, page_size=5, native_forward=False)
    assert ours.runner.forward_kind == "native"
    enliven(ours)
    enliven(own)
    last = ODD[form].vocab_size - 1
    ids = [5, last, 7, 90, 11, 12, 13, 3, 4, last, 66, 17, 18, 19, 20, 21, 22, 23, 24, 25]
    found, expected = logits_of(ours, ids, 17), logits_of(own, ids, 17)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert torch.equal(logits_of(ours, ids, 1), found)


def test_tied_weights_are_seen_after_an_update(tmp_path: Path) -> None:
    tied = LlamaConfig(**{**ODD["llama, nothing divides by two"].to_dict(), "tie_word_embeddings": True})
    for seed in (0, 1):
        save_random(tied, tmp_path / str(seed), seed=seed)
    engine = make(tmp_path / "0")
    loaded = load_model(str(tmp_path / "1"), device=torch.device("cpu"), dtype="float32").model
    before = logits_of(engine, [5, 6, 7, 8], 3)
    exchange(engine.runner.model, loaded)
    after = logits_of(engine, [5, 6, 7, 8], 3)
    assert torch.equal(after, logits_of(make(tmp_path / "1"), [5, 6, 7, 8], 3))
    assert not torch.equal(after, before)


# What is refused


class Bound:
    """A model's native forward, in parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = make(folder)
        model = load_model(str(folder), device=torch.device("cpu"), dtype="float32").model
        with torch.inference_mode():
            self.specs = [spec for _, spec in probe_model(model, "tiny").layers]
        self.decoder = read_decoder(model)
        runner = self.engine.runner
        self.caches = [runner.cache.layer(index) for index in range(len(self.specs))]
        self.backends: Any = runner.backends

    def program(self, **parts: Any) -> BoundProgram:
        made = {"decoder": self.decoder, "specs": self.specs, "caches": self.caches} | parts
        return BoundProgram(**made, groups=[0] * len(self.specs))

    def forward(self, **parts: Any) -> NativeForward:
        kernel = native._kernel()
        assert isinstance(kernel, Kernel)
        made = {"decoder": self.decoder, "specs": self.specs, "caches": self.caches} | parts
        return NativeForward(
            kernel, **made, groups=[0] * len(self.specs), backends=self.backends, most_rows=8, most_kept=8
        )


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Bound:
    folder = tmp_path_factory.mktemp("llama")
    save_random(ODD["llama, nothing divides by two"], folder)
    return Bound(folder)


def test_pages_that_do_not_fit_a_layer_are_refused(bound: Bound) -> None:
    good = bound.caches[0]
    assert bound.program().page_size == 4
    for keys, values in (
        (good.keys[:, :, :, :8], good.values),
        (good.keys, good.values[..., :8]),
        (good.keys, good.values.repeat(1, 2, 1, 1)),
        (good.keys, good.values.repeat(1, 1, 2, 1)),
        (good.keys.bfloat16(), good.values.bfloat16()),
        (good.keys[:, :, :, :, ::2], good.values[:, :, ::2]),
    ):
        with pytest.raises(ValueError, match="the pages of layer 1 "):
            bound.program(caches=[good, LayerCache(keys, values)])


def test_layers_with_heads_of_another_shape_are_refused(bound: Bound) -> None:
    """As many numbers in a row, so the buffers fit, but not the cosines and sines."""
    one, other = bound.specs
    longer = replace(other, num_heads=1, num_kv_heads=1, head_dim=3 * other.head_dim, value_dim=3 * other.value_dim)
    with pytest.raises(ValueError, match="heads of different number or size"):
        bound.program(specs=[one, longer])


def test_weights_and_biases_with_fewer_rows_than_their_product_are_refused(bound: Bound) -> None:
    head = bound.decoder.head
    with pytest.raises(ValueError, match="a weight of 101 rows has no row 101"):
        bound.program(decoder=replace(bound.decoder, head=replace(head, first=1)))
    with pytest.raises(ValueError, match="a bias of 7 numbers does not fit 101 rows"):
        bound.program(decoder=replace(bound.decoder, head=replace(head, bias=torch.zeros(7))))


def test_a_step_with_pages_of_another_size_is_refused(bound: Bound) -> None:
    batch = step([5, 6, 7], 0, 8, 1)
    bound.backends[0].begin(batch.rows[0])
    with pytest.raises(ValueError, match="has not pages of 4 tokens"):
        bound.forward()(torch.tensor([5, 6, 7]), batch.positions, batch.sampled_rows)


def test_times_need_a_number_for_each_operation(bound: Bound) -> None:
    batch, forward = step([5, 6, 7], 0, 4, 1), bound.forward()
    bound.backends[0].begin(batch.rows[0])
    inputs = torch.tensor([5, 6, 7]), batch.positions, batch.sampled_rows
    for wrong in (np.zeros(3), np.zeros(len(forward.kinds), np.float32)):
        with pytest.raises(ValueError, match="operations need as many"):
            forward(*inputs, wrong)
    times = np.zeros(len(forward.kinds))
    forward(*inputs, times)
    assert times.min() >= 0 < times.sum()


def test_ids_of_any_integer_type_are_read_as_what_they_are(bound: Bound) -> None:
    batch, forward = step([5, 6, 7], 0, 4, 1), bound.forward()
    found = []
    for kind in (torch.int64, torch.int32, torch.uint8):
        bound.backends[0].begin(batch.rows[0])
        found.append(forward(torch.tensor([5, 6, 7], dtype=kind), batch.positions, batch.sampled_rows).clone())
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_whatever_goes_wrong_while_it_is_set_up_the_modules_run(
    bound: Bound, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release of transformers may call its modules' parts by other names."""

    def other(*_: object) -> None:
        raise AttributeError("'LlamaMLP' object has no attribute 'act_fn'")

    monkeypatch.setattr(native, "read_decoder", other)
    with caplog.at_level(logging.WARNING):
        engine = make(bound.folder)
    assert engine.runner.forward_kind == "transformers"
    assert any("cannot be set up (AttributeError: 'LlamaMLP'" in message for message in caplog.messages)
