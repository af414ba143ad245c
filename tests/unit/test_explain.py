"""Pictures of packed steps: what is told is what happened, and what is drawn is what attention sees."""

from __future__ import annotations

import io
from itertools import count

import numpy as np
import pytest
import torch
from rich.console import Console

from batchjobs.types import SamplingParams
from tests.support.step_script import Script, told, view
from workers.engine.attention.interface import LayerSpec, PackedRows
from workers.engine.attention.torch_paged import TorchPagedAttention
from workers.engine.requests import EngineRequest
from workers.engine.sequence import Sequence
from workers.explain import explain
from workers.grid import MAX_LINES, Grid
from workers.step_log import Gauges, Part, Step, Traced, chapters

# ------------------------------------------------------------------------------------------------------- pictures


def test_a_whole_story_is_told_as_it_was() -> None:
    """Prefill, a chunk, decode beside prefill, an end, a slot used again, a prefix found, and steps that only go on."""
    log = Script({"abc": "def.", "ghijklmn": "opqrst", "ghijklmx": "yz"}).run()
    assert (
        told(log)
        == """\
Rows are tokens, columns keys: ■ is a key that the row sees, a number counts earlier ones.

step 1: 8 rows, 8 prefill
  slot 0: admitted A (<abc>), 3 prompt tokens
  slot 1: admitted B (<ghijklmn>), 8 prompt tokens
  row  position   token             A   B
    0         0 A "a"               ■·· ·····
    1         1 A "b"               ■■· ·····
    2         2 A "c"               ■■■ ·····  → "d"
    3         0 B "g"               ··· ■····
    4         1 B "h"               ··· ■■···
    5         2 B "i"               ··· ■■■··
    6         3 B "j"               ··· ■■■■·
    7         4 B "k"               ··· ■■■■■
  pages: A 1, B 2 3

step 2: 4 rows, 1 decode, 3 prefill
  row  position   token             A  B
    0         3 A "d"               3■ ····  → "e"
    1         5 B "l"               ·· 5■··
    2         6 B "m"               ·· 5■■·
    3         7 B "n"               ·· 5■■■  → "o"
  pages: A 1, B 2 3

step 3: 2 rows, 2 decode
  row  position   token             A  B
    0         4 A "e"               4■ ··  → "f"
    1         8 B "o"               ·· 8■  → "p"
  pages: A 1 4, B 2 3 5

step 4: 2 rows, 2 decode
  row  position   token             A  B
    0         5 A "f"               5■ ··  → "."
    1         9 B "p"               ·· 9■  → "q"
  pages: A 1 4, B 2 3 5
  slot 0: A left after 4 tokens (stop); free

step 5: 5 rows, 1 decode, 4 prefill
  slot 0: admitted C (<ghijklmx>), 4 of 8 prompt tokens found in the cache; A had it before
  row  position   token             B   C
    0        10 B "q"               10■ ·····  → "r"
    1         4 C "k"               ··· 4■···
    2         5 C "l"               ··· 4■■··
    3         6 C "m"               ··· 4■■■·
    4         7 C "x"               ··· 4■■■■  → "y"
  pages: B 2 3 5, C 2 4

step 6: 2 rows, 2 decode
  row  position   token             B   C
    0        11 B "r"               11■ ··  → "s"
    1         8 C "y"               ··· 8■  → "z"
  pages: B 2 3 5, C 2 4 6
  slot 0: C left after 2 tokens (length); free

step 7: 1 row, 1 decode
  row  position   token             B
    0        12 B "s"               12■  → "t"
  pages: B 2 3 5 6
  slot 1: B left after 6 tokens (length); free"""
    )


def test_steps_that_only_go_on_take_a_line_a_sequence() -> None:
    log = Script({"abc": "defghijk", "lm": "nopqrstu"}).run()
    assert [(first.number, [s.number for s in more]) for first, more in chapters(log.steps)] == [
        (1, []),
        (2, [3, 4, 5, 6, 7]),
        (8, []),
    ]
    assert '\nsteps 3 to 7: 2 rows, one more token each\n  A → "f" "g" "h" "i" "j"\n  B → "p"' in told(log)
    short = told(log, pictures=1)
    assert short.endswith("\n7 more steps not shown")
    assert "step 2" not in short


