"""What the check for a GPU calculates, by hand: shares, idle time, goals; and the models that it makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from ops.gpu import busy, kinds, shapes, speed
from ops.gpu.busy import covered
from ops.gpu.correctness import TINY, _bfloat16, _no_waiting, _variants
from ops.gpu.goals import goals
from ops.gpu.notes import Notes
from ops.gpu.references import apart, reference_of
from ops.gpu.report import report, table
from ops.gpu.setup import Setup
from ops.gpu.speed import share, span_need
from tests.support.flash_attention import stand_in
from tests.support.rehearsal import rehearse
from workers.bench.bound import Need
from workers.bench.system import OurEngine
from workers.engine import graphs, runner
from workers.engine.attention import cuda, flash_search
from workers.engine.attention.flash_search import Found
from workers.engine.config import EngineConfig


def test_decode_steps_need_the_weights_once_and_what_each_token_sees(llama: Path) -> None:
    """Against the sizes of the tiny model: 2 layers of width 32, 4 query and 2 key heads of 8, 48 inside, 97 words."""
    ours = OurEngine(str(llama), EngineConfig(dtype="float32", device="cpu", page_size=16))
    weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48) + 32 * 97
    one = ours.engine.runner
    stored = one.cache.page_bytes / one.page_size / 2  # bytes of a token in a layer
    prompts = [tuple(range(10)), tuple(range(20))]
    span = span_need(ours.engine, prompts, [1, 4], steps=3)
    assert span is not None
    keys = (11 + 12 + 13) + (24 + 25 + 26)  # that the rows of the three steps see: behind the last token each
    assert span.bytes == pytest.approx(3 * weights * 4 + 2 * keys * stored)
    assert span.flops == 2 * 6 * weights + 4 * 32 * 2 * keys
    assert isinstance(span, Need)


def test_a_share_is_of_what_the_rate_would_have_done() -> None:
    assert share(6e12, 2.0, 4e12) == 0.75
    assert share(6e12, 2.0, None) is None


def test_time_that_kernels_share_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 4), (1, 3), (6, 6.5)]) == 6


def test_the_profiler_tells_how_long_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the profiler: kernels in microseconds, what is no kernel left out."""

    def event(begin: float, end: float, device: object, *, is_ours: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(time_range=span, device_type=device, is_user_annotation=is_ours)

    on_gpu, on_host = busy.DeviceType.CUDA, busy.DeviceType.CPU
    events = [event(0, 300, on_gpu), event(200, 500, on_gpu), event(0, 9000, on_host)]
    events += [event(0, 9000, on_gpu, is_ours=True), event(600, 700, on_gpu)]
    seen = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(busy, "profile", lambda activities: nullcontext(seen))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    done: list[int] = []
    assert busy.busy_seconds(lambda: done.append(1)) == pytest.approx(600e-6)
    assert done == [1]


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        (1.6, {"busy_ms": 400.0, "idle_share": pytest.approx(0.2)}),
        (2.4, {"busy_ms": pytest.approx(600.0), "idle_share": 0.0}),
        (0.0, {"idle_share": None, "idle_not_measured": "the profiler saw no work of the device"}),
        (None, {"idle_share": None, "idle_not_measured": "RuntimeError: no CUPTI"}),
    ],
)
def test_idle_is_what_is_left_of_a_step_that_nobody_watched(
    seconds: float | None, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(work: Any) -> float:
        if seconds is None:
            raise RuntimeError("no CUPTI")
        work()
        return seconds

    monkeypatch.setattr(speed, "busy_seconds", measured)
    engine = SimpleNamespace(step=lambda: None)
    assert speed.idle(engine, 4, step_seconds=0.5) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decode", "verdict", "missed_by"),
    [
        ([{"share_of_bandwidth": 0.61}, {"share_of_bandwidth": 0.60}], "met", None),
        ([{"share_of_bandwidth": 0.61}, {"share_of_bandwidth": 0.475}], "missed", 12.5),
        ([{"share_of_bandwidth": 0.61}, {"error": "out of memory"}], "met so far", None),
        ([{"left_out": "no time"}, {"share_of_bandwidth": None}], "not measured", None),
    ],
)
def test_a_goal_is_met_by_the_worst_figure_or_not_at_all(
    decode: list[dict[str, Any]], verdict: str, missed_by: float | None
) -> None:
    parts = {"start": {}, "decode 64": decode[0], "decode 256": decode[1], "prefill": {"share_of_peak": 0.5}}
    first, prefill, idle = goals({"speed llama-8b": parts, "machine": {}})
    assert first["verdict"] == verdict
    assert first["missed_by"] == (None if missed_by is None else pytest.approx(missed_by))
    assert (prefill["verdict"], idle["verdict"]) == ("met", "not measured")


def test_an_idle_device_is_a_goal_from_above() -> None:
    parts = {"decode 64": {"idle_share": 0.08}, "decode 128": {"idle_share": 0.01}}
    idle = goals({"speed qwen3-0.6b": parts})[-1]
    assert (idle["verdict"], idle["model"]) == ("missed", "qwen3-0.6b")
    assert idle["missed_by"] == pytest.approx(3)


