"""A model in two parts, in two processes that talk by gloo, answers as the whole model does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from batchjobs.errors import UsageError
from tests.support.engines import make, prompts
from tests.support.machine import Machine
from tests.support.models import save_chat_model, save_model, save_random
from tests.support.ranks import Ranks, shared_ranks
from tests.support.rehearsal import rehearse
from tests.support.waiting import eventually
from workers.engine import Engine, EngineConfig, EngineOutput, SamplingParams
from workers.engine.mapped_files import mappings
from workers.engine.memory import Budget
from workers.engine.models import LoadedModel
from workers.engine.parallel.group import Group
from workers.engine.parallel.loading import refuse_unsplittable
from workers.engine.parallel.ranks import config_of_rank

pytestmark = pytest.mark.xdist_group("ranks")

HARD = {"max_batch_tokens": 11, "num_blocks": 22, "max_requests_per_batch": 6}
"""Prompts in chunks, and pages for half of the sequences that run at once."""

SPLIT = (("llama", False), ("qwen3", True), ("gemma2", False), ("phi3", True), ("mixtral", True))
"""Families, and whether a step is planned while the one before it runs."""

REHEARSED = "qwen3"
"""Whose driver works as if its device were a GPU: tokens are chosen there, and results arrive later."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with shared_ranks() as ranks:
        yield ranks


@pytest.fixture
def group(ranks: Ranks) -> Group:
    return ranks.group()


def samplings(count: int) -> list[SamplingParams]:
    """Greedy ones, random ones and ones with penalties, in turn."""
    each = (
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, top_logprobs=2),
        SamplingParams(temperature=1.1, seed=5, top_k=9, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=13, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=6, top_p=0.7, n=2, max_tokens=9, ignore_eos=True, prompt_logprobs=1),
    )
    return [each[index % len(each)] for index in range(count)]


def asked() -> list[list[int]]:
    """Prompts, among them some that begin alike."""
    shared = [7, 9, 11, 13, 15, 17, 19, 21, 23]
    return [*prompts(5, longest=20), *([*shared, 30 + index] for index in range(3))]


def told(output: EngineOutput) -> tuple[object, ...]:
    return output.token_ids, *(choice.token_ids for choice in output.other_choices)


@pytest.mark.parametrize(("family", "ahead"), SPLIT)
def test_two_parts_give_the_whole_models_answers(
    family: str, ahead: bool, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found, numbers = save_model(family, tmp_path), {}, {}
    if family == REHEARSED:
        rehearse(monkeypatch)
    for size in (1, 2):
        engine = make(folder, tensor_parallel_size=size, use_async_batching=ahead, native_forward=False, **HARD)
        engine.warmup()
        engine.scheduler.expected_answer_share = 0.0  # nobody waits for room in advance
        outputs = engine.generate(asked(), samplings(8))
        found[size] = [told(output) for output in outputs]
        numbers[size] = [output.logprobs for output in outputs]
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.offloaded_sequences > 0
        assert stats.cached_tokens > 0
        engine.close()
    assert found[2] == found[1]
    for ours, theirs in zip(numbers[2], numbers[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_each_part_has_its_share_of_heads_and_weights(group: Group, llama: Path) -> None:
    engine = make(llama, tensor_parallel_size=2)
    whole = make(llama)
    spec = engine.runner.model.model.layers[0].self_attn.paged_attention.spec
    assert (spec.num_heads, spec.num_kv_heads) == (2, 1)
    assert engine.runner.cache.page_bytes * 2 == whole.runner.cache.page_bytes
    assert engine.runner.forward_kind == "transformers"
    assert engine.model_version == whole.model_version
    assert engine.model_details == whole.model_details

    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        here = group.split.held_here(engine.runner.model.get_parameter(name))
        assert here.numel() * 2 == whole.runner.model.get_parameter(name).numel()
        assert here.untyped_storage().nbytes() == here.nbytes, "the rest of the weight is not in memory"
        assert not any(each.holds(here.data_ptr(), here.nbytes) for each in mappings())


def test_the_ranks_take_as_many_pages_as_the_least_of_them(
    group: Group, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.runner.plan_memory", lambda *_, **__: Budget(10**9, 2048))
    engine = make(llama, tensor_parallel_size=2, num_blocks=None, max_model_len=64)
    # The other rank takes what its running sequences can ever use, and the null page.
    assert engine.pool.num_pages == 8 * 64 // 4 + 1


def test_a_split_model_is_not_exchanged_while_it_runs(group: Group, llama: Path) -> None:
    engine = make(llama, tensor_parallel_size=2)
    before = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5))
    with pytest.raises(UsageError, match="cannot be exchanged while it runs: drain the worker"):
        engine.update_model(str(llama))
    after = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5))
    assert [told(output) for output in after] == [told(output) for output in before]


