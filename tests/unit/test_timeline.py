"""Timelines: in the format that Perfetto reads, with spans that nest, and sums that are those of the engine."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import save_chat_model
from tests.support.step_script import Script
from tests.support.trace_events import check_format
from workers.engine.config import EngineConfig
from workers.explain import explain
from workers.step_log import StepLog
from workers.timeline import DEVICE, FIRST_SLOT, HOST, records, timeline
from workers.trace import trace


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_timeline_of_slots_device_and_host(depth: int) -> None:
    answers = {"abc": "def.", "ghijklmn": "opqrst", "ghijklmx": "yz"}
    log = Script(answers, depth=depth, limits={"abc": 9}).run()
    found = json.loads(b"".join(timeline(log, process="p")))
    assert found == records(log, process="p")
    check_format(found)
    slots: dict[int, list[Any]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X" and "request" in event["args"]:
            slots[event["tid"] - FIRST_SLOT].append((event["name"], event["args"]["ended"]))
    assert slots == {0: [("<abc>", "stop"), ("<ghijklmx>", "length")], 1: [("<ghijklmn>", "length")]}
    titles = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert titles == ["host: planning", "device: forward and sampling", "slot 0", "slot 1"]
    counters = [e["args"] for e in found if e["name"] == "sequences"]
    assert counters[0] == {"running": 2, "waiting": 1}
    assert len(counters) == len(log.steps)


def on_the_clock(log: StepLog) -> StepLog:
    """As if step n had run from second n to second n + 0.5, and everything before it had happened at n."""
    log.began, log.ended, log.events = 0.0, 99.0, []
    for step in log.steps:
        start = float(step.number)
        step.planned, step.computed = (start - 0.25, start), (start, start + 0.5)
        log.events += [replace(event, at=start) for event in step.before]
        log.events += [replace(event, at=start + 0.5) for event in step.after]
    return log


def test_spans_have_their_times_and_enclose_what_is_within() -> None:
    log = on_the_clock(Script({"ab": "cd", "efg": "h"}, rows=4, slots=1).run())
    found = records(log, process="p")
    check_format(found)
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert [span[1:] for span in spans if span[0] == FIRST_SLOT] == [
        ("<ab>", 1_000_000, 1_500_000),
        ("prefill", 1_000_000, 500_000),
        ("decode", 2_000_000, 500_000),
        ("<efg>", 3_000_000, 500_000),
        ("prefill", 3_000_000, 500_000),
    ]
    assert next(span[1:] for span in spans if span[0] == DEVICE) == ("step 1", 1_000_000, 500_000)
    assert [span[1:] for span in spans if span[0] == HOST][-1] == ("plan 3", 2_750_000, 250_000)
    counters = [(e["name"], e["ts"], e["args"]) for e in found if e["ph"] == "C"]
    assert counters[:2] == [
        ("sequences", 1_000_000, {"running": 1, "waiting": 1}),
        ("KV cache", 1_000_000, {"pages used": 1}),
    ]


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("space", [0.0, 0.1])
def test_the_timeline_of_a_real_engine_adds_up(llama: Path, async_batching: bool, space: float) -> None:
    config = EngineConfig(
        device="cpu",
        page_size=4,
        num_blocks=28,
        max_batch_tokens=16,
        max_requests_per_batch=3,
        use_async_batching=async_batching,
        cpu_offload_space=space,
    )
    made = trace(str(llama), config, pictures=3, whole=True)
    stats = made.engine.stats()
    assert made.is_whole
    assert made.failures == {}
    assert stats.preemptions > 0
    found = records(made.log, process="p")
    check_format(found)
    device = [e["args"] for e in found if e["ph"] == "X" and e["tid"] == DEVICE]
    assert len(device) == stats.steps == sum(e["ph"] == "X" and e["tid"] == HOST for e in found)
    assert sum(step["prefill_rows"] for step in device) == stats.prompt_tokens
    assert sum(step["recomputed_rows"] for step in device) == stats.recomputed_tokens
    assert sum(step["sampled"] for step in device) == stats.generated_tokens
    assert all(step["tokens"] == step["prefill_rows"] + step["decode_rows"] for step in device)
    spans = [e["args"] for e in found if e["ph"] == "X" and "request" in e["args"]]
    assert sum(s["ended"].startswith("preempted") for s in spans) == stats.preemptions
    assert sum(s["ended"] == "preempted, offloaded" for s in spans) == stats.offloaded_sequences
    assert [e["args"]["pages used"] <= 27 for e in found if e["name"] == "KV cache"] == [True] * stats.steps
    shown = [line.plain for line in explain(made.log, made.view("utf-8"), pictures=3)]
    assert max(map(len, shown)) <= 100
    assert sum(line.startswith("step ") for line in shown) >= 3