def test_a_table_says_what_failed_and_by_how_much_a_goal_is_missed() -> None:
    found = {
        "machine": {"device": {"name": "a GPU"}, "peaks": {"flops": 8e14, "bytes_per_second": 4e12}},
        "correctness": {"bfloat16, llama": {"differs": "further away"}, "float32": {"same": 3, "answers": 3}},
        "speed llama-8b": {"decode 64": {"output_tokens_per_second": 5000.0, "share_of_bandwidth": 0.5}},
    }
    found["workloads llama-8b"] = {"mixed-64, turn 1, transformers continuous batching": {"error": "no memory"}}
    made = report(found, asked={}, seconds=3.0, made_at="now")
    assert made["failed"] == ["correctness: bfloat16, llama: further away"]
    text = table(made)
    assert "a GPU, 800 TFLOP/s in bfloat16, 4 TB/s" in text
    assert "| llama-8b | decode 64 | 5,000 |  | 50.0% |  |" in text
    assert "missed by 10.0 points: decode at 60%" in text
    assert "FAILED correctness: bfloat16, llama: further away" in text


# ---------------------------------------------------------------------------------------------------------- the models


def test_the_shapes_are_those_of_the_models_that_they_are_called_after() -> None:
    """By their published numbers of parameters: 8,030,261,248 and 596,049,920."""
    from transformers import AutoModelForCausalLM

    for config, wanted in ((shapes.llama_8b(), 8_030_261_248), (shapes.qwen3_0_6b(), 596_049_920)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == wanted


def test_every_kernel_is_compared_and_the_best_one_recorded_too() -> None:
    best = [("plain", False), ("best", False), ("best", True), ("next", False)]
    assert _variants(["plain", "best", "next"], every=False) == best
    assert _variants(["plain", "best", "next"], every=True) == [*best, ("next", True)]
    assert _variants(["plain"], every=True) == [("plain", False)]


class Repeating:
    """Records nothing: what was to be recorded is done again."""

    def capture(self, work: Callable[[], object]) -> Any:
        work()
        return SimpleNamespace(replay=work)


def test_a_kernel_is_held_against_the_recompute_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins, the GPU's way rehearsed. The engine's own trial of kernels, which would refuse the wrong one, is
    switched off."""
    right = stand_in("flash-attn 2", page=16)
    wrong = replace(right, name="wrong", decode=lambda *asked: right.decode(*asked) * 1.1)
    rehearse(monkeypatch)
    monkeypatch.setattr(flash_search, "find_functions", lambda device: iter([Found((right, wrong))]))
    monkeypatch.setattr(runner, "choose_backend", lambda *asked: cuda.choose(*asked).backend)
    monkeypatch.setattr(graphs, "maker_of", lambda device: Repeating())
    monkeypatch.setattr(cuda, "_fault", lambda *asked: None)
    notes = Notes("correctness", 100.0)
    _bfloat16(notes, Setup("cpu", tiny=True), TINY, {"llama": lambda: shapes.small(head_dim=64)})
    parts = {name.removeprefix("bfloat16, llama, "): found for name, found in notes.parts.items()}
    assert [*parts] == ["built", "plain torch", right.name, f"{right.name}, graphs", "wrong", "wrong, graphs"]
    bad = {name for name, found in parts.items() if "differs" in found or "error" in found}
    assert bad == {"wrong", "wrong, graphs"}
    assert "further from the recompute" in parts["wrong"]["differs"]
    assert [found["attention"] for found in parts.values() if "attention" in found][:2] == ["torch", right.name]
    recorded = {name for name, found in parts.items() if found.get("recorded")}
    assert recorded == {f"{right.name}, graphs", "wrong, graphs"}


def test_steady_steps_are_tried_for_waiting_after_all_prompts_are_computed() -> None:
    found = _no_waiting(Setup("cpu", tiny=True), TINY, kinds.PLAIN)
    assert found["steps"] == TINY.steady_steps
    assert found["tokens"] >= 6 * TINY.steady_steps


def test_twins_share_their_memory_and_not_their_attention() -> None:
    model = shapes.build(shapes.small(LlamaConfig, num_hidden_layers=1), "cpu", torch.float32)
    other = shapes.twin(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
    other.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    assert other.model.layers[0] is not model.model.layers[0]


def test_how_far_an_answer_is_apart_is_told_in_logprobs() -> None:
    model = shapes.build(shapes.small(LlamaConfig, num_hidden_layers=1), "cpu", torch.float32)
    reference = reference_of(model)
    prompt, answer = [5, 6, 7], [9, 4]
    with torch.inference_mode():
        known = torch.log_softmax(reference(input_ids=torch.tensor([[*prompt, *answer]])).logits[0], dim=-1)
    told = [float(known[2, 9]), float(known[3, 4]) + 0.25]
    far = apart(reference, [prompt], [answer], [told])
    assert far.worst_error == pytest.approx(0.25, abs=1e-5)
    assert far.mean_error == pytest.approx(0.125, abs=1e-5)
    assert far.worst_regret == pytest.approx(float((known[2:4].amax(1) - known[[2, 3], [9, 4]]).max()), abs=1e-5)
    exact = apart(reference, [prompt], [answer], [[float(known[2, 9]), float(known[3, 4])]])
    assert exact.within(exact)
    assert not apart(reference, [prompt], [answer], [[float("nan"), 0.0]]).within(far)
