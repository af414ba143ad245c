"""Paged attention on the functions of other packages: the adapter on stand-ins, and who is chosen when."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.flash_attention import (
    NAMES,
    module_2,
    module_3,
    module_varlen,
    stand_in,
)
from tests.unit.test_attention import (
    GEMMA,
    GPT_OSS,
    PLAIN,
    Pool,
    assert_close,
    dense,
    make_sinks,
    make_story,
    ragged_plan,
    run_all,
)
from workers.engine.attention import choose_backend, cuda
from workers.engine.attention.cuda import CudaPagedAttention, choose
from workers.engine.attention.flash import FlashPagedAttention, decode_rows
from workers.engine.attention.flash_functions import FlashFunctions
from workers.engine.attention.flash_rows import step_arrays
from workers.engine.attention.flash_search import Found, find_functions, search
from workers.engine.attention.flash_trial import fault
from workers.engine.attention.interface import AttentionBackend, LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention

CPU = torch.device("cpu")
FUNCTIONS = pytest.mark.parametrize("name", NAMES)


class FlashPool(Pool):
    """Hands over a step's arrays as the engine does, and names no page behind the window."""

    def rows(self, parts: Sequence[tuple[int, int, int]]) -> PackedRows:
        rows = super().rows(parts)
        window = self.spec.sliding_window
        for table, (_, first, _) in zip(rows.tables, parts, strict=True):
            table[: 0 if window is None else max(0, first - window + 1) // self.page_size] = 0
        return rows


class Uploading:
    """A backend that gets its arrays, as the runner brings them."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.allocate, self.attend, self.name = backend.allocate, backend.attend, backend.name

    def begin(self, rows: PackedRows) -> None:
        self.backend.begin(rows, [torch.from_numpy(array) for array in self.backend.host_arrays(rows)])


def pool(backend: AttentionBackend, spec: LayerSpec, page_size: int, dtype: torch.dtype, seed: int = 0) -> FlashPool:
    return FlashPool(Uploading(backend), spec, page_size, dtype, seed)  # type: ignore[arg-type]


def random_spec(rng: np.random.Generator, functions: FlashFunctions) -> LayerSpec:
    head_dim, kv_heads = int(rng.choice((8, 16, 64, 128))), int(rng.choice((1, 2)))
    windows = (50, 64, 300) if functions.crosses_pages else (1, 5, 64, 300)
    return LayerSpec(
        index=0,
        num_heads=kv_heads * int(rng.choice((1, 2, 4))),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scaling=float(rng.choice((head_dim**-0.5, 0.3))),
        sliding_window=int(rng.choice(windows)) if rng.random() < 0.6 else None,
        softcap=5.0 if functions.has_softcap and rng.random() < 0.4 else None,
    )


@FUNCTIONS
@pytest.mark.parametrize("seed", range(8))
def test_equals_dense_attention_over_random_steps(name: str, seed: int) -> None:
    """Decode rows and chunks in any order, behind cached prefixes, over pages that hold NaN where nobody wrote."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    functions = stand_in(name, exact=True)
    spec = random_spec(rng, functions)
    dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float32
    lengths = rng.integers(1, 450, int(rng.integers(1, 5))).tolist()
    stories = [make_story(spec, n, generator, dtype) for n in lengths]
    plan = ragged_plan(lengths, rng)
    found = run_all(pool(FlashPagedAttention(functions), spec, functions.page_size, dtype, seed), stories, plan, None)
    for story, rows in zip(stories, found, strict=True):
        if dtype == torch.bfloat16:
            torch.testing.assert_close(rows.double(), dense(spec, story), rtol=2**-7, atol=1e-3)
        else:
            assert_close(rows, dense(spec, story))


def test_sequences_that_share_prefix_pages_see_rows_of_the_same_step() -> None:
    generator = torch.Generator().manual_seed(8)
    leader, follower = make_story(PLAIN, 300, generator), make_story(PLAIN, 300, generator)
    follower.key[:, :256], follower.value[:, :256] = leader.key[:, :256], leader.value[:, :256]
    shared = pool(FlashPagedAttention(stand_in("flash-attn 2", exact=True)), PLAIN, 256, torch.float32)
    shared.step([leader, follower], [(0, 0, 255)])
    shared.rows([(0, 255, 256)])
    shared.tables[1] = shared.tables[0][:1]
    # The leader's decode row ends the page that the follower's chunk stands behind; the follower comes first here.
    found, _ = shared.step([leader, follower], [(1, 256, 300), (0, 255, 256)])
    assert_close(found, dense(PLAIN, follower)[256:])


class TestArrays:
    def test_of_a_mixed_step_in_order(self) -> None:
        tables = np.array([[3, 7, 0], [5, 0, 0], [0, 9, 2]], np.int32)
        rows = PackedRows(np.array([0, 1, 2, 5], np.int32), np.array([5, 0, 8], np.int32), tables, 4)
        slots, *decode = step_arrays(rows)[:5]
        assert slots.tolist() == [7 * 4 + 1, 5 * 4, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
        assert slots.dtype == np.int64
        assert [array.tolist() for array in decode] == [[6, 1], [[3, 7], [5, 0]], [0, 1, 2], [0, 6, 7]]
        prefill = step_arrays(rows)[5:]
        assert [array.tolist() for array in prefill] == [[11], [[9, 9, 2]], [0, 3], [0, 11]]  # page 9 before the window
        assert {array.dtype for array in (*decode, *prefill)} == {np.dtype(np.int32)}

    def test_of_kinds_in_any_order_name_their_rows(self) -> None:
        tables = np.array([[1], [2], [3], [4]], np.int32)
        rows = PackedRows(np.array([0, 2, 3, 3, 4], np.int32), np.array([0, 1, 9, 3], np.int32), tables, 16)
        arrays = step_arrays(rows)  # two rows, one, none, one
        assert [array.tolist() for array in arrays[1:5]] == [[2, 4], [[2], [4]], [0, 1, 2], [0, 2, 6]]
        assert [array.tolist() for array in arrays[5:9]] == [[2], [[1]], [0, 2], [0, 2]]
        assert [array.tolist() for array in arrays[9:]] == [[2, 3], [0, 1]]

    def test_of_one_kind_are_those_of_that_kind(self) -> None:
        tables = np.array([[1], [2]], np.int32)
        decode = PackedRows(np.array([0, 1, 2], np.int32), np.array([3, 0], np.int32), tables, 16)
        assert len(step_arrays(decode)) == 5
        prefill = PackedRows(np.array([0, 4], np.int32), np.array([0], np.int32), tables[:1], 16)
        assert len(step_arrays(prefill)) == 5

    def test_another_number_of_them_is_refused(self) -> None:
        backend = FlashPagedAttention(stand_in("flash-attn 2"))
        with pytest.raises(ValueError, match="a step with 5 arrays on the device was expected, not with 0"):
            backend.begin(decode_rows(2, 1, 256))

    def test_attend_needs_a_step(self) -> None:
        backend = FlashPagedAttention(stand_in("flash-attn 2"))
        story = make_story(PLAIN, 1, torch.Generator())
        with pytest.raises(RuntimeError, match="attend before begin"):
            backend.attend(
                PLAIN,
                backend.allocate(PLAIN, 2, 256, torch.float32, "cpu"),
                story.query[None],
                story.key[None],
                story.value[None],
            )


class TestPaddedDecodeSteps:
    """What a captured graph does: `begin` once, then new numbers in the same arrays."""

    @pytest.mark.parametrize("window", [None, 100])
    @FUNCTIONS
    def test_one_begin_serves_every_step(self, name: str, window: int | None) -> None:
        functions = stand_in(name, exact=True)
        spec, size = replace(PLAIN, sliding_window=window), functions.page_size
        generator = torch.Generator().manual_seed(1)
        stories = [make_story(spec, n, generator) for n in (290, 31, 258)]
        pages = pool(FlashPagedAttention(functions), spec, size, torch.float32)
        pages.step(stories, [(s, 0, story.length - 3) for s, story in enumerate(stories)])
        backend, width = FlashPagedAttention(functions), -(-300 // size)
        empty = decode_rows(4, width, size)
        fixed = [torch.from_numpy(array) for array in backend.decode_arrays(empty, 4, width)]
        backend.begin(empty, fixed)
        for back, who in ((3, [0, 1, 2]), (2, [2, 0]), (2, [1]), (1, [0, 2, 1])):
            rows = pages.rows([(s, stories[s].length - back, stories[s].length - back + 1) for s in who])
            for array, new in zip(fixed, backend.decode_arrays(rows, 4, width), strict=True):
                assert array.shape == new.shape
                array.copy_(torch.from_numpy(new))
            padded = [_padded(stories, who, back, name) for name in ("query", "key", "value")]
            before = pages.cache.keys.clone()
            found = backend.attend(spec, pages.cache, *padded)[0]
            for row, s in enumerate(who):
                assert_close(found[row], dense(spec, stories[s])[-back])
            assert not found[len(who) :].any()
            changed = (pages.cache.keys != before) & ~(pages.cache.keys.isnan() & before.isnan())
            slots = {(page, slot) for page, slot, *_ in changed.nonzero().tolist()}
            assert slots - {(0, 0)} == {divmod(int(slot), size) for slot in fixed[0][: len(who)]}

    def test_are_those_of_a_step_with_more_rows(self) -> None:
        backend = FlashPagedAttention(stand_in("flash-attn 2"))
        tables = np.array([[0, 4, 6]], np.int32)  # page 0 is behind a window
        rows = PackedRows(np.array([0, 1], np.int32), np.array([600], np.int32), tables, 256)
        slots, lengths, table, starts, ends = backend.decode_arrays(rows, 3, 4)
        assert slots.tolist() == [6 * 256 + 600 - 512, 0, 0]
        assert lengths.tolist() == [601, 0, 0]
        assert table.tolist() == [[4, 4, 6, 0], [0] * 4, [0] * 4]
        assert starts.tolist() == [0, 1, 2, 3]
        assert ends.tolist() == [0, 601, 601, 601]
        assert [array.dtype for array in (slots, lengths, table)] == [np.int64, np.int32, np.int32]

    @pytest.mark.parametrize(
        ("starts", "cached", "size", "message"),
        [
            ([0, 2], [0], 4, "2 rows of 1 sequences are no 4 decode rows"),
            ([0, 1, 1], [0, 0], 4, "1 rows of 2 sequences"),
            ([0, 1, 2], [0, 0], 1, "no 1 decode rows at most"),
            ([0, 1], [512], 4, "a sequence has 3 pages, and the table has room for 2"),
        ],
    )
    def test_no_others_are_taken(self, starts: list[int], cached: list[int], size: int, message: str) -> None:
        tables = np.ones((len(cached), 3), np.int32)
        rows = PackedRows(np.array(starts, np.int32), np.array(cached, np.int32), tables, 256)
        with pytest.raises(ValueError, match=message):
            FlashPagedAttention(stand_in("flash-attn 2")).decode_arrays(rows, size, 2)


def _padded(stories: Sequence[Any], who: Sequence[int], back: int, name: str) -> torch.Tensor:
    """Rows of these sequences, ``back`` from their ends, and rows of NaN behind them: [1, H, 4, D]."""
    rows = torch.stack([getattr(stories[s], name)[:, -back] for s in who], dim=1)
    out = torch.full((rows.shape[0], 4, rows.shape[2]), torch.nan)
    out[:, : len(who)] = rows
    return out[None]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("name", "spec", "dtype", "reason"),
        [
            ("flash-attn 2", PLAIN, torch.bfloat16, None),
            ("flash-attn 2", PLAIN, torch.float16, None),
            ("flash-attn 2", GEMMA, torch.bfloat16, None),
            ("flash-attn 2", PLAIN, torch.float32, "does not compute in float32"),
            ("flash-attn 2", GPT_OSS, torch.bfloat16, "no attention sinks"),
            ("flash-attn 2", replace(PLAIN, head_dim=264, value_dim=264), torch.bfloat16, "up to 256, not of 264"),
            ("flash-attn 2", replace(PLAIN, head_dim=20, value_dim=20), torch.bfloat16, "multiple of 8 up to 256"),
            ("flash-attn 2", replace(PLAIN, head_dim=192, value_dim=128), torch.bfloat16, "heads of 192 and 128"),
            ("FlashAttention 3", replace(PLAIN, head_dim=192, value_dim=128), torch.bfloat16, None),
            ("FlashAttention 3", replace(PLAIN, head_dim=96, value_dim=64), torch.bfloat16, "heads of 96 and 64"),
            ("FlashAttention 3", replace(PLAIN, sliding_window=48), torch.bfloat16, "more than 48 tokens, not of 48"),
            ("FlashAttention 3", replace(PLAIN, sliding_window=49), torch.bfloat16, None),
            ("FlashAttention 3", GPT_OSS, torch.bfloat16, "no attention sinks"),
            ("varlen_attn", replace(PLAIN, sliding_window=3), torch.bfloat16, None),
            ("varlen_attn", replace(PLAIN, softcap=30.0), torch.bfloat16, "does not cap scores"),
        ],
    )
    def test_layers(self, name: str, spec: LayerSpec, dtype: torch.dtype, reason: str | None) -> None:
        found = stand_in(name).refuses(spec, dtype)
        assert found is None if reason is None else reason in str(found)

    @pytest.mark.parametrize(
        ("name", "page_size", "serves"),
        [
            ("flash-attn 2", 256, True),
            ("flash-attn 2", 512, True),
            ("flash-attn 2", 16, False),
            ("flash-attn 2", 300, False),
            ("FlashAttention 3", 16, True),
            ("FlashAttention 3", 48, True),
            ("FlashAttention 3", 64, False),
            ("FlashAttention 3", 256, False),
            ("FlashAttention 3", 8, False),
            ("varlen_attn", 256, True),
            ("varlen_attn", 128, False),
        ],
    )
    def test_pages(self, name: str, page_size: int, serves: bool) -> None:
        assert (stand_in(name).refuses_pages(page_size) is None) is serves


class TestTheTrial:
    @pytest.mark.parametrize("spec", [PLAIN, replace(GEMMA, sliding_window=80)], ids=["plain", "capped window"])
    @FUNCTIONS
    def test_passes_what_is_right(self, name: str, spec: LayerSpec) -> None:
        functions = stand_in(name)
        if not functions.has_softcap:
            spec = replace(spec, softcap=None)
        assert fault(functions, spec, torch.bfloat16, functions.page_size, CPU) is None

    def test_finds_stale_slots_that_come_through(self) -> None:
        """FlashAttention 3 loads whole blocks where a page holds them."""
        assert "differ by nan" in str(fault(stand_in("FlashAttention 3"), PLAIN, torch.bfloat16, 128, CPU))

    def test_finds_wrong_numbers(self) -> None:
        right = stand_in("flash-attn 2")

        def prefill(*asked: Any) -> torch.Tensor:
            return right.prefill(*asked[:-1], replace(asked[-1], scaling=1.0))

        wrong = replace(right, prefill=prefill)
        assert "are not those of plain torch" in str(fault(wrong, PLAIN, torch.bfloat16, 256, CPU))

    def test_finds_what_goes_wrong_beside_a_padding_row_only(self) -> None:
        right = stand_in("flash-attn 2")

        def decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any, spec: Any) -> torch.Tensor:
            out = right.decode(query, keys, values, rows, spec)
            return out.flip(0) if 0 in rows.lengths.tolist() else out

        wrong = replace(right, decode=decode)
        assert "are not those of plain torch" in str(fault(wrong, PLAIN, torch.bfloat16, 256, CPU))

    def test_finds_functions_that_fail(self) -> None:
        def fails(*_: object) -> torch.Tensor:
            raise RuntimeError("no kernel image is available\nfor this device")

        broken = replace(stand_in("flash-attn 2"), decode=fails)
        found = fault(broken, PLAIN, torch.bfloat16, 256, CPU)
        assert found == "it fails on this device: no kernel image is available"

    def test_finds_functions_that_wait_for_the_device(self) -> None:
        functions = next(search((8, 0), _loader(flash_attn=module_2(waits=True)))).functions[0]
        assert fault(functions, PLAIN, torch.bfloat16, 256, CPU) == "it makes the host wait for the device"


def _loader(**modules: object) -> Any:
    """An import that knows these; ``varlen`` is torch's own, which is always there."""
    known = {"torch.nn.attention.varlen": modules.pop("varlen", SimpleNamespace()), **modules}

    def load(name: str) -> object:
        module = known.get(name, ModuleNotFoundError(f"No module named {name!r}", name=name))
        if isinstance(module, Exception):
            raise module
        return module

    return load


def _names(finds: Iterable[Found]) -> list[str]:
    return [functions.name for found in finds for functions in found.functions]


class TestTheSearch:
    def test_the_best_comes_first(self) -> None:
        load = _loader(flash_attn=module_2(), flash_attn_interface=module_3(), varlen=module_varlen())
        names = ["FlashAttention 3 (3.0.0)", "flash-attn 2.8.3", "flash-attn 2.8.3 (varlen)"]
        torchs = f"torch {torch.__version__}'s varlen_attn"
        assert _names(search((9, 0), load)) == [*names, torchs]
        assert _names(search((8, 6), load)) == [*names[1:], torchs]

    @pytest.mark.parametrize(
        ("module", "reason"),
        [
            (ModuleNotFoundError("x", name="flash_attn"), "flash-attn 2 is not installed"),
            (ModuleNotFoundError("x", name="einops"), "flash-attn 2 is not installed (no einops)"),
            (ImportError("undefined symbol: _ZN3c10"), "flash-attn 2 cannot be imported: undefined symbol: _ZN3c10"),
            (SimpleNamespace(), "flash-attn 2 has no functions here that take page tables"),
            (SimpleNamespace(flash_attn_varlen_func=lambda q, k, v: q), "flash-attn 2 has no functions here"),
        ],
    )
    def test_what_is_missing_is_said(self, module: object, reason: str) -> None:
        flash_2, varlen = search((8, 0), _loader(flash_attn=module))
        assert flash_2.functions == varlen.functions == ()
        assert str(flash_2.missing).startswith(reason)
        assert varlen.missing == "torch's varlen_attn has no functions here that take page tables"

    def test_functions_are_tried_once_for_layers_that_are_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[LayerSpec] = []

        def counted(functions: FlashFunctions, spec: LayerSpec, *others: Any) -> None:
            calls.append(spec)

        monkeypatch.setattr(cuda, "_fault", cache(counted))
        load = _loader(flash_attn=module_2())
        for _ in range(2):  # as for two groups of layers
            specs = [PLAIN, replace(PLAIN, index=1), replace(GEMMA, index=2)]
            choose(CPU, torch.bfloat16, specs, None, search((8, 0), load))
        assert calls == [PLAIN, GEMMA]

    def test_old_devices_have_none(self) -> None:
        (found,) = search((7, 5), _loader(flash_attn=module_2()))
        assert found == Found((), "flash attention needs compute capability 8.0, and this device has 7.5")

    def test_nothing_is_imported_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def imports(name: str) -> None:
            raise AssertionError(f"{name} was imported")

        monkeypatch.setattr(importlib, "import_module", imports)
        assert [*find_functions(CPU), *find_functions(torch.device("mps"))] == []

    def test_what_is_not_needed_is_not_imported(self) -> None:
        load = _loader(flash_attn=module_2(), varlen=AssertionError("imported"))
        choice = choose(CPU, torch.bfloat16, [PLAIN], None, search((8, 0), load))
        assert choice.backend.name == "flash-attn 2.8.3"

    def test_the_installed_varlen_attn_has_the_names_that_are_used(self) -> None:
        """Read, not imported: that takes seconds."""
        source = next(iter(importlib.util.find_spec("torch.nn.attention").submodule_search_locations))  # type: ignore
        defined = ast.parse((Path(source) / "varlen.py").read_text()).body
        function = next(d for d in defined if isinstance(d, ast.FunctionDef) and d.name == "varlen_attn")
        names = [argument.arg for argument in function.args.args]
        stand_in_names = list(inspect.signature(module_varlen().varlen_attn).parameters)
        assert names == stand_in_names[: len(names)]
        if torch.__version__ >= "2.12":
            assert {argument.arg for argument in function.args.kwonlyargs} == set(stand_in_names[len(names) :])


class TestTheChoice:
    SPECS = (PLAIN, replace(PLAIN, index=1, has_sinks=True), replace(PLAIN, index=2), replace(PLAIN, index=3))

    def test_the_first_that_serves_all_layers(self) -> None:
        found = [Found((stand_in("FlashAttention 3"),)), Found((stand_in("flash-attn 2"),))]
        choice = choose(CPU, torch.bfloat16, [PLAIN], None, found)
        assert isinstance(choice.backend, CudaPagedAttention)
        assert (choice.backend.page_size, choice.backend.in_graphs) == (16, True)
        note = "attention runs in FlashAttention 3 (3.0.0), in pages of 16 tokens"
        assert choice.notes == ((logging.INFO, note),)

    def test_a_page_size_that_is_asked_for_passes_some_over(self) -> None:
        found = [Found((stand_in("FlashAttention 3"),)), Found((stand_in("flash-attn 2"),))]
        choice = choose(CPU, torch.bfloat16, [PLAIN], 512, found)
        assert choice.backend.name == "flash-attn 2.8.3"
        note = "in pages of 512 tokens (FlashAttention 3 (3.0.0): it takes pages of a multiple of 16 tokens, 48 at most"
        assert note in choice.notes[0][1]
        plain = choose(CPU, torch.bfloat16, [PLAIN], 100, found)
        assert isinstance(plain.backend, TorchPagedAttention)
        assert "flash-attn 2.8.3: it takes pages of a multiple of 256 tokens, not of 100" in plain.notes[0][1]

    def test_float32_runs_in_plain_torch(self) -> None:
        choice = choose(CPU, torch.float32, [PLAIN], None, [Found((stand_in("flash-attn 2"),))])
        assert isinstance(choice.backend, TorchPagedAttention)
        why = "attention runs in plain torch on cpu: flash-attn 2.8.3: it does not compute in float32"
        assert choice.notes == ((logging.INFO, why),)

    def test_a_layer_that_is_refused_runs_in_plain_torch(self) -> None:
        specs = (*self.SPECS[:3], replace(GPT_OSS, index=4), replace(PLAIN, index=5, head_dim=12, value_dim=12))
        choice = choose(CPU, torch.bfloat16, specs, None, [Found((stand_in("flash-attn 2"),))])
        assert isinstance(choice.backend, CudaPagedAttention)
        assert not choice.backend.in_graphs
        assert choice.notes[1] == (
            logging.WARNING,
            "plain torch computes the attention of layers 1, 4: it has no attention sinks; "
            "layer 5: it takes heads of a multiple of 8 up to 256, not of 12",
        )

    def test_more_layers_win_over_a_better_name(self) -> None:
        capped = [replace(PLAIN, index=index, softcap=30.0) for index in range(2)]
        found = [Found((stand_in("varlen_attn"), stand_in("flash-attn 2")))]
        choice = choose(CPU, torch.bfloat16, [*capped, replace(PLAIN, index=2)], None, found)
        assert choice.backend.name == "flash-attn 2.8.3"

    def test_functions_that_wait_are_passed_over(self) -> None:
        found = search((8, 0), _loader(flash_attn=module_2(waits=True)))
        choice = choose(CPU, torch.bfloat16, [PLAIN], None, found)
        assert choice.backend.name == "flash-attn 2.8.3 (varlen)"
        assert "flash-attn 2.8.3: it makes the host wait for the device" in choice.notes[0][1]

    def test_each_layer_goes_its_own_way_over_the_same_pages(self) -> None:
        generator = torch.Generator().manual_seed(3)
        story, sinks = make_story(GPT_OSS, 300, generator), make_sinks(GPT_OSS, generator)
        backend = CudaPagedAttention(stand_in("flash-attn 2", exact=True), refused=[1])
        for spec, own in ((replace(GPT_OSS, has_sinks=False), None), (replace(GPT_OSS, index=1), sinks)):
            pages = pool(backend, spec, 256, torch.float32)
            found = run_all(pages, [story], [[(0, 0, 200)], [(0, 200, 299)], [(0, 299, 300)]], own)[0]
            assert_close(found, dense(spec, story, own))

    def test_other_devices_run_in_plain_torch(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            backend = choose_backend("meta", torch.bfloat16, [PLAIN])
        assert isinstance(backend, TorchPagedAttention)
        assert caplog.messages == ["attention runs in plain torch on meta"]