@pytest.mark.parametrize(
    ("host", "fate", "back"),
    [
        (
            0,
            "given up",
            """\
step 9: 5 rows, 2 decode, 3 prefill, 4 computed before
  slot 0: B goes on with 4 of 9 tokens (4 found in the cache); A had it before
  row  position   token             B
    0         4 B "E"               4■····
    1         5 B "F"               4■■···
    2         6 B "G"               4■■■··
    3         7 B "H"               4■■■■·
    4         8 B "I"               4■■■■■  → "J"
""",
        ),
        (
            20,
            "offloaded to CPU memory",
            """\
step 9: 1 row, 1 decode
  slot 0: B goes on with 8 of 9 tokens (4 found in the cache, 4 from CPU memory); A had it before
  row  position   token             B
    0         8 B "I"               8■  → "J"
""",
        ),
    ],
)
def test_a_sequence_that_gives_way_and_comes_back(host: int, fate: str, back: str) -> None:
    story = told(Script({"abcdefg": "hijklmno", "ABCDEFG": "HIJKLMNO"}, pages=6, host=host, rows=16).run())
    assert f"\nstep 3: 1 row, 1 decode\n  slot 1: B preempted, the pages of its 8 tokens {fate}; free\n" in story
    assert back in story
    assert "\n  slot 0: B left after 8 tokens (length); free" in story
    assert story.count("admitted") == 2  # it is the same sequence when it comes back


def test_a_row_whose_input_was_not_known_when_it_was_planned_shows_it_all_the_same() -> None:
    """With async batching; and a row for a sequence that had ended by then is said to be dropped."""
    log = Script({"ab": "c.", "de": "fghi"}, depth=2, limits={"ab": 9}).run()
    story = told(log)
    assert '    0         2 A "c"               2■ ··  → "."\n' in story
    assert story.count("A left after 2 tokens (stop); free") == 1
    assert (
        '    0         3 A "."               3■ ··  → dropped\n    1         3 B "g"               ·· 3■  → "h"'
        in story
    )
    assert "?" not in story


def test_control_characters_and_wide_ones_keep_the_columns() -> None:
    story = told(Script({"\x1b\u202e漢\u2014": "\n"}).run())
    assert '    0         0 A "\\x1b"            ■···\n' in story
    assert '    1         1 A "\\u202e"          ■■··\n' in story
    assert '    2         2 A "漢"              ■■■·\n' in story
    assert '    3         3 A e2 80             ■■■■  → "\\n"\n' in story
    assert "admitted A (<\\x1b\\u202e漢\u2014>)" in story


def test_a_stream_without_these_characters_gets_plain_ones() -> None:
    story = told(Script({"漢a": "b"}).run(), view(encoding="ascii"))
    assert story.isascii()
    assert '    0         0 A "\\u6f22"          #.\n    1         1 A "a"               ##  -> "b"\n' in story


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Script({"ab": "c"}).run()

    def printed(terminal: bool, **environment: str) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ=environment)
        for line in explain(log, view(), pictures=9):
            console.print(line, soft_wrap=True)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "\x1b[36m" in printed(True, TERM="xterm")
    assert "\x1b[36m" not in printed(True, TERM="xterm", NO_COLOR="1")
    assert printed(False) == told(log) + "\n"


# --------------------------------------------------------------------------------------------------- what is seen


