"""Tokens chosen on CUDA, and the copies beside it, without waiting for it. Run by `make test-gpu`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.test_device_sampler import disturbed
from tests.unit.test_native_logits import asked, drawing, random_logits
from workers.engine.attention.flash_trial import without_waiting
from workers.engine.device_path import path_of
from workers.engine.device_sampler import choose, choose_greedy, sampling_arrays
from workers.engine.draws import ranked
from workers.engine.results import Chosen, Clock, Pending
from workers.engine.sampler import sample_in_torch, score_in_torch
from workers.engine.sampling_rows import SamplingRows
from workers.engine.transfer import BUFFERS

CUDA = torch.device("cuda")
LONG_ENOUGH = 200_000_000  # cycles of the device: about a tenth of a second


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def chosen(logits: torch.Tensor, rows: SamplingRows, given: torch.Tensor, top: int = 0) -> Chosen:
    """On the device, from the copy of the arrays on. Raises where the host would wait."""
    upload = path_of(CUDA).upload()
    for _ in range(BUFFERS):
        upload([np.zeros(1 << 20, np.uint8)])  # pinned memory is there
    torch.cuda.synchronize()
    with without_waiting(CUDA):
        arrays = upload(sampling_arrays(rows, logits.shape[1]))
        return choose(logits, rows, arrays, given, top)


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_rows_is_chosen_as_the_reference_does(seed: int) -> None:
    """On the device, and on the host."""
    rng = random.Random(seed)
    rows, vocabulary = rng.randint(1, 40), rng.choice([5, 256, 1000, 32_000, 151_936])
    here = disturbed(random_logits(rows + 3, vocabulary, spread=rng.choice([0.1, 3, 30]), seed=seed), rng)
    wishes, given = asked(rows, vocabulary, seed=seed), torch.tensor([0, vocabulary - 1, vocabulary // 2])
    there = here.to(CUDA)
    found = chosen(there, wishes, given.to(CUDA), top=4)
    for logits, tokens in ((there, given.to(CUDA)), (here, given)):
        expected = sample_in_torch(logits[:rows], wishes)
        scores, _ = score_in_torch(logits[rows:], tokens, 0)
        finite = ~expected.logprobs.cpu().isnan()
        free = finite & expected.allowed.cpu()
        assert found.allowed.tolist() == expected.allowed.tolist()
        assert found.logprobs.isnan().tolist() == (~finite).tolist()
        assert found.tokens.cpu()[free].tolist() == expected.tokens.cpu()[free].tolist()
        torch.testing.assert_close(found.logprobs.cpu()[free], expected.logprobs.cpu()[free], atol=1e-5, rtol=0)
        torch.testing.assert_close(found.scores.cpu(), scores.cpu(), atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("vocabulary", [1000, 151_936])
@pytest.mark.parametrize("count", [1, 20, 256])
def test_tokens_rank_by_their_logits_and_then_by_their_number(vocabulary: int, count: int) -> None:
    logits = random_logits(70, vocabulary).bfloat16().float()
    logits[::2] = logits[::2].round()
    expected = torch.sort(logits, descending=True, stable=True).indices[:, :count]
    assert ranked(logits.to(CUDA), count).cpu().equal(expected)


@pytest.mark.parametrize("settings", [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_a_row_alone_draws_what_it_draws_among_others(settings: dict[str, float]) -> None:
    logits, points = random_logits(64, 32_000).bfloat16().float().to(CUDA), [(i + 0.5) / 64 for i in range(64)]
    none = torch.zeros(0, dtype=torch.long, device=CUDA)
    together = chosen(logits, drawing(points, 32_000, **settings), none).tokens.tolist()
    for row in range(0, 64, 9):
        alone = chosen(logits[row : row + 1], drawing(points[row : row + 1], 32_000, **settings), none)
        assert alone.tokens.tolist() == [together[row]]


def test_greedy_rows_can_be_recorded() -> None:
    logits = random_logits(16, 32_000).to(CUDA)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        choose_greedy(logits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs, allowed = choose_greedy(logits)
    logits.copy_(random_logits(16, 32_000, seed=1))
    logits[3, 5] = torch.nan
    graph.replay()
    expected = sample_in_torch(logits, SamplingRows(16))
    assert tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=1e-5, rtol=0, equal_nan=True)
    assert allowed.all()


def test_arrays_are_those_of_their_step_while_the_device_is_far_behind() -> None:
    """The third step waits for the first copy, which waits for what the device was busy with."""
    upload = path_of(CUDA).upload()
    torch.cuda._sleep(LONG_ENOUGH)  # type: ignore[no-untyped-call]
    there = [upload([np.full(1000, number), np.full(3, number, np.bool_)]) for number in range(5)]
    assert [sorted(set(numbers.tolist())) for numbers, _ in there] == [[0], [1], [2], [3], [4]]
    assert [bits.tolist() for _, bits in there] == [[False] * 3] + [[True] * 3] * 4


def test_results_are_those_of_their_step_while_the_device_is_far_behind() -> None:
    path, clock = path_of(CUDA), Clock()
    download = path.download()
    for _ in range(BUFFERS):
        download([torch.zeros(1 << 16, device=CUDA)]).wait()
    logits, rows = torch.zeros(8, 1000, device=CUDA), SamplingRows(8)
    none = torch.zeros(0, dtype=torch.long, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_ENOUGH)  # type: ignore[no-untyped-call]
    launched = []
    with without_waiting(CUDA):
        for number in range(2):
            logits.zero_()
            logits[:, number + 5].fill_(1.0)
            launched.append(Pending(choose(logits, rows, [], none, 0), download, clock, 0.0))
            logits.fill_(torch.nan)  # as the next step overwrites them
    assert [result.wait().tokens for result in launched] == [[5] * 8, [6] * 8]
