"""A real model answers in the format that was asked for."""

from __future__ import annotations

import pytest

from tests.support.structured_run import generate, problem

pytestmark = pytest.mark.xdist_group("smollm2")  # one model in memory


def test_answers_of_smollm2_fit_random_schemas() -> None:
    outputs, schemas = generate(24)
    assert [problem(o, s) for o, s in zip(outputs, schemas, strict=True)] == [None] * 24
