"""One packed step as a grid: rows are its tokens, columns the keys that each of them may see.

What a row sees is computed from the step's packed rows and the windows of the layers, as a backend does it: a row at
position p sees positions ``max(0, p - window + 1)`` to p of its own sequence. Keys of earlier steps, which lie in the
sequence's pages, are counted; those of this step are drawn one by one. A grid that is too large leaves out the middle
of long chunks, and then sequences, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from batchjobs.text import plural, visible

if TYPE_CHECKING:
    from workers.engine.text import Vocabulary
    from workers.step_log import Part, Step, Traced

MIN_WIDTH, WIDTH = 80, 100
MAX_LINES = 24
MAX_CHUNK, HEAD, TAIL = 8, 4, 2  # a longer chunk shows its first and last rows, where not all of it fits
TOKEN_CELLS = 16
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters of a picture. ``wide``: seen by the layers with the wider windows only."""

    seen: str
    wide: str
    unseen: str
    more: str
    gives: str


UNICODE, ASCII = Marks("■", "□", "·", "…", "→"), Marks("#", "+", ".", "~", "->")


@dataclass(frozen=True, slots=True)
class View:
    """How to draw. ``windows`` are those of the layers, by group; ``encoding`` is that of the stream."""

    vocabulary: Vocabulary
    windows: Sequence[int | None]
    encoding: str = "utf-8"
    width: int = WIDTH

    @property
    def marks(self) -> Marks:
        try:
            "".join((UNICODE.seen, UNICODE.wide, UNICODE.unseen, UNICODE.more, UNICODE.gives)).encode(self.encoding)
        except UnicodeError:
            return ASCII
        return UNICODE

    def safe(self, text: str) -> str:
        """With escapes for what a terminal must not obey, and for what the stream does not have."""
        return visible(text).encode(self.encoding, "backslashreplace").decode(self.encoding)

    def cut(self, text: str, cells: int) -> str:
        if cell_len(text) <= cells:
            return text
        return set_cell_size(text, cells - 1).rstrip() + self.marks.more

    def token(self, token: int | None) -> str:
        """Quoted, because blanks count; bytes in hex; the id where there is no text; ? for one that never came."""
        if token is None:
            return "?"
        text = self.vocabulary.text(token)
        if not isinstance(text, str):
            return self.cut(" ".join(f"{byte:02x}" for byte in text), TOKEN_CELLS)
        return self.cut(f'"{self.safe(text)}"', TOKEN_CELLS) if text else f"#{token}"


