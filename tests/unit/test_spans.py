"""Who drew which tokens: version, worker and attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchjobs.types import SamplingParams, VersionSpan
from tests.support.engines import make, prompts
from tests.support.updates import greedy, made, request, run, step_until

PROMPT = prompts(1, seed=5)[0]


def test_an_undisturbed_answer_has_one(llama: Path) -> None:
    engine = make(llama)
    engine.add(request("it", PROMPT, greedy(5), made_by=("w1", 2)))
    engine.add(request("alone", PROMPT, SamplingParams(temperature=1, n=3, seed=1, max_tokens=4)))
    outputs = run(engine)
    assert outputs["it"].version_spans == (VersionSpan(version=engine.model_version, worker="w1", attempt=2),)
    for choice in outputs["alone"].choices:
        assert choice.version_spans == (VersionSpan(version=engine.model_version),)


def test_an_answer_without_a_token_has_none(llama: Path) -> None:
    engine = make(llama)
    engine.add(request("it", PROMPT, greedy(5)))
    output = engine.cancel("it")
    assert output is not None
    assert output.version_spans == ()


def test_the_next_worker_begins_another(llama: Path) -> None:
    first = make(llama)
    first.add(request("it", PROMPT, greedy(12), made_by=("w1", 1)))
    step_until(first, lambda: made(first, "it") == 4)
    version = first.model_version
    (part,) = first.progress()["it"]
    assert part.version_spans == (VersionSpan(version=version, worker="w1", attempt=1),)
    second = make(llama)
    second.add(request("it", PROMPT, greedy(12), begun=(part,), made_by=("w2", 2)))
    step_until(second, lambda: made(second, "it") == 7)
    (part,) = second.progress()["it"]
    assert [(s.worker, s.attempt, s.from_token) for s in part.version_spans] == [("w1", 1, 0), ("w2", 2, 4)]
    third = make(llama)
    third.add(request("it", PROMPT, greedy(12), begun=(part,), made_by=("w2", 2)))
    output = run(third)["it"]
    assert output.version_spans == part.version_spans  # the same worker at the same attempt goes on with its span
    assert run_alone(llama) == output.token_ids


def run_alone(folder: Path) -> tuple[int, ...]:
    return make(folder).generate([PROMPT], greedy(12))[0].token_ids


def test_spans_are_cut_with_the_tokens(llama: Path) -> None:
    first = make(llama)
    first.add(request("it", PROMPT, greedy(12)))
    step_until(first, lambda: made(first, "it") == 9)
    (part,) = first.progress()["it"]
    spans = tuple(VersionSpan(version=f"v{at}", from_token=at, worker="w", attempt=at) for at in (0, 3, 6))
    cut = replace(part, version_spans=spans, token_times=part.token_times[:5])  # the shortest list counts
    engine = make(llama)
    engine.add(request("it", PROMPT, greedy(12), begun=(cut,), made_by=("me", 9)))
    output = run(engine)["it"]
    assert output.version_spans == (
        *spans[:2],
        VersionSpan(version=engine.model_version, from_token=5, worker="me", attempt=9),
    )


def test_a_beginning_without_spans_counts_as_of_the_model_at_hand(llama: Path) -> None:
    first = make(llama)
    first.add(request("it", PROMPT, greedy(12), made_by=("w1", 1)))
    step_until(first, lambda: made(first, "it") == 4)
    (part,) = first.progress()["it"]
    engine = make(llama)
    engine.add(request("it", PROMPT, greedy(12), begun=(replace(part, version_spans=()),)))
    assert run(engine)["it"].version_spans == (VersionSpan(version=engine.model_version),)
