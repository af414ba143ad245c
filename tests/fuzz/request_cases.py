"""What a request of a case asks for, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from batchjobs.types import SamplingParams

PLAIN_EOS = 1
CHAT_EOS = 2
CHAT_FIRST_BYTE = 3  # the id of the byte "!": the chat model has one token a byte, printable ones in their order
LETTERS = "abc"  # an alphabet so small that the stop strings below are met
STOPS = ("a", "ab", "bca", "cab", "cc", "aab", "abcab", "<|im_start|>", "zzzzzzzz")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def letter_id(letter: str) -> int:
    return CHAT_FIRST_BYTE + ord(letter) - ord("!")


def draw_sampling(rng: random.Random, features: Sequence[str], *, chat: bool, least_tokens: int = 1) -> SamplingParams:
    """Parameters for one request of a model with or without the chat tokenizer."""

    def has(feature: str, chance: float) -> bool:
        return feature in features and rng.random() < chance

    vocab = 259 if chat else 97
    eos = CHAT_EOS if chat else PLAIN_EOS
    max_tokens = max(least_tokens, min(rng.randint(1, 40), rng.randint(1, 40)))
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": rng.random() < 0.3}
    if chat and has("structured", 0.1):
        return SamplingParams(**fields | _structured(rng))
    if has("sampling", 0.5):
        fields |= _drawn(rng, vocab)
    if has("penalties", 0.25):
        fields |= _penalties(rng)
    if has("penalties", 0.25):
        fields["logit_bias"] = _bias(rng, vocab, eos)
    if has("stops", 0.3):
        fields["stop_token_ids"] = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 12)))
    if has("stops", 0.25):
        fields["min_tokens"] = rng.randint(0, max_tokens)
    if chat and has("stops", 0.5):
        fields |= _stop_strings(rng)
    if has("logprobs", 0.25):
        fields["top_logprobs"] = rng.choice((1, 2, 5, 20))
    if has("choices", 0.15):
        fields["n"] = rng.randint(2, 4)
    if has("scoring", 0.2):
        fields["prompt_logprobs"] = rng.choice((0, 0, 1, 5, 20))
        if rng.random() < 0.4:
            fields |= {"max_tokens": 0, "min_tokens": 0}
    if has("faults", 0.01):
        fields["logit_bias"] = {vocab + rng.randrange(3): 1.0}
    return SamplingParams(**fields)


def _drawn(rng: random.Random, vocab: int) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.05, 0.3, 0.7, 1.0, 1.0, 1.5, 2.0)),
        "seed": rng.choice((0, rng.getrandbits(32), rng.getrandbits(63), -rng.getrandbits(63))),
        "top_k": rng.choice((0, 0, 0, -1, 1, 2, 5, 20, vocab - 1, vocab, 1000)),
        "top_p": rng.choice((1.0, 1.0, 1.0, 0.01, 0.5, 0.9, 0.99)),
        "min_p": rng.choice((0.0, 0.0, 0.0, 0.01, 0.1, 0.6, 1.0)),
    }


def _penalties(rng: random.Random) -> dict[str, Any]:
    return {
        "presence_penalty": rng.choice((0.0, 0.7, 2.0, -1.0)),
        "frequency_penalty": rng.choice((0.0, 0.3, 2.0, -0.5)),
        "repetition_penalty": rng.choice((1.0, 1.3, 3.0, 0.7)),
    }


def _bias(rng: random.Random, vocab: int, eos: int) -> dict[int, float]:
    bias = {rng.randrange(vocab): rng.choice((-100.0, -3.0, 0.5, 3.0, 8.0)) for _ in range(rng.randint(1, 10))}
    return bias | {eos: 3.0} if rng.random() < 0.4 else bias


def _stop_strings(rng: random.Random) -> dict[str, Any]:
    """Answers of a few letters, so that matches come at the borders of tokens and end where another one began."""
    bias = {letter_id(letter): 9.0 for letter in LETTERS}
    return {"stop": tuple(rng.sample(STOPS, rng.randint(1, 4))), "logit_bias": bias, "presence_penalty": 0.0}


def _structured(rng: random.Random) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    chosen = {"response_format": rng.choice(({"type": "json_object"}, schema)), "max_tokens": rng.randint(5, 40)}
    return chosen | ({"temperature": 1.0, "seed": rng.getrandbits(32)} if rng.random() < 0.5 else {})
