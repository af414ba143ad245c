"""The native matrix product: right in every size and form, and a row's result the same bits in any company."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

import workers.engine.native as native
from workers.engine.attention.compiler import FLAGS, KernelError, load_kernel
from workers.engine.native.linear import LinearKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(native.__file__).with_name("linear.cpp")
DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
# [rows, inputs, outputs]: each number of vectors of rows, several strips and blocks of strips, parts of everything
SIZES = [(1, 1, 1), (3, 7, 5), (8, 64, 48), (13, 300, 49), (17, 31, 130), (33, 576, 33), (64, 40, 97), (90, 2100, 18)]
SIZES += [(130, 65, 31), (300, 17, 20)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("BATCHJOBS_CACHE", str(folder))
        patch.delenv("BATCHJOBS_NO_COMPILE", raising=False)
        yield folder


@pytest.fixture(scope="module")
def kernel(cache: Path) -> LinearKernel:
    try:
        return LinearKernel(load_kernel(SOURCE))
    except KernelError as reason:
        pytest.skip(f"the C++ kernel cannot be built here: {reason}")


def build(cache: Path, name: str, *, native_flag: str = "-march=native", more: tuple[str, ...] = ()) -> LinearKernel:
    """The kernel built for another processor or in another form."""
    library = cache / f"{name}.so"
    flags = [native_flag if flag == "-march=native" else flag for flag in FLAGS]
    done = subprocess.run(["c++", *flags, *more, str(SOURCE), "-o", str(library)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot be built here: {done.stderr.decode(errors='replace')[:200]}")
    return LinearKernel(ctypes.CDLL(str(library)))


@pytest.fixture(scope="module")
def pairs_kernel(cache: Path, kernel: LinearKernel) -> LinearKernel:
    """Bfloat16 in pairs by plain arithmetic, as processors with AVX512-BF16 do it in one instruction."""
    return build(cache, "pairs", more=("-DBATCHJOBS_BFLOAT16_PAIRS",))


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, wanted: torch.Tensor, inputs: int) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=3e-6 * inputs**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_three_products_of_one_input_with_bias_and_residual(
    kernel: LinearKernel, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, inputs, outputs = size
    x, residual = rows(count, inputs), rows(count, outputs, seed=1)
    weights = [rows(n, inputs, seed=n).to(dtype) for n in (outputs, outputs + 1, 3)]
    biases = [rows(len(w), seed=5).to(dtype) for w in weights[:2]]
    found = kernel(x, weights, [*biases, None], residual=residual, threads=2)
    wanted = [x.double() @ w.double().T for w in weights]
    close(found[0], wanted[0] + biases[0].double() + residual, inputs)
    close(found[1], wanted[1] + biases[1].double(), inputs)
    close(found[2], wanted[2], inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_alone_and_gated(kernel: LinearKernel, activation: str | None, dtype: torch.dtype) -> None:
    x, residual = rows(21, 50), rows(21, 70, seed=1)
    gate, up = ((3 * rows(70, 50, seed=s) / 50**0.5).to(dtype) for s in (2, 3))
    bias = rows(70, seed=4).to(dtype)
    act = ACTIVATIONS[activation]
    alone = act(x.double() @ gate.double().T + bias.double())
    close(kernel(x, [gate], [bias], activation=activation)[0], alone, 50)
    found = kernel(x, [gate, up], [bias, bias], gated=True, activation=activation, residual=residual)[0]
    close(found, alone * (x.double() @ up.double().T + bias.double()) + residual, 50)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends(kernel: LinearKernel, activation: str | None) -> None:
    x = torch.tensor([[-1e30], [-200.0], [-20.0], [-5.0], [-1e-3], [0.0], [1e-3], [5.0], [20.0], [200.0], [1e30]])
    found = kernel(x, [torch.ones(1, 1)], activation=activation)[0]
    torch.testing.assert_close(found.double(), ACTIVATIONS[activation](x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_merged_weights_and_padded_rows_are_read_in_place(kernel: LinearKernel, dtype: torch.dtype) -> None:
    merged, x = rows(90, 101).to(dtype), rows(19, 130)[:, 7:107]
    residual = rows(19, 60)[:, 5:45]
    found = kernel(x, [merged[:40, :100], merged[40:70, 1:]], residual=residual)
    close(found[0], x.double() @ merged[:40, :100].double().T + residual, 100)
    close(found[1], x.double() @ merged[40:70, 1:].double().T, 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_gives_the_same_bits_in_any_company(kernel: LinearKernel, dtype: torch.dtype, gated: bool) -> None:
    x, residual = rows(300, 333), rows(300, 107, seed=1)
    weights = [rows(107, 333, seed=s).to(dtype) for s in (2, 3)]

    def product(choice: list[int], threads: int) -> torch.Tensor:
        activation = "gelu_tanh" if gated else None
        found = kernel(
            x[choice], weights, gated=gated, activation=activation, residual=residual[choice], threads=threads
        )
        return torch.cat(found, -1)

    alone = torch.cat([product([row], 1) for row in range(300)])
    rng = random.Random(0)
    for count in [*range(1, 70, 3), 8, 9, 16, 32, 48, 64, 65, 80, 100, 129, 257, 300]:
        choice = [rng.randrange(300) for _ in range(count)]
        for threads in (1, 2, 5, 40):
            assert torch.equal(product(choice, threads), alone[choice]), (count, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(kernel: LinearKernel, dtype: torch.dtype, wrong: float) -> None:
    x, weights = rows(40, 70), [rows(50, 70, seed=s).to(dtype) for s in (1, 2)]
    good = kernel(x, weights, gated=True, activation="silu")[0]
    x[17, 3] = wrong
    bad = kernel(x, weights, gated=True, activation="silu")[0]
    others = [row for row in range(40) if row != 17]
    assert torch.equal(bad[others], good[others])
    assert not bad[17].isfinite().all()
    if wrong != wrong:
        assert bad[17].isnan().all()


def test_the_residual_may_be_the_output_and_no_row_is_no_work(kernel: LinearKernel) -> None:
    x, weight = rows(20, 30), rows(40, 30, seed=1)
    kept = rows(20, 40, seed=2)
    wanted = kernel(x, [weight], residual=kept)[0]
    assert kernel(x, [weight], residual=kept, out=[kept])[0] is kept
    assert torch.equal(kept, wanted)
    assert kernel(x[:0], [weight])[0].shape == (0, 40)


def test_pairs_of_bfloat16_are_the_product_of_rounded_rows(pairs_kernel: LinearKernel) -> None:
    for count, inputs, outputs in SIZES:
        x, weight = rows(count, inputs), rows(outputs, inputs, seed=1).bfloat16()
        found = pairs_kernel(x, [weight], threads=2)[0]
        close(found, x.bfloat16().double() @ weight.double().T, inputs)
        assert torch.equal(pairs_kernel(x[-1:], [weight], threads=1)[0][0], found[-1])


def test_pairs_round_to_nearest_even_and_keep_nan(pairs_kernel: LinearKernel) -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), float("nan")])
    found = pairs_kernel(x[:, None], [torch.ones(1, 1).bfloat16()])[0][:, 0]
    torch.testing.assert_close(found, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="not a processor with AVX2")
def test_a_build_for_narrower_registers(cache: Path, kernel: LinearKernel) -> None:
    narrow = build(cache, "narrow", native_flag="-march=haswell")
    for (count, inputs, outputs), dtype in itertools.product(SIZES, DTYPES):
        x, weight = rows(count, inputs), rows(outputs, inputs, seed=1).to(dtype)
        found = narrow(x, [weight], threads=2)[0]
        close(found, x.double() @ weight.double().T, inputs)
        assert torch.equal(narrow(x[-1:], [weight], threads=1)[0][0], found[-1])


def test_tensors_that_do_not_fit_are_refused(kernel: LinearKernel) -> None:
    x, weight = rows(4, 6), rows(5, 6)
    for call in (
        lambda: kernel(x, [rows(5, 7)]),
        lambda: kernel(x, []),
        lambda: kernel(x, [weight] * 4),
        lambda: kernel(x, [weight], gated=True),
        lambda: kernel(x, [weight, rows(4, 6)], gated=True),
        lambda: kernel(x, [weight, weight.bfloat16()]),
        lambda: kernel(x.double(), [weight]),
        lambda: kernel(x, [weight.T]),
        lambda: kernel(x, [weight], [rows(6)]),
        lambda: kernel(x, [weight], residual=rows(4, 6)),
        lambda: kernel(x, [weight], out=[rows(5, 4).T]),
        lambda: kernel(x[:, :0], [weight[:, :0]]),
    ):
        with pytest.raises(ValueError, match=r"must|takes|fit"):
            call()