# What is refused


def test_what_cannot_be_split_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    odd = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3}
    folders = {"mistral": tmp_path / "mistral", "gpt2": tmp_path / "gpt2"}
    for family, folder in folders.items():
        save_model(family, folder)
    save_random(LlamaConfig(vocab_size=97, intermediate_size=48, num_hidden_layers=1, **odd), tmp_path / "odd")
    for folder, size, said in (
        (folders["mistral"], 2, r"\(mistral\) cannot be split over 2 devices: it has 1 key and value heads"),
        (folders["gpt2"], 2, "transformers has no plan by which its layers could be split"),
        (tmp_path / "odd", 2, "it has 3 attention heads, which 2 does not divide"),
        (tmp_path / "nothing", 2, "no such folder"),
    ):
        with pytest.raises(UsageError, match=said):
            refuse_unsplittable(str(folder), size)
        with pytest.raises(UsageError, match=said):
            Engine(str(folder), EngineConfig(device="cpu", tensor_parallel_size=size))


def test_a_model_in_memory_is_not_split(llama: Path) -> None:
    whole = make(llama)
    loaded = whole._parts.loaded
    assert isinstance(loaded, LoadedModel)
    with pytest.raises(UsageError, match="name a folder or hub id to have it split"):
        Engine(loaded, EngineConfig(device="cpu", tensor_parallel_size=2))


def test_a_setting_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size must be 1 or more, not 0"):
        EngineConfig(tensor_parallel_size=0)
    with pytest.raises(UsageError, match="native_forward"):
        EngineConfig(tensor_parallel_size=2, native_forward=True)


def test_ranks_share_the_hosts_memory() -> None:
    from workers.engine.parallel.loading import Split

    config = EngineConfig(cpu_offload_space=3.0, max_memory_percent=0.6)
    on_cpu = config_of_rank(config, Split(1, 3, torch.device("cpu")))
    assert (on_cpu.cpu_offload_space, on_cpu.max_memory_percent) == (1.0, pytest.approx(0.2))
    on_gpu = config_of_rank(config, Split(1, 3, torch.device("cuda", 1)))
    assert (on_gpu.cpu_offload_space, on_gpu.max_memory_percent) == (1.0, 0.6)


# A worker with such a model


SHORT, LONG = 12, 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def submitted(machine: Machine, texts: list[str], max_tokens: int) -> str:
    path = machine.home / f"{max_tokens}.jsonl"
    lines = [{"prompt": text, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return machine.call("submit", str(path)).strip()


def answers(machine: Machine, batch: str) -> list[tuple[int, ...]]:
    """The tokens of every request, each of which has one row."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in machine.call("results", batch).splitlines()]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert {row["status"] for row in rows} == {"completed"}
    return [tuple(row["token_ids"]) for row in rows]


def test_a_worker_answers_a_batch_and_ends_when_a_part_of_its_model_is_gone(
    group: Group,
    embedded: Machine,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("workers.logs.log_to_stderr", lambda *_, **__: None)  # it would outlive the command
    work = ("worker", "--tensor-parallel-size", "2", "--device", "cpu", "--burst", "--name", "split")
    texts, whole = [f"question {number}" for number in range(4)], make(model)

    def expected(max_tokens: int) -> list[tuple[int, ...]]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [output.token_ids for output in whole.generate(texts, sampling)]

    short = submitted(embedded, texts, SHORT)
    embedded.call(*work)
    assert answers(embedded, short) == expected(SHORT)

    long = submitted(embedded, texts, LONG)
    with closing(embedded.store()) as store:

        def kill() -> None:
            eventually(lambda: store.batch(long).counts.running, "the batch is begun", 60)
            group._followers[0].process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        embedded.complaint(*work, code=1)
        killer.join()
        assert "the engine died: GroupBroken: rank 1 on cpu (process " in caplog.text
        assert "was killed by signal 9 (SIGKILL)" in caplog.text
        assert not store.batch(long).status.is_final
    embedded.work("whole")
    assert answers(embedded, long) == expected(LONG)
