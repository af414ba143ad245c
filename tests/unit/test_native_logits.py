"""The kernel that chooses tokens on a CPU: exact sums, each row by itself, and the same tokens as the torch way."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from workers.engine.native.logits import LogitsKernel, RowResults, logits_kernel
from workers.engine.sampler import most_likely, sample_in_torch, score_in_torch
from workers.engine.sampling_rows import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZES = [1, 5, 1023, 1024, 1025, 5000, 49152]


@pytest.fixture(scope="module")
def kernel() -> LogitsKernel:
    found = logits_kernel()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def random_logits(rows: int, vocabulary: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def asked(rows: int, vocabulary: int, *, seed: int = 0) -> SamplingRows:
    """Every kind of wish, one or several a row, and rows without any."""
    rng = random.Random(seed)
    wishes = SamplingRows(rows, top_logprobs=rng.choice([0, 3]))
    for row in range(rows):
        some = rng.sample(range(vocabulary), min(vocabulary, 20))
        if rng.random() < 0.3:
            wishes.repeated.add(row, some, [1.3] * len(some))
        if rng.random() < 0.3:
            wishes.added.add(row, some, [rng.uniform(-5, 5) for _ in some])
        if rng.random() < 0.3:
            wishes.banned.add(row, some[:3], [0.0] * len(some[:3]))
        if rng.random() < 0.3:
            wishes.masked.append(row)
            bits = np.random.default_rng(rng.getrandbits(32)).integers(0, 2**32, -(-vocabulary // 32), np.uint32)
            wishes.masks.append(bits.view(np.int32))
        if rng.random() < 0.8:
            wishes.drawn.append(row)
            wishes.temperature.append(rng.choice([1.0, 1.0, 0.7, 1.5, 0.01, 40.0]))
            wishes.top_k.append(rng.choice([vocabulary, vocabulary, 1, min(50, vocabulary), min(2000, vocabulary)]))
            wishes.top_p.append(rng.choice([1.0, 1.0, 0.9, 0.5, 1e-6]))
            wishes.min_p.append(rng.choice([0.0, 0.0, 0.05, 1.0]))
            wishes.point.append(rng.random())
    return wishes


def drawing(points: Iterable[float], vocabulary: int, **settings: float) -> SamplingRows:
    """One row for each point, all with the same settings."""
    points = list(points)
    rows = SamplingRows(len(points), drawn=list(range(len(points))), point=points)
    rows.temperature = [settings.get("temperature", 1.0)] * len(points)
    rows.top_k = [int(settings.get("top_k", vocabulary))] * len(points)
    rows.top_p = [settings.get("top_p", 1.0)] * len(points)
    rows.min_p = [settings.get("min_p", 0.0)] * len(points)
    return rows


def only(wishes: SamplingRows, row: int) -> SamplingRows:
    """What one row of a step asks for, as a step of its own."""
    alone = SamplingRows(1, top_logprobs=wishes.top_logprobs)
    for name in ("repeated", "added", "banned"):
        cells = getattr(wishes, name)
        if row in cells.rows:
            at = cells.rows.index(row)
            getattr(alone, name).add(0, cells.tokens[at].tolist(), cells.values[at])
    if row in wishes.masked:
        alone.masked, alone.masks = [0], [wishes.masks[wishes.masked.index(row)]]
    if row in wishes.drawn:
        at = wishes.drawn.index(row)
        alone.drawn = [0]
        for name in ("temperature", "top_k", "top_p", "min_p", "point"):
            setattr(alone, name, [getattr(wishes, name)[at]])
    return alone


def bits_of(results: RowResults, row: int) -> list[bytes]:
    return [getattr(results, name)[row].tobytes() for name in RowResults.__slots__]


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_normalisers_are_those_of_float64(kernel: LogitsKernel, vocabulary: int, spread: float) -> None:
    logits = random_logits(3, vocabulary, spread=spread) + torch.tensor([[0.0], [90.0], [-1000.0]])
    found = kernel.choose(logits, SamplingRows(3))
    expected = torch.logsumexp(logits.double(), -1).numpy()
    assert np.abs(found.normalisers - expected).max() < 1e-6
    assert found.tokens.tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    assert found.allowed.all()


def test_of_equal_logits_the_first_is_chosen(kernel: LogitsKernel) -> None:
    logits = torch.zeros(4, 3000)
    for row, places in enumerate(((2999, 7, 1030), (2050, 2049), (1023, 1024), (0, 2999))):
        logits[row, list(places)] = 2.0
    assert kernel.choose(logits, SamplingRows(4)).tokens.tolist() == [7, 2049, 1023, 0]


@pytest.mark.parametrize("place", [0, 1500, 2999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(kernel: LogitsKernel, place: int, value: float) -> None:
    logits = random_logits(7, 3000, seed=1)
    wishes = asked(7, 3000, seed=2)
    before = kernel.choose(logits, wishes)
    logits[3, place] = value
    after = kernel.choose(logits, wishes)
    assert math.isnan(after.logprobs[3]) == (not math.isfinite(torch.logsumexp(logits[3], -1)))
    assert 0 <= after.tokens[3] < 3000
    assert all(bits_of(before, row) == bits_of(after, row) for row in range(7) if row != 3)


def test_a_row_with_nothing_in_it_is_not_finite(kernel: LogitsKernel) -> None:
    for nothing in (-math.inf, math.nan, math.inf):
        found = kernel.choose(torch.full((1, 2000), nothing), drawing([0.5], 2000, top_p=0.5))
        assert math.isnan(found.logprobs[0])
        assert 0 <= found.tokens[0] < 2000


@pytest.mark.parametrize("vocabulary", [700, 40_000])
def test_a_row_is_the_same_bits_alone_and_in_company_by_any_number_of_threads(
    kernel: LogitsKernel, vocabulary: int
) -> None:
    logits, wishes = random_logits(40, vocabulary, seed=3), asked(40, vocabulary, seed=4)
    together = kernel.choose(logits, wishes, threads=1)
    for threads in (2, 3, 7):
        again = kernel.choose(logits, wishes, threads=threads)
        assert all(bits_of(together, row) == bits_of(again, row) for row in range(40))
    for row in range(40):
        assert bits_of(kernel.choose(logits[row : row + 1], only(wishes, row)), 0) == bits_of(together, row)


@pytest.mark.parametrize("vocabulary", [1, 33, 1000, 1024, 9000])
@pytest.mark.parametrize("seed", range(4))
def test_it_gives_what_torch_gives(kernel: LogitsKernel, vocabulary: int, seed: int) -> None:
    logits, wishes = random_logits(60, vocabulary, seed=seed), asked(60, vocabulary, seed=seed)
    found, expected = kernel.choose(logits, wishes), sample_in_torch(logits, wishes)
    assert found.allowed.tolist() == expected.allowed.tolist()
    allowed = found.allowed
    assert found.tokens[allowed].tolist() == expected.tokens.numpy()[allowed].tolist()
    assert found.logprobs[allowed].tolist() == pytest.approx(expected.logprobs.numpy()[allowed].tolist(), abs=3e-6)
    assert (found.tops is None) == (expected.tops is None)
    for mine, theirs in zip(found.tops or [], expected.tops or [], strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert [p for _, p in mine] == pytest.approx([p for _, p in theirs], abs=3e-6)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.7}, {"top_k": 1500}, {"min_p": 0.1}, {"top_k": 900, "top_p": 0.9, "temperature": 3.0}]
)
def test_equal_logits_rank_by_number(kernel: LogitsKernel, settings: dict[str, float]) -> None:
    """A few values, each a thousand times: what is kept may end in the middle of equal tokens."""
    vocabulary, points = 4000, 200
    logits = torch.randint(0, 4, (1, vocabulary), generator=torch.Generator().manual_seed(5)).float()
    ranked = sorted(range(vocabulary), key=lambda token: (-logits[0, token], token))
    ranked = ranked[: int(settings.get("top_k", vocabulary))]
    weights = [math.exp(float(logits[0, t] - 3) / settings.get("temperature", 1.0)) for t in ranked]
    wanted = sum(weights) * settings.get("top_p", 1.0)
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    kept = [w for w, b in zip(weights, before, strict=True) if b < wanted and w >= settings.get("min_p", 0.0)]
    edges = np.cumsum(kept)
    rows = drawing(((i + 0.37) / points for i in range(points)), vocabulary, **settings)
    found = kernel.choose(logits.repeat(points, 1), rows).tokens.tolist()
    for point, token in zip(rows.point, found, strict=True):
        expected = int(np.searchsorted(edges, point * edges[-1], side="right"))
        assert abs(ranked.index(token) - expected) <= (np.abs(edges - point * edges[-1]).min() < 1e-3)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999}, {"top_k": 600}])
@pytest.mark.parametrize("point", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_fall_on_tokens_that_have_a_probability(
    kernel: LogitsKernel, point: float, settings: dict[str, float]
) -> None:
    logits = torch.full((1, 3000), -math.inf)
    logits[0, 1100:1900] = random_logits(1, 800, seed=6)[0]
    token = int(kernel.choose(logits, drawing([point], 3000, **settings)).tokens[0])
    assert 1100 <= token < 1900


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1e3, 1e30, 1e300])
def test_any_temperature_can_be_asked_for(kernel: LogitsKernel, temperature: float) -> None:
    logits = random_logits(1, 3000, seed=7)
    for settings in ({}, {"top_p": 0.5}, {"top_k": 300}, {"min_p": 0.9}):
        rows = drawing([i / 50 for i in range(50)], 3000, temperature=temperature, **settings)
        tokens = kernel.choose(logits.repeat(50, 1), rows).tokens
        assert len(set(tokens.tolist())) == (1 if temperature < 1 else 50)
        if temperature < 1:
            assert tokens[0] == int(logits.argmax())


def test_scores_of_given_tokens_and_the_most_likely_beside_them(kernel: LogitsKernel) -> None:
    logits = random_logits(5, 6000, seed=8)
    logits[2, 17] = math.nan
    given = torch.tensor([0, 5999, 17, 1024, 3])
    found = kernel.score(logits, given, 20)
    expected, tops = score_in_torch(logits, given, 20)
    assert found.logprobs.tolist() == pytest.approx(expected.tolist(), abs=3e-6, nan_ok=True)
    assert found.tops is not None
    assert tops is not None
    for row in (0, 1, 3, 4):
        assert [t for t, _ in found.tops[row]] == [t for t, _ in tops[row]]


def test_fewer_tokens_than_the_most_likely_that_are_wanted(kernel: LogitsKernel) -> None:
    logits = torch.tensor([[1.0, -math.inf, 3.0, -math.inf, 2.0]])
    found = kernel.choose(logits, SamplingRows(1, top_logprobs=9)).tops
    assert found is not None
    assert [t for t, _ in found[0]] == [2, 4, 0, 1, 3]
    assert [p for _, p in found[0]][3:] == [-math.inf, -math.inf]
    assert most_likely(logits, torch.logsumexp(logits, -1), 3) is not None


def test_rows_may_be_parts_of_wider_ones(kernel: LogitsKernel) -> None:
    wide, wishes = random_logits(9, 4000, seed=9), asked(9, 3001, seed=10)
    part = wide[:, 500:3501]
    found, expected = kernel.choose(part, wishes), kernel.choose(part.contiguous(), wishes)
    assert all(bits_of(found, row) == bits_of(expected, row) for row in range(9))


def test_only_float32_rows_of_the_host_are_taken() -> None:
    logits = random_logits(4, 8)
    assert LogitsKernel.takes(logits)
    assert not any(
        LogitsKernel.takes(other) for other in (logits.double(), logits.T, logits[:, ::2], logits.to("meta"))
    )


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_beyond_the_logits_is_refused(kernel: LogitsKernel, token: int) -> None:
    wishes = SamplingRows(1)
    wishes.added.add(0, [token], [1.0])
    with pytest.raises(IndexError, match="beyond the 8 logits"):
        kernel.choose(random_logits(1, 8), wishes)
    with pytest.raises(IndexError, match="beyond the 8 logits"):
        kernel.score(random_logits(1, 8), torch.tensor([token]), 0)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_there_is_one_token_to_score_for_each_row(kernel: LogitsKernel, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} tokens cannot be scored by 4 rows"):
        kernel.score(random_logits(4, 8), torch.zeros(count, dtype=torch.long), 0)


def test_no_rows_are_no_work(kernel: LogitsKernel) -> None:
    assert kernel.score(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long), 3).logprobs.shape == (0,)


def test_a_library_of_another_layout_is_refused() -> None:
    class Other:
        @staticmethod
        def batchjobs_logits_call_size() -> int:
            return 8

    with pytest.raises(ValueError, match="disagree"):
        LogitsKernel(Other)  # type: ignore[arg-type]
