"""The benchmark: its workload, its figures, and that every system must do the whole work."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from batchjobs.errors import BatchjobsError, UsageError
from tests.support.models import load_reference, solo_greedy
from workers import bench as module
from workers.bench import BASELINES, OurEngine, bench
from workers.engine.static import generate_in_static_batches
from workers.workloads import WORKLOADS, Work, mixed_64, workload


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    work = [Work((5, 6, 7), 4), Work((8, 9), 7), Work((10, 11, 12, 13), 2)]
    monkeypatch.setitem(WORKLOADS, "mixed-64", lambda: work)
    return work


def test_mixed_64_has_the_promised_tokens() -> None:
    work = mixed_64()
    assert len(work) == 64
    assert sum(len(w.prompt_ids) for w in work) == 7_019
    assert sum(w.output_tokens for w in work) == 8_703
    assert {1000 <= i <= 20000 for w in work for i in w.prompt_ids} == {True}


def test_unknown_names_are_refused_with_the_known_ones(llama: Path) -> None:
    with pytest.raises(UsageError, match="mixed-64"):
        workload("nonsense")
    with pytest.raises(UsageError, match="transformers, static"):
        bench(model=str(llama), baselines=["nonsense"])


def test_static_batches_give_the_solo_answers(llama: Path) -> None:
    reference = load_reference(llama)
    prompts, limits = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], [5, 3, 8]
    reference.generation_config.eos_token_id = None
    answers = generate_in_static_batches(reference, prompts, limits, batch_size=2)
    assert answers == [solo_greedy(reference, p, n) for p, n in zip(prompts, limits, strict=True)]


def test_every_system_takes_its_turn_and_the_report_adds_up(
    llama: Path, small: list[Work], capsys: pytest.CaptureFixture[str]
) -> None:
    bench(model=str(llama), baselines=["transformers", "static"], rounds=2, as_json=True)
    printed = capsys.readouterr()
    report = orjson.loads(printed.out)
    assert (report["rounds"], report["total_input_tokens"], report["total_output_tokens"]) == (2, 9, 13)
    assert [s["name"] for s in report["systems"]] == [
        "batchjobs",
        *(BASELINES[b].name for b in ("transformers", "static")),
    ]  # type: ignore[attr-defined]
    for system in report["systems"]:
        assert system["num_requests"] == 3
        assert system["total_num_tokens"] == 22
        assert system["tokens_per_second"] == pytest.approx(22 / system["elapsed_time"])
        assert 0 < system["output_throughput_min"] <= system["output_throughput"] <= system["output_throughput_max"]
    assert report["systems"][0]["slower_than_batchjobs"] == 1.0
    assert printed.err.count("round 2/2") == 3
    bench(model=str(llama), rounds=1)
    assert "3 requests, 9 prompt and 13 output tokens" in capsys.readouterr().out


def test_a_system_that_does_less_fails_the_run(llama: Path, small: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.OurEngine, "run", lambda self, work: (1.0, [1] * len(work)))
    with pytest.raises(BatchjobsError, match="did not make the asked number of tokens"):
        bench(model=str(llama), rounds=1)
    assert OurEngine.name == "batchjobs"