def colour(who: Traced) -> str:
    """Every sequence keeps its own."""
    return COLOURS[(ord(who.label[-1]) - ord("A")) % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one sequence. ``offsets`` are those shown, None stands for the ones left out between them."""

    index: int  # in the plan
    part: Part
    offsets: Sequence[int | None]
    cached_cells: int  # width of the column that counts earlier keys, 0 without one

    @property
    def cells(self) -> int:
        return self.cached_cells + len(self.offsets)

    @property
    def lines(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class Rest:
    """Sequences that are left out."""

    parts: Sequence[Part]
    cells = 1
    lines = 1


Blocks: TypeAlias = list[Block | Rest]


class Grid:
    """The picture of one step, of which the packed rows were kept."""

    def __init__(self, step: Step, view: View) -> None:
        self.step, self.view = step, view
        self._rows = step.rows[0]  # groups of layers differ in their pages and windows only
        self._label_cells = max(len(part.who.label) for part in step.parts)
        self._blocks = self._fitting()

    def lines(self) -> Iterator[Text]:
        """Every line at most as wide as the view."""
        yield self._heading()
        for block in self._blocks:
            if isinstance(block, Rest):
                rows = plural(sum(part.count for part in block.parts), "row")
                yield self._gap(f"{plural(len(block.parts), 'more sequence')} with {rows}", "dim")
                continue
            for offset in block.offsets:
                if offset is None:
                    hidden = block.part.count - HEAD - TAIL
                    yield self._gap(f"{plural(hidden, 'more row')} of {block.part.who.label}", colour(block.part.who))
                else:
                    yield self._line(block, offset)

    # What is seen

    def cached_seen(self, index: int, offset: int) -> int:
        """How many keys of earlier steps the row sees, in the layers that see most."""
        return max(0, int(self._rows.cached[index]) - min(self._firsts(index, offset)))

    def mark(self, index: int, offset: int, key: int) -> str:
        """Whether row ``offset`` of a sequence sees the key of its row ``key``."""
        position = int(self._rows.cached[index]) + key
        sees = [key <= offset and first <= position for first in self._firsts(index, offset)]
        return self.view.marks.seen if all(sees) else self.view.marks.wide if any(sees) else self.view.marks.unseen

    def _firsts(self, index: int, offset: int) -> list[int]:
        """The first position that the row sees, by group of layers."""
        position = int(self._rows.cached[index]) + offset
        return [0 if window is None else max(0, position - window + 1) for window in self.view.windows]

    # What fits

    def _fitting(self) -> Blocks:
        counts = [int(count) for count in self._rows.starts[1:] - self._rows.starts[:-1]]
        whole: Blocks = [self._block(index, range(count)) for index, count in enumerate(counts)]
        if self._fits(whole):
            return whole
        whole = [self._block(index, _ends(count)) for index, count in enumerate(counts)]
        blocks, last = whole, len(whole) - 1
        kept = last
        while not self._fits(blocks) and kept > 1:
            kept -= 1
            blocks = [*whole[:kept], Rest(self.step.parts[kept:last]), whole[last]]
        return blocks

    def _fits(self, blocks: Blocks) -> bool:
        room = self.view.width - len(self._start("", "", "", "")) - len(f"  {self.view.marks.gives} ") - TOKEN_CELLS
        return sum(b.lines for b in blocks) <= MAX_LINES and sum(b.cells + 1 for b in blocks) <= room

    def _block(self, index: int, offsets: Sequence[int | None]) -> Block:
        most = max(self.cached_seen(index, offset) for offset in offsets if offset is not None)
        return Block(index, self.step.parts[index], offsets, len(str(most)) if most else 0)

    # Lines

    def _start(self, row: int | str, position: int | str, label: str, token: str) -> str:
        return f"{row:>5}{position:>10} {label:>{self._label_cells}} {set_cell_size(token, TOKEN_CELLS)} "

    def _heading(self) -> Text:
        line = Text(self._start("row", "position", "", "token"), "dim")
        for block in self._blocks:
            name = self.view.marks.more if isinstance(block, Rest) else block.part.who.label
            line.append(f" {name:<{block.cells}}", "dim" if isinstance(block, Rest) else colour(block.part.who))
        line.rstrip()
        return line

    def _line(self, block: Block, offset: int) -> Text:
        part, style = block.part, colour(block.part.who)
        row = int(self._rows.starts[block.index]) + offset
        position = int(self._rows.cached[block.index]) + offset
        line = Text(self._start(row, position, part.who.label, self.view.token(part.who.token(position))), style)
        for other in self._blocks:
            if other is block:
                line.append(f" {self._own_cells(block, offset)}", style)
            else:
                line.append(f" {self.view.marks.unseen * other.cells}", "dim")
        if part.samples and offset == part.count - 1:
            token = "dropped" if self.step.is_dropped(part) else self.view.token(part.sampled)
            line.append(f"  {self.view.marks.gives} {token}", style)
        return line

    def _own_cells(self, block: Block, offset: int) -> str:
        """The row's marks in the columns of its own sequence."""
        cells = f"{self.cached_seen(block.index, offset):>{block.cached_cells}}" if block.cached_cells else ""
        for key in block.offsets:
            if key is not None:
                cells += self.mark(block.index, offset, key)
            else:  # of the keys left out the last one is the nearest
                sees = self.mark(block.index, offset, block.part.count - TAIL - 1) != self.view.marks.unseen
                cells += self.view.marks.more if sees else self.view.marks.unseen
        return cells

    def _gap(self, what: str, style: str) -> Text:
        return Text(f"{self.view.marks.more:>5} {what}", style)


def _ends(count: int) -> Sequence[int | None]:
    return range(count) if count <= MAX_CHUNK else [*range(HEAD), None, *range(count - TAIL, count)]
