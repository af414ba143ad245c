"""The benchmark: its workloads, its figures, and that every system must do the whole work."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from batchjobs.client import Client
from batchjobs.errors import BatchjobsError, UsageError
from batchjobs.jsonl import parse_line
from batchjobs.settings import load_settings
from batchjobs.store import WorkerInfo
from batchjobs.types import Request
from tests.support.models import load_reference, solo_greedy
from workers.bench import OurEngine, bench
from workers.bench.bound import Machine, Need, need
from workers.bench.delivery import measured_settings
from workers.bench.latency import latencies
from workers.bench.percentiles import percentile, spread_ms
from workers.bench.rounds import check_fit
from workers.bench.system import Run, WithoutSharing
from workers.engine.config import EngineConfig
from workers.engine.static import generate_in_static_batches
from workers.workloads import WORKLOADS, Work, long_tail, mixed_64, random_1024_128, shared_prefix, workload

SMALL = [Work((5, 6, 7), 4), Work((8, 9), 7), Work((10, 11, 12, 13), 2)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    monkeypatch.setitem(WORKLOADS, "mixed-64", lambda requests: SMALL)
    return SMALL


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of this machine, which takes seconds to measure, is 1 GFLOP/s and 1 GB/s here."""
    monkeypatch.setattr("workers.bench.rounds.measure_machine", lambda device, dtype: Machine(1e9, 1e9))


# ------------------------------------------------------------------------------------------------------------ the work


def test_mixed_64_has_the_promised_tokens() -> None:
    work = mixed_64()
    assert len(work) == 64
    assert sum(len(w.prompt_ids) for w in work) == 7_019
    assert sum(w.output_tokens for w in work) == 8_703
    assert {1000 <= i <= 20000 for w in work for i in w.prompt_ids} == {True}


def test_prefix_shares_exactly_its_beginning() -> None:
    work = shared_prefix()
    assert len(work) == 64
    assert len({w.prompt_ids[:512] for w in work}) == 1
    assert len({w.prompt_ids[:513] for w in work}) > 32
    assert {16 <= len(w.prompt_ids) - 512 <= 64 for w in work} == {True}
    assert {w.output_tokens for w in work} == {32}


def test_a_few_answers_of_the_long_tail_are_very_long() -> None:
    lengths = sorted(w.output_tokens for w in long_tail())
    assert lengths[-4:] == [768] * 4
    assert lengths[-5] <= 64


def test_random_prompts_have_one_length_and_as_many_requests_as_asked_for() -> None:
    work = random_1024_128(5)
    assert [(len(w.prompt_ids), w.output_tokens) for w in work] == [(1024, 128)] * 5
    assert len({w.prompt_ids for w in work}) == 5
    assert workload("random-1024-128", 3) == work[:3]
    assert workload("mixed-64") == mixed_64()


def test_unknown_names_are_refused_with_the_known_ones(llama: Path) -> None:
    with pytest.raises(UsageError, match="mixed-64"):
        workload("nonsense")
    with pytest.raises(UsageError, match="transformers, static"):
        bench(model=str(llama), baselines=["nonsense"])
    with pytest.raises(UsageError, match="--respect-eos"):
        bench(model=str(llama), baselines=["static"], respects_eos=True)


# ---------------------------------------------------------------------------------------------------------- the systems


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
    names = ["batchjobs", "transformers continuous batching", "static batches of 16"]
    assert [s["name"] for s in report["systems"]] == names
    for system in (*report["systems"], report):  # this engine's figures are on the outermost level too
        assert system["num_requests"] == 3
        assert system["total_num_tokens"] == 22
        assert system["tokens_per_second"] == pytest.approx(22 / system["elapsed_time"])
        assert system["output_throughput"] == pytest.approx(13 / system["elapsed_time"])
        assert 0 < system["output_throughput_min"] <= system["output_throughput"] <= system["output_throughput_max"]
    assert report["systems"][0]["slower_than_batchjobs"] == 1.0
    assert printed.err.count("round 2/2") == 3


