"""What ``bench`` measures beside the engine, and that none of it is told wrong or stays."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from batchjobs.errors import BatchjobsError
from batchjobs.jsonl import parse_line
from batchjobs.settings import Settings
from workers.bench import BASELINES, OurEngine, bench, delivery
from workers.bench.baselines import StaticBatches, peer_sequences
from workers.bench.bound import Machine, need
from workers.bench.delivery import EndToEnd
from workers.bench.system import Run
from workers.engine.config import EngineConfig
from workers.workloads import Work


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.bench.rounds.measure_machine", lambda device, dtype: Machine(1e9, 1e9))


def test_the_bound_is_that_of_the_answers_that_were_made(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that end by themselves are shorter than they could be, and so is the time that they need at least."""
    requests = [
        parse_line(b'{"prompt": [%d, 6, 7], "max_tokens": 200}' % first, 1, n) for n, first in enumerate((5, 9))
    ]
    bench(workload="own.jsonl", requests=requests, respects_eos=True, model=str(llama), rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    ours = OurEngine(str(llama), EngineConfig(dtype="float32", device="cpu"), respects_eos=True)
    made = ours.run([Work((5, 6, 7), 200), Work((9, 6, 7), 200)]).made
    assert sum(made) < 400
    done, asked = (
        need(ours.engine, [Work((first, 6, 7), count) for first, count in zip((5, 9), counts, strict=True)])
        for counts in (made, [200, 200])
    )
    assert done is not None
    assert asked is not None
    assert report["needed_gflop"] == pytest.approx(done.flops / 1e9)
    assert report["needed_gb"] == pytest.approx(done.bytes / 1e9)
    assert done.flops < asked.flops


def test_baselines_have_the_device_and_the_dtype_that_the_engine_has(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    class Peer:
        name = "peer"

        def __init__(self, *how: object) -> None:
            asked.append(how)

        def run(self, work: list[Work]) -> Run:
            return Run(1.0, [item.output_tokens for item in work])

    monkeypatch.setitem(BASELINES, "peer", Peer)
    requests = [parse_line(b'{"prompt": [5, 6, 7], "max_tokens": 3}', 1, 0)]
    bench(workload="own", requests=requests, model=str(llama), dtype="auto", baselines=["peer"], rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    assert asked == [(str(llama), report["dtype"], 64, "cpu")]
    assert report["dtype"] != "auto"


def test_a_baseline_says_how_many_sequences_it_runs(llama: Path) -> None:
    assert [peer_sequences(most, "cpu") for most in (4, 16, 64)] == [4, 16, 16]
    assert peer_sequences(64, "cuda:1") == 64  # what is fastest was measured on CPUs
    few = StaticBatches(str(llama), "bfloat16", 4)
    assert few.name == "static batches of 4"
    assert str(few.model.dtype) == "torch.bfloat16"
    with pytest.raises(KeyError):
        StaticBatches(str(llama), "nonsense", 4)


def test_a_worker_that_does_not_stop_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with the engine while others are measured."""
    over = threading.Event()
    monkeypatch.setattr(delivery, "EngineLoop", lambda engine: SimpleNamespace(is_running=True))
    monkeypatch.setattr(delivery, "Daemon", lambda *_: SimpleNamespace(run=over.wait, stop=lambda reason: None))
    ours: Any = SimpleNamespace(engine=SimpleNamespace(config=SimpleNamespace(max_requests_per_batch=2)))
    client: Any = SimpleNamespace(store=None, queue=None)
    with ExitStack() as stack:
        lives = stack.enter_context(EndToEnd(ours, Settings())._worker(client))
        assert lives()
        monkeypatch.setattr(delivery, "START_SECONDS", 0.01)
        with pytest.raises(BatchjobsError, match="did not stop"):
            stack.close()
    over.set()
