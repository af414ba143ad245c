"""Tokens chosen on the device are those of the reference, and nothing on the way makes the host wait."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.support.no_waiting import META, Waits, calls_of, no_waiting
from tests.unit.test_native_logits import asked, drawing, random_logits
from workers.engine import device_sampler
from workers.engine.device_sampler import choose, choose_greedy, sampling_arrays
from workers.engine.draws import SHORT_LIST, ranked
from workers.engine.results import Chosen
from workers.engine.sampler import sample_in_torch, score_in_torch
from workers.engine.sampling_rows import SamplingRows

SIZES = [1, 5, 31, 256, 257, 700]


def chosen(logits: torch.Tensor, rows: SamplingRows, given: torch.Tensor | None = None, top: int = 0) -> Chosen:
    """What a step does, with everything but the copies."""
    arrays = [torch.from_numpy(array) for array in sampling_arrays(rows, logits.shape[1])]
    return choose(logits, rows, arrays, torch.zeros(0, dtype=torch.long) if given is None else given, top)


def check(logits: torch.Tensor, rows: SamplingRows, given: torch.Tensor | None = None, top: int = 0) -> None:
    """Everything equals the reference, but the token where there is none to choose or the row is not finite."""
    found = chosen(logits, rows, given, top)
    expected = sample_in_torch(logits[: rows.count], rows)
    assert found.allowed.tolist() == expected.allowed.tolist()
    finite = ~expected.logprobs.isnan()
    assert found.logprobs.isnan().tolist() == (~finite).tolist()
    free = finite & expected.allowed
    assert found.tokens[free].tolist() == expected.tokens[free].tolist()
    assert ((found.tokens >= 0) & (found.tokens < logits.shape[1])).all()
    torch.testing.assert_close(found.logprobs[free], expected.logprobs[free], atol=1e-6, rtol=0)
    check_tops(found.tops, expected.tops, finite.tolist())
    if given is not None:
        scores, score_tops = score_in_torch(logits[rows.count :], given, top)
        torch.testing.assert_close(found.scores, scores, atol=1e-6, rtol=0, equal_nan=True)
        check_tops(found.score_tops, score_tops, (~scores.isnan()).tolist())


def check_tops(
    found: tuple[torch.Tensor, torch.Tensor] | None, expected: list[list[tuple[int, float]]] | None, rows: list[bool]
) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert len(found[0]) == len(expected)
    for ids, logprobs, pairs in itertools.compress(zip(*found, expected, strict=True), rows):
        assert ids.tolist() == [token for token, _ in pairs]
        assert logprobs.tolist() == pytest.approx([logprob for _, logprob in pairs], abs=1e-6)


def disturbed(logits: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Ties, columns without any probability, rows that are not finite."""
    if rng.random() < 0.5:
        logits = logits.bfloat16().float() if rng.random() < 0.5 else logits.round()
    if rng.random() < 0.3:
        logits[:, rng.randrange(logits.shape[1])] = -torch.inf
    for value in (math.nan, math.inf, -math.inf):
        if rng.random() < 0.3:
            logits[rng.randrange(len(logits)), rng.randrange(logits.shape[1])] = value
    if rng.random() < 0.1:
        logits[rng.randrange(len(logits))] = -torch.inf
    return logits


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 100, 10)], ids=lambda r: str(r.start))
def test_any_mix_of_rows_is_chosen_as_the_reference_does(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        rows, vocabulary, scored = rng.randint(1, 12), rng.choice(SIZES), rng.choice([0, 0, 3])
        logits = disturbed(random_logits(rows + scored, vocabulary, spread=rng.choice([0.1, 3, 30]), seed=seed), rng)
        given = torch.tensor([rng.randrange(vocabulary) for _ in range(scored)], dtype=torch.long)
        check(logits, asked(rows, vocabulary, seed=seed), given, top=rng.choice([0, 4]))


@pytest.mark.parametrize("seed", range(4))
def test_long_rows_too(seed: int) -> None:
    check(disturbed(random_logits(16, 5000, seed=seed), random.Random(seed)), asked(16, 5000, seed=seed))


def test_pieces_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "PIECE", 1500)
    check(random_logits(31, 700), asked(24, 700, seed=3), torch.arange(7), top=2)


@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (40, 0.8), (700, 0.8), (300, 1.0), (700, 1.0)])
def test_of_equal_logits_the_first_are_kept_and_stand_first(top_k: int, top_p: float) -> None:
    """All tokens are as likely as each other, so a point of the unit interval tells which one it is."""
    kept = min(top_k, math.ceil(round(min(top_k, 700) * top_p, 9)))
    points = [(place + 0.5) / kept for place in range(kept)]
    rows = drawing(points, 700, top_k=top_k, top_p=top_p)
    assert chosen(torch.zeros(kept, 700), rows).tokens.tolist() == list(range(kept))


@pytest.mark.parametrize("count", [1, 3, 50])
def test_tokens_rank_by_their_logits_and_then_by_their_number(count: int) -> None:
    logits = torch.tensor([-0.0, 0.0, 3e38, -3e38, 1e-45, -1e-45, -torch.inf, 1.0, -1.0]).repeat(6)[:50][None]
    expected = sorted(range(50), key=lambda i: (-float(logits[0, i]), i))
    assert ranked(logits, count)[0].tolist() == expected[:count]


@pytest.mark.parametrize("ways", [(1,), (SHORT_LIST,), (2000,), (5000,)])
@pytest.mark.parametrize("point", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(ways: tuple[int], point: float) -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [7, 4098]] = 0.0
    rows = drawing([point], 5000, top_k=ways[0])
    assert chosen(logits, rows).tokens.tolist()[0] in (7, 4098)


