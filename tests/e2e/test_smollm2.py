"""The real model: SmolLM2-135M-Instruct from its GGUF file."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tests.support.models import greedy_choices, smollm2, solo_greedy
from workers.engine import Engine, EngineConfig, EngineRequest, SamplingParams
from workers.engine.models import locate

pytestmark = pytest.mark.xdist_group("smollm2")  # one model in memory

QUESTIONS = [
    "Compose a short travel note about a visit to a harbour town, with its food and its people.",
    "Draft an email that asks a colleague for feedback on a quarterly report. Keep it short.",
    "Outline a comparison of two phones: price, camera, battery.",
    "Describe a lively market with all five senses.",
    "Give three tips for speaking in front of a crowd.",
    "Which is heavier, a pound of feathers or a pound of lead? Explain.",
    "Rewrite in the passive voice: The storm broke the old mast.",
    "What is the capital of France?",
]
GENERATED = (0, 7)
"""Of these `generate` makes the answer too, token by token, which takes as long as everything else together."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(str(smollm2()), EngineConfig(device="cpu", num_blocks=600, max_requests_per_batch=8))


def test_eight_chats_equal_generate_at_64_tokens(engine: Engine) -> None:
    reference = AutoModelForCausalLM.from_pretrained(**locate(str(smollm2())), attn_implementation="sdpa").eval()
    prompts = [engine.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if number in GENERATED:
            assert list(output.token_ids) == solo_greedy(reference, prompt, 64)
        # Each token is the best one behind those before it, so the whole is the solo run's, in one forward a prompt.
        best, logprobs = greedy_choices(reference, prompt, output.token_ids)
        assert list(output.token_ids) == best
        assert (output.finish_reason == "stop") == (output.tokens[-1] == "<|im_end|>")
        assert len(output.token_ids) == 64 or output.finish_reason == "stop"
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_it_knows_the_capital_of_france(engine: Engine) -> None:
    prompt = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    engine.add(EngineRequest("france", prompt, SamplingParams(temperature=0, max_tokens=24)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[0].text == "The capital of France is Paris."
    assert outputs[0].tokens[-1] == "<|im_end|>"
    assert sum(len(piece) for piece in outputs[0].tokens[:-1]) == len(outputs[0].text)