def by_hand(counts: list[tuple[int, int]], page_size: int = 4) -> Step:
    """A step in which sequence i has ``cached`` keys and ``new`` rows."""
    starts = np.cumsum([0, *(new for _, new in counts)], dtype=np.int32)
    cached = np.array([cached for cached, _ in counts], np.int32)
    needs = [-(-sum(pair) // page_size) for pair in counts]
    tables = np.zeros((len(counts), max(needs)), np.int32)
    free = count(1)
    for index, need in enumerate(needs):
        tables[index, :need] = [next(free) for _ in range(need)]
    parts = []
    for index, (first, new) in enumerate(counts):
        request = EngineRequest(index, (65,) * (first + new), SamplingParams())
        sequence = Sequence(request, limit=4, seed=0, stop_ids=frozenset())
        label = chr(ord("A") + index % 26)
        parts.append(Part(Traced(label, sequence), first, new, index, new, 0, samples=True))
    return Step(1, parts, (0.0, 1.0), Gauges(0, 0, 0), [], [PackedRows(starts, cached, tables, page_size)])


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_the_grid_shows_what_attention_really_sees(window: int | None) -> None:
    """Equal scores and a one-hot value for each position: a row's output is above 0 where it sees something."""
    counts = [(5, 4), (0, 6), (9, 1), (3, 2)]
    step, length = by_hand(counts), 16
    spec = LayerSpec(0, 1, 1, 4, length, 1.0, sliding_window=window)
    backend = TorchPagedAttention()
    cache = backend.allocate(spec, 40, 4, torch.float32, "cpu")

    def attend(rows: PackedRows) -> torch.Tensor:
        spans = zip(rows.starts[1:] - rows.starts[:-1], rows.cached, strict=True)
        positions = torch.cat([torch.arange(int(new)) + int(first) for new, first in spans])
        zeros = torch.zeros(1, 1, len(positions), 4)
        backend.begin(rows)
        return backend.attend(spec, cache, zeros, zeros, torch.eye(length)[positions][None, None])[0, :, 0]

    rows = step.rows[0]
    earlier = np.concatenate(([0], np.cumsum(rows.cached))).astype(np.int32)
    attend(PackedRows(earlier, np.zeros(len(counts), np.int32), rows.tables, 4))
    seen = attend(rows) > 0  # [T, length]
    grid = Grid(step, view(windows=(window,)))
    for index, (cached, new) in enumerate(counts):
        for offset in range(new):
            row = seen[int(rows.starts[index]) + offset].tolist()
            assert grid.cached_seen(index, offset) == sum(row[:cached])
            drawn = [grid.mark(index, offset, key) == "■" for key in range(new)]
            assert drawn == row[cached : cached + new]


def test_layers_with_another_window_have_a_mark_of_their_own() -> None:
    lines = [line.plain for line in Grid(by_hand([(3, 4)]), view(windows=(None, 2))).lines()]
    assert [line.split('"')[-1].split()[0] for line in lines[1:]] == ["3■···", "3■■··", "3□■■·", "3□□■■"]
    story = told(Script({"abcd": "e"}).run(), view(windows=(None, 2)))
    assert "\n□ is seen only by the layers with the wider window.\n" in story


@pytest.mark.parametrize(
    "counts",
    [[(100, 1)] * 64, [(0, 500)], [(1234, 1)] * 30 + [(4000, 800)], [(99999, 300), (88888, 300)], [(0, 25)] * 2],
)
def test_a_large_step_fits_and_says_what_is_left_out(counts: list[tuple[int, int]]) -> None:
    grid = Grid(by_hand(counts), view())
    lines = [line.plain for line in grid.lines()]
    assert max(map(len, lines)) <= 100
    assert len(lines) <= MAX_LINES + 1
    gaps = [line.split() for line in lines[1:] if line.startswith("    …")]
    assert gaps
    hidden = sum(int(w[-2]) if "with" in w else int(w[1]) for w in gaps)
    assert len(lines) - 1 - len(gaps) + hidden == sum(new for _, new in counts)


def test_rows_behind_a_gap_say_whether_they_see_what_is_left_out() -> None:
    lines = [line.plain for line in Grid(by_hand([(0, 40)]), view()).lines()]
    assert [line.rstrip() for line in lines] == [
        "  row  position   token             A",
        '    0         0 A "A"               ■······',
        '    1         1 A "A"               ■■·····',
        '    2         2 A "A"               ■■■····',
        '    3         3 A "A"               ■■■■···',
        "    … 34 more rows of A",
        '   38        38 A "A"               ■■■■…■·',
        '   39        39 A "A"               ■■■■…■■  → ?',
    ]


def test_of_many_sequences_that_come_and_go_at_once_the_first_are_named() -> None:
    log = Script({f"{index:03}": "x" for index in range(40)}, pages=99, rows=200, slots=64).run()
    story = told(log)
    assert story.count(": admitted ") == 11
    assert story.count(" left after ") == 11
    assert story.count("  … 29 more sequences came, gave way or left") == 2
    assert max(map(len, story.splitlines())) <= 100