def banned(rows: int, vocabulary: int, **settings: float) -> SamplingRows:
    """Row 0 may take no token at all, by bans; row 1 none by its grammar."""
    wishes = drawing([0.3] * rows, vocabulary, **settings)
    wishes.banned.add(0, range(vocabulary), [0.0] * vocabulary)
    wishes.masked, wishes.masks = [1], [np.zeros(-(-vocabulary // 32), np.int32)]
    return wishes


@pytest.mark.parametrize("vocabulary", [5, 300, 1000])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_where_nothing_is_left_the_row_says_so_and_its_token_is_one(
    vocabulary: int, settings: dict[str, float]
) -> None:
    logits = random_logits(3, vocabulary)
    found = chosen(logits, banned(3, vocabulary, **settings))
    assert found.allowed.tolist() == [False, False, True]
    assert all(0 <= token < vocabulary for token in found.tokens.tolist())
    check(logits, banned(3, vocabulary, **settings))


def test_greedy_rows_are_those_of_the_reference() -> None:
    logits = random_logits(9, 300).round()
    logits[2, 5], logits[3, 7], logits[4] = math.nan, math.inf, -torch.inf
    tokens, logprobs, allowed = choose_greedy(logits)
    expected = sample_in_torch(logits, SamplingRows(9))
    assert tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=1e-6, rtol=0, equal_nan=True)
    assert logprobs.isnan().tolist() == [row in (2, 3, 4) for row in range(9)]
    assert allowed.all()


def test_a_step_without_rows_and_one_that_only_scores() -> None:
    check(torch.zeros(0, 40), SamplingRows(0))
    check(torch.zeros(0, 40), SamplingRows(0, top_logprobs=2), torch.zeros(0, dtype=torch.long), top=3)
    check(random_logits(4, 40), SamplingRows(0), torch.tensor([0, 5, 39, 1]), top=50)


@pytest.mark.parametrize("token", [-1, 40])
@pytest.mark.parametrize("kind", ["repeated", "added", "banned"])
def test_a_token_outside_the_vocabulary_never_reaches_the_device(kind: str, token: int) -> None:
    rows = SamplingRows(2)
    getattr(rows, kind).add(0, [3, token], [1.0, 1.0])
    with pytest.raises(IndexError, match="vocabulary of 40"):
        sampling_arrays(rows, 40)


def test_a_mask_that_is_too_short_never_reaches_the_device() -> None:
    rows = SamplingRows(1, masked=[0], masks=[np.zeros(1, np.int32)])
    with pytest.raises(IndexError, match="1 words does not cover 33 tokens"):
        sampling_arrays(rows, 33)


def every_wish(vocabulary: int) -> Iterator[SamplingRows]:
    """Steps with each kind of wish alone, and mixes of all."""
    yield SamplingRows(3)
    yield SamplingRows(3, top_logprobs=2)
    for settings in ({}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}):
        yield drawing([0.1, 0.5, 0.9], vocabulary, **settings)
    yield banned(3, vocabulary)
    for kind in ("repeated", "added", "banned"):
        rows = SamplingRows(3)
        getattr(rows, kind).add(1, [2, 3], [1.5, 2.0])
        yield rows
    yield SamplingRows(3, masked=[2], masks=[np.full(-(-vocabulary // 32), -1, np.int32)])
    for seed in range(4):
        yield asked(8, vocabulary, seed=seed)


@pytest.mark.parametrize("vocabulary", [100, 1000])
def test_nothing_waits_for_the_device(vocabulary: int) -> None:
    for rows in every_wish(vocabulary):
        on_device(rows, vocabulary, scored=3)


def on_device(rows: SamplingRows, vocabulary: int, scored: int) -> int:
    """Calls of torch in a step on a device that has no values; raises where the host would wait for one."""
    arrays = [torch.from_numpy(array).to(META) for array in sampling_arrays(rows, vocabulary)]
    logits = torch.empty(rows.count + scored, vocabulary, device=META)
    given = torch.empty(scored, dtype=torch.long, device=META)
    return calls_of(lambda: choose(logits, rows, arrays, given, score_top=2))


def test_plain_rows_take_few_operations() -> None:
    logits, given = torch.empty(64, 1000, device=META), torch.empty(0, dtype=torch.long, device=META)
    assert sampling_arrays(SamplingRows(64), 1000) == []
    assert calls_of(lambda: choose_greedy(logits)) <= 9
    assert calls_of(lambda: choose(logits, SamplingRows(64), [], given, 0)) <= 12


def test_more_rows_of_a_kind_take_no_more_operations() -> None:
    for settings in ({}, {"top_k": 5}, {"top_p": 0.9}):
        few, many = (on_device(drawing([0.5] * rows, 1000, **settings), 1000, scored=1) for rows in (2, 64))
        assert few == many


def matrix() -> torch.Tensor:
    return torch.empty(3, 10, device=META)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda: matrix()[0, 0].item(),
        lambda: bool((matrix() > 0).any()),
        lambda: matrix()[0].tolist(),
        lambda: matrix().cpu(),
        lambda: matrix()[matrix() > 0],
        lambda: matrix().__setitem__(matrix() > 0, 1.0),
        lambda: torch.where(matrix() > 0),
        lambda: torch.unique(matrix()),
        lambda: matrix()[[0, 1]],
        lambda: matrix()[np.arange(2)],
        lambda: matrix()[torch.arange(2)],
        lambda: torch.tensor([1.0, 2.0], device=META),
        lambda: matrix().copy_(torch.zeros(3, 10)),
        lambda: matrix()[: matrix()[0, 0].long()],
    ],
)
def test_what_would_wait_is_noticed(waiting: Callable[[], object]) -> None:
    with pytest.raises((Waits, NotImplementedError, RuntimeError)), no_waiting():
        waiting()
