"""Sampling parameters that are checked once and given to many requests, and how fast requests end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchjobs.errors import InvalidParameter
from batchjobs.types import Endpoint, Request, SamplingParams
from workers.pace import Pace
from workers.samplings import Samplings, own_seed

BODIES: list[dict[str, Any]] = [
    {"max_tokens": 8},
    {"max_tokens": 8, "seed": 3},
    {"max_tokens": 8, "temperature": 0},
    {"max_tokens": 8, "temperature": 0.0, "seed": -(2**63)},
    {"max_tokens": 9, "stop": ["a"], "logit_bias": {"7": 1}, "n": 3, "seed": 2**63 - 1},
    {"max_tokens": 8, "prompt": "p", "metadata": {"max_tokens": 1}, "echo": True, "logprobs": 2, "top_logprobs": 2},
    {"max_tokens": 8, "response_format": {"type": "json_object"}},
]


def request(index: int, body: dict[str, Any]) -> Request:
    return Request(index=index, custom_id=str(index), endpoint=Endpoint.COMPLETIONS, body=body)


def test_they_are_what_each_body_says_with_a_seed_of_its_own() -> None:
    samplings = Samplings()
    for index, body in enumerate(BODIES * 2):
        wanted = SamplingParams.from_fields(body)
        if wanted.seed is None:
            wanted = replace(wanted, seed=own_seed("B", index))
        assert samplings.of(request(index, body), "B") == wanted
    assert len({own_seed(batch, index) for batch in "AB" for index in range(100)}) == 200


def test_what_is_remembered_is_not_taken_for_what_only_looks_like_it() -> None:
    samplings = Samplings()
    assert samplings.of(request(0, {"max_tokens": 8, "temperature": 1}), "B").temperature == 1
    for almost in ({"max_tokens": 8, "temperature": 1.5}, {"max_tokens": 7, "temperature": 1}, {"temperature": 1}):
        assert samplings.of(request(0, almost), "B") == replace(
            SamplingParams.from_fields(almost), seed=own_seed("B", 0)
        )


@pytest.mark.parametrize("body", [{"max_tokens": 8, "seed": 2**63}, {"max_tokens": 8, "n": 0}, {"temperature": 3}])
def test_what_cannot_be_is_refused_each_time(body: dict[str, Any]) -> None:
    samplings = Samplings()
    for _ in range(2):
        with pytest.raises(InvalidParameter):
            samplings.of(request(0, body), "B")


def test_many_kinds_are_not_all_remembered() -> None:
    samplings = Samplings()
    for limit in range(1, 3000):
        samplings.of(request(0, {"max_tokens": limit}), "B")
    long = {"max_tokens": 1, "stop": ["x" * 5000]}
    assert samplings.of(request(0, long), "B").stop == ("x" * 5000,)
    assert len(samplings._known) < 1100


def test_the_pace_follows_and_forgets() -> None:
    now, finished = 0.0, 0
    pace = Pace(lambda: finished, lambda: now)
    assert pace.per_second() == 0
    for _ in range(10):
        now, finished = now + 0.2, finished + 200
        pace.per_second()
    assert 990 < pace.per_second() <= 1000
    finished += 10_000
    assert pace.per_second() <= 1000, "not before some time has passed"
    now += 0.2
    for _ in range(20):
        now += 1.0
        pace.per_second()
    assert pace.per_second() < 1