def test_a_report_has_the_keys_of_vllm_and_what_a_step_is_made_of(
    llama: Path, small: list[Work], capsys: pytest.CaptureFixture[str]
) -> None:
    bench(model=str(llama), rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    serving = [f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")]
    throughput = ["request_throughput", "output_throughput", "total_token_throughput", "requests_per_second"]
    assert {name for name in (*serving, *throughput) if not report[name] > 0} == set()
    assert report["num_steps"] == 7  # the longest answer
    assert report["median_step_ms"] <= report["p99_step_ms"]
    assert report["mean_step_ms"] * 7 <= report["elapsed_time"] * 1e3
    assert 0 < report["sampling_share"] < report["host_share"] < 1
    assert report["median_ttft_ms"] < report["p99_e2el_ms"] <= report["elapsed_time"] * 1e3 + 50  # two kinds of clock
    assert report["bound_share"] == pytest.approx(report["output_throughput"] / report["bound_output_throughput"])
    bench(model=str(llama), rounds=1)
    table = capsys.readouterr().out
    assert "3 requests, 9 prompt and 13 output tokens" in table
    assert "forward: " in table
    assert "matrix peak 1 GFLOP/s" in table


def test_a_system_that_does_less_fails_the_run(llama: Path, small: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OurEngine, "run", lambda self, work: Run(1.0, [1] * len(work)))
    with pytest.raises(BatchjobsError, match="did not make the asked number of tokens"):
        bench(model=str(llama), rounds=1)


def test_no_round_profits_from_the_one_before(llama: Path) -> None:
    """Prompts of full pages would be found in the cache, and only without the cache is it the same work."""
    ours = OurEngine(str(llama), EngineConfig(dtype="float32", device="cpu", page_size=4))
    work = [Work(tuple(range(5, 30)), 2)]
    computed = []
    for system in (ours, ours, WithoutSharing(ours)):
        before = ours.engine.stats().prompt_tokens
        system.run(work * 2)
        computed.append(ours.engine.stats().prompt_tokens - before)
    assert computed[0] == computed[1] >= 25
    assert computed[2] == 50
    assert ours.engine.pool.sharing


def test_a_file_of_ones_own_is_measured_with_its_own_lengths(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [b'{"prompt": [5, 6, 7], "max_tokens": 3}', b'{"prompt": [8, 9], "max_tokens": 999, "temperature": 1.5}']
    requests = [parse_line(line, number, number) for number, line in enumerate(lines)]
    bench(workload="own.jsonl", requests=requests, model=str(llama), rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    assert (report["workload"], report["total_input_tokens"]) == ("own.jsonl", 5)
    assert report["total_output_tokens"] == 3 + 254  # the context holds 256
    bench(workload="own.jsonl", requests=requests, model=str(llama), num_requests=1, rounds=1, as_json=True)
    assert orjson.loads(capsys.readouterr().out)["num_requests"] == 1


def test_a_prompt_that_cannot_be_run_is_named(llama: Path) -> None:
    requests: list[Request] = [parse_line(b'{"custom_id": "mine", "prompt": [96, 97]}', 1, 0)]
    with pytest.raises(UsageError, match=r"request mine cannot be run: .*97"):
        bench(workload="own.jsonl", requests=requests, model=str(llama), rounds=1)


def test_answers_may_end_by_themselves_where_that_is_asked_for(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        parse_line(b'{"prompt": [%d, 6, 7], "max_tokens": 200}' % first, 1, n) for n, first in enumerate((5, 9))
    ]
    bench(workload="own.jsonl", requests=requests, respects_eos=True, model=str(llama), rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    reference = load_reference(llama)
    solo = [len(solo_greedy(reference, [first, 6, 7], 200)) for first in (5, 9)]
    assert report["total_output_tokens"] == sum(solo)


def test_end_to_end_reads_every_row_and_leaves_nothing(
    llama: Path, small: list[Work], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("BATCHJOBS_DATABASE_URL", "sqlite:////nowhere/at/all.sqlite3")  # not for a private measurement
    bench(model=str(llama), end_to_end=True, rounds=1, as_json=True)
    report = orjson.loads(capsys.readouterr().out)
    ours, whole = report["systems"]
    assert whole["name"] == "batchjobs end to end"
    assert whole["total_num_tokens"] == 22
    assert whole["share_of_batchjobs"] == pytest.approx(ours["elapsed_time"] / whole["elapsed_time"])
    assert sum(whole["seconds_of"].values()) == pytest.approx(whole["elapsed_time"])
    assert list(tmp_path.glob("batchjobs-bench-*")) == []


def test_rows_that_lack_something_fail_the_run(llama: Path, small: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.bench.delivery.sampling_of", _one_token_less)
    with pytest.raises(BatchjobsError, match="end to end did not make the asked number of tokens"):
        bench(model=str(llama), end_to_end=True, rounds=1)


def test_a_worker_that_ends_early_fails_the_run(
    llama: Path, small: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("workers.bench.rounds.warm_up", lambda system, work: None)
    monkeypatch.setattr("workers.bench.delivery.EngineLoop.add", broken)
    with pytest.raises(BatchjobsError, match="the worker ended before batch"):
        bench(model=str(llama), end_to_end=True, rounds=1)


def _one_token_less(item: Work, *, respects_eos: bool) -> Any:
    from workers.bench.system import sampling_of

    return sampling_of(Work(item.prompt_ids, item.output_tokens - 1), respects_eos=respects_eos)


def test_a_database_in_which_somebody_works_is_not_measured_in(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path)
    with measured_settings(settings, private=False) as same:
        assert same is settings
    with Client(settings) as client:
        client.store.register_worker(
            WorkerInfo(name="w1", host="h", pid=5, device="cpu", dtype="float32", model="m", model_version="v")
        )
    with pytest.raises(UsageError, match="w1 lives in this database"), measured_settings(settings, private=False):
        pass
    with measured_settings(settings, private=True) as private:
        assert private.home.is_dir()
        assert private.store_url == f"sqlite:///{private.home}/batchjobs.sqlite3"
    assert not private.home.exists()


# ---------------------------------------------------------------------------------------------------------- the figures


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([], 99) == 0.0
    assert spread_ms("x", [0.001, 0.003]) == {
        "mean_x_ms": 2.0,
        "median_x_ms": 2.0,
        "std_x_ms": 1.0,
        "p99_x_ms": pytest.approx(2.98),
    }


def test_latencies_count_the_wait_for_a_place() -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    waited = SimpleNamespace(started_at=began + timedelta(seconds=2), token_times=(0.5, 0.6, 0.8))
    empty = SimpleNamespace(started_at=began, token_times=())
    found = latencies([waited, empty], began.timestamp())  # type: ignore[list-item]
    assert found["mean_ttft_ms"] == pytest.approx(2_500)
    assert found["mean_tpot_ms"] == pytest.approx(150)
    assert found["p99_itl_ms"] == pytest.approx(199)
    assert found["mean_e2el_ms"] == pytest.approx(2_800)


def test_the_bound_counts_every_product_once(llama: Path) -> None:
    """Against the sizes of the tiny model: 2 layers of width 32, 4 query and 2 key heads of 8, 48 inside, 97 words."""
    ours = OurEngine(str(llama), EngineConfig(dtype="float32", device="cpu", max_requests_per_batch=2))
    linear = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48)
    head = 32 * 97
    found = need(ours.engine, [Work((5, 6, 7), 4)])
    assert found is not None
    keys = sum(range(1, 7))  # that the 6 rows see
    assert found.flops == 2 * 6 * linear + 2 * 4 * head + 4 * 32 * 2 * keys
    read = 2 * (4 + 5 + 6 + 3)  # tokens in both layers: by each row of the answer, and the prompt
    runner = ours.engine.runner
    stored = runner.cache.page_bytes / runner.page_size / 2  # bytes of a token in a layer, padding included
    assert 2 * 16 * 4 <= stored <= 2 * 32 * 4
    assert found.bytes == 4 * (linear + head) * 4 + read * stored
    shared = need(ours.engine, [Work((5, 6, 7), 4), Work((5, 6, 9), 4)])
    alone = need(ours.engine, [Work((5, 6, 7), 4), Work((5, 6, 9), 4)], shares=False)
    assert shared is not None
    assert alone is not None
    assert alone.flops == 2 * found.flops
    assert alone.flops - shared.flops == 2 * 2 * linear + 4 * 32 * 2 * (1 + 2)
    assert Need(6e9, 8e9).seconds(Machine(flops=3e9, read_bytes=2e9)) == 4.0


def test_a_machine_is_measured_in_its_fastest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.bench import bound

    monkeypatch.setattr(bound, "PEAK_SIZE", 64)
    monkeypatch.setattr(bound, "READ_BYTES", 2**16)
    assert bound.measure_machine(torch.device("cpu"), torch.bfloat16).flops > 1e6
    monkeypatch.setattr(bound, "_matrix_peak", lambda device, dtype: {torch.float32: 7.0, torch.bfloat16: 3.0}[dtype])
    assert bound.measure_machine(torch.device("cpu"), torch.bfloat16).flops == 7.0


def test_a_workload_that_the_model_cannot_take_is_refused_before_it_runs(llama: Path) -> None:
    with pytest.raises(UsageError, match=r"token ids up to \d+, and this model knows 97 tokens"):
        bench(model=str(llama), workload="mixed-64", num_requests=1)
    small = SimpleNamespace(vocab_size=30_000, max_model_len=1_100)
    with pytest.raises(UsageError, match=r"a request of 1152 tokens, .* context is 1100"):
        check_fit(small, random_1024_128(1))  # type: ignore[arg-type]
