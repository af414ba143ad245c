"""Whole requests on a CUDA device, in bfloat16 by the kernels that are installed, with and without recorded graphs.

In bfloat16 a token can differ where two are nearly as good, so answers are held against a full recompute in float32:
no way may be further from it than plain torch is. Run by `make test-gpu` where there is a device.
"""

from __future__ import annotations

import json
import queue
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.gpu import kinds
from ops.gpu.references import Apart, apart
from tests.support.giving_way import run_giving_way
from tests.support.models import FAMILIES, VOCAB_SIZE, load_reference, save_chat_model, save_model
from tests.support.schemas import response_format
from workers.engine import Engine, EngineConfig, EngineLoop, EngineOutput, EngineRequest, SamplingParams

TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
WAIT = 60.0


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def engine(folder: Path, dtype: str = "bfloat16", **settings: Any) -> Engine:
    made = Engine(str(folder), EngineConfig(device="cuda", dtype=dtype, **settings))
    made.warmup()
    return made


def distance(folder: Path, each: list[list[int]], outputs: list[EngineOutput]) -> Apart:
    reference = load_reference(folder).bfloat16().float().to("cuda")
    answers = [output.token_ids for output in outputs]
    assert {len(answer) for answer in answers} == {TOKENS}
    return apart(reference, each, answers, [output.logprobs for output in outputs])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_kernel_is_as_near_to_the_recompute_as_plain_torch(family: str, tmp_path: Path) -> None:
    folder, each = save_model(family, tmp_path), prompts(16)
    with kinds.only("cuda", kinds.PLAIN):
        plain = distance(folder, each, engine(folder).generate(each, GREEDY))
    for kind in kinds.available("cuda")[1:]:
        for graphs in (False, True):
            with kinds.only("cuda", kind):
                made = engine(folder, use_cuda_graph=graphs)
            assert distance(folder, each, made.generate(each, GREEDY)).within(plain), (kind, graphs)
            assert made.pool.free == made.pool.capacity


def test_sequences_that_give_way_between_recorded_steps_lose_nothing(llama: Path) -> None:
    """Pages go and come back, or are computed again, between two replays of the same graph."""
    each = prompts(16)
    plain = distance(llama, each, engine(llama, use_cuda_graph=False).generate(each, GREEDY))
    made = engine(llama, cpu_offload_space=0.5, allow_block_sharing=False)
    assert distance(llama, each, run_giving_way(made, each, GREEDY)).within(plain)
    stats = made.stats()
    assert stats.preemptions > stats.offloaded_sequences > 0
    assert made.pool.free == made.pool.capacity


def test_choices_share_their_prompt_and_are_those_of_the_host(llama: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    sampling = SamplingParams(n=3, seed=7, temperature=0.9, top_p=0.95, max_tokens=TOKENS, ignore_eos=True)
    each = prompts(6, 60)
    here = engine(llama, "float32").generate(each, sampling)
    host = Engine(str(llama), EngineConfig(device="cpu", native_forward=False)).generate(each, sampling)
    for mine, theirs in zip(here, host, strict=True):
        assert [choice.token_ids for choice in mine.choices] == [choice.token_ids for choice in theirs.choices]
    assert len({choice.token_ids for choice in here[0].choices}) == 3


def test_an_answer_is_held_to_its_format(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    made = engine(save_chat_model(tmp_path), use_cuda_graph=True)
    formats = [response_format(schema), None] * 4
    sampling = [SamplingParams(seed=n, max_tokens=120, response_format=f) for n, f in enumerate(formats)]
    outputs = made.generate(["say"] * len(formats), sampling)
    for output in outputs[::2]:
        found = json.loads(output.text)
        assert (type(found["name"]), type(found["ok"]), len(found)) == (str, bool, 2)
    assert made.pool.free == made.pool.capacity


def test_a_pause_and_an_update_go_with_recorded_graphs(tmp_path: Path) -> None:
    """Paused in the middle, updated in place under the graphs that were recorded before, and the answers after it are
    as near to the new model's as those of an engine that never had another."""
    old, new = save_model("llama", tmp_path / "old", seed=0), save_model("llama", tmp_path / "new", seed=1)
    each = prompts(8, 40)
    loop = EngineLoop(engine(old, use_cuda_graph=True))
    outcomes: queue.Queue[EngineOutput] = queue.Queue()
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def ask(first: int, sampling: SamplingParams) -> None:
        for index, prompt in enumerate(each, first):
            loop.add(EngineRequest(index, tuple(prompt), sampling), outcomes.put)

    def answers() -> list[EngineOutput]:
        return sorted((outcomes.get(timeout=WAIT) for _ in each), key=lambda output: int(str(output.request_id)))

    loop.start()
    try:
        ask(0, long)
        with loop.pause(WAIT):
            before = loop.stats().generated_tokens
            staged = loop.stage(str(new))  # takes a while
            assert loop.stats().generated_tokens == before
        loop.update_model(staged)
        assert {len(output.token_ids) for output in answers()} == {200}
        ask(len(each), GREEDY)
        after = answers()
    finally:
        loop.stop(WAIT)
    plain = distance(new, each, engine(new, use_cuda_graph=False).generate(each, GREEDY))
    assert distance(new, each, after).within(plain)
