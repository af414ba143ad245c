"""Layers with the same window share a page table, and pages behind a window go back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.models import VOCAB_SIZE, load_reference, save_model, solo_greedy
from workers.engine import Engine, EngineConfig, EngineRequest, SamplingParams
from workers.engine.attention.interface import LayerSpec
from workers.engine.cache import MAX_GROUPS, group_layers

FULL, SLIDING = None, 8


def specs(windows: list[int | None], kv_heads: list[int] | None = None) -> list[LayerSpec]:
    heads = kv_heads or [2] * len(windows)
    return [
        LayerSpec(i, 4, h, 8, 8, 1.0, sliding_window=w) for i, (w, h) in enumerate(zip(windows, heads, strict=True))
    ]


def groups(windows: list[int | None], kv_heads: list[int] | None = None) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in group_layers(specs(windows, kv_heads))]


def test_layers_of_one_kind_are_one_group() -> None:
    assert groups([FULL] * 5) == [(FULL, 5)]
    assert groups([SLIDING] * 5) == [(SLIDING, 5)]


def test_groups_follow_the_rarest_kind() -> None:
    assert groups([SLIDING, FULL] * 3) == [(SLIDING, 3), (FULL, 3)]
    assert groups([SLIDING, SLIDING, FULL] * 2) == [(SLIDING, 2), (SLIDING, 2), (FULL, 2)]


def test_there_are_never_many_groups() -> None:
    assert len(groups([SLIDING] * 39 + [FULL])) <= MAX_GROUPS + 1


def test_layers_of_different_shape_share_one_table_and_the_widest_window() -> None:
    assert groups([SLIDING, 4], kv_heads=[1, 2]) == [(SLIDING, 2)]
    assert groups([SLIDING, FULL], kv_heads=[1, 2]) == [(FULL, 2)]


def test_every_layer_is_in_one_group() -> None:
    windows: list[int | None] = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]
    layers = [layer for group in group_layers(specs(windows)) for layer in group.layers]
    assert sorted(layers) == list(range(7))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All its layers see 24 tokens."""
    return save_model("mistral", tmp_path_factory.mktemp("mistral"))


def test_a_long_answer_needs_no_more_pages_than_its_window(mistral: Path) -> None:
    engine = Engine(str(mistral), EngineConfig(device="cpu", page_size=4, num_blocks=40, max_batch_tokens=8))
    prompt = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(100)]
    engine.add(EngineRequest("long", tuple(prompt), SamplingParams(temperature=0, max_tokens=60)))
    most, outputs = 0, []
    while engine.has_work:
        outputs += engine.step()
        most = max(most, engine.pool.capacity - engine.pool.free)
    assert most <= (24 - 1 + 8) // 4 + 2  # a window and a chunk, wherever they begin in a page
    assert list(outputs[0].token_ids) == solo_greedy(load_reference(mistral), prompt, 60)


def test_a_prompt_longer_than_the_cache_runs_when_its_window_fits(mistral: Path) -> None:
    engine = Engine(str(mistral), EngineConfig(device="cpu", page_size=4, num_blocks=12, max_batch_tokens=8))
    prompt = [random.Random(2).randrange(3, VOCAB_SIZE) for _ in range(150)]
    output = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0]
    assert list(output.token_ids) == solo_greedy(load_reference(mistral), prompt, 20)


def test_nothing_behind_a_window_or_after_the_end_is_ever_read(mistral: Path) -> None:
    """Pages begin as NaN, the null page too: a single stale slot in a sum would show."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 70))] for _ in range(6)]
    reference = load_reference(mistral)
    for page_size in (1, 4, 16):
        engine = Engine(str(mistral), EngineConfig(device="cpu", page_size=page_size, max_batch_tokens=19))
        for tensor in engine.runner.cache.tensors:
            tensor.fill_(float("nan"))
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        assert [list(o.token_ids) for o in outputs] == [solo_greedy(reference, p, 24) for p in prompts]
