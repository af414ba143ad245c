"""Whole engines whose attention runs in the functions of other packages (stand-ins), the GPU's way rehearsed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import make, prompts
from tests.support.flash_attention import stand_in
from tests.support.models import load_reference, save_model, solo_greedy
from tests.support.rehearsal import rehearse
from workers.engine import SamplingParams, runner
from workers.engine.attention.cuda import choose
from workers.engine.attention.flash_functions import FlashFunctions
from workers.engine.attention.flash_search import Found
from workers.engine.attention.interface import AttentionBackend


@pytest.mark.parametrize(
    ("family", "functions", "settings"),
    [
        ("llama", stand_in("flash-attn 2", exact=True), {}),
        ("gemma2", stand_in("FlashAttention 3", exact=True), {"max_batch_tokens": 19, "num_blocks": 40}),
        ("mistral", stand_in("flash-attn 2 varlen", exact=True, page=4), {"max_batch_tokens": 13, "num_blocks": 60}),
        ("qwen3", stand_in("varlen_attn", exact=True, page=8), {"max_batch_tokens": 32, "num_blocks": 60}),
    ],
    ids=["llama", "gemma2, whose windows are too small", "mistral", "qwen3"],
)
def test_greedy_tokens_equal_the_solo_run(
    family: str, functions: FlashFunctions, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse(monkeypatch)

    def on_stand_ins(*asked: Any) -> AttentionBackend:
        return choose(*asked, finds=[Found((functions,))]).backend

    monkeypatch.setattr(runner, "choose_backend", on_stand_ins)
    folder = save_model(family, tmp_path)
    engine = make(folder, page_size=None, **settings)
    asked = prompts(10, longest=50)
    outputs = engine.generate(asked, SamplingParams(temperature=0, max_tokens=12))
    reference = load_reference(folder)
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.token_ids) == solo_greedy(reference, prompt, 12)
    assert {backend.name for backend in engine.runner.backends} == {functions.name}
    assert engine.pool.free == engine.pool.capacity
