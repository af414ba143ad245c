"""Pure decode steps as recorded work: launching such a step takes the host longer than doing it takes a GPU.

A step in which every sequence has one row, all of them sample and none scores differs from others of its kind only in
its arrays. So for each size of a ladder the forward is recorded once over arrays at a fixed place, and the choice of
tokens for rows that take the most likely one. A step is padded to the next size, its arrays are copied to that place,
and the work is done again with one call.

What it keeps true:
- Recorded work reads the place of its arrays, the weights, the pages and each slot's last token, and nothing else.
- A padding row owns the null page and a slot that no sequence has, so it changes nothing that anybody reads, and its
  own results are dropped.
- Logits and tokens lie at fixed places too, which the next step overwrites.
- What cannot be recorded runs as any other step does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from workers.engine.attention.interface import PackedRows
from workers.engine.device_sampler import choose_greedy
from workers.engine.graph_maker import maker_of
from workers.engine.results import Chosen
from workers.engine.transfer import Layout

if TYPE_CHECKING:
    from workers.engine.attention.interface import AttentionBackend
    from workers.engine.batch import PackedBatch
    from workers.engine.device_path import DevicePath
    from workers.engine.graph_maker import GraphMaker, Replayable
    from workers.engine.transfer import Array

log = logging.getLogger(__name__)

Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids and positions [T] -> logits [T, V], in the dtype of the model."""

_INPUTS = 4  # arrays of one number a row: token, position, the slot that feeds it or -1, the slot of the token it makes


class RecordableBackend(Protocol):
    """An attention backend whose decode steps read nothing but the cache and the arrays that `begin` was given."""

    def decode_arrays(self, rows: PackedRows, size: int, width: int) -> list[Array]:
        """Those arrays of a pure decode step, padded to ``size`` sequences with tables of ``width`` pages. Shapes and
        dtypes follow from these two numbers alone."""
        ...

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """``most`` rows of a decode step, tables of ``width`` pages of ``page_size`` tokens, a vocabulary of ``tokens``."""

    most: int
    width: int
    page_size: int
    tokens: int


def ladder(most: int) -> list[int]:
    """Numbers of rows that are recorded, up to ``most``: dense where steps are short, a quarter apart further up."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return [*sizes, most]


def why_not(backends: Sequence[AttentionBackend]) -> str | None:
    """What speaks against recording steps with these backends."""
    names = sorted({backend.name for backend in backends if not getattr(backend, "in_graphs", False)})
    return f"attention by {', '.join(names)} cannot be recorded" if names else None


class DecodeGraphs:
    """The recorded decode steps of one model. They are recorded by :meth:`capture`, or when the first one comes."""

    def __init__(
        self,
        maker: GraphMaker,
        path: DevicePath,
        model: Model,
        backends: Sequence[RecordableBackend],
        last_tokens: torch.Tensor,
        sizes: Sizes,
    ) -> None:
        """``last_tokens`` [slots + 1]: each slot's last token, and one that belongs to nobody."""
        self._maker, self._model, self._backends, self._last_tokens = maker, model, backends, last_tokens
        self._sizes, self._device = sizes, path.device
        self._upload = path.upload()
        self._spare = len(last_tokens) - 1
        self._ladder = ladder(sizes.most)
        self._forwards: dict[int, Replayable] | None = None  # by size; None before they are recorded
        self._choices: dict[int, Replayable] = {}

    def takes(self, batch: PackedBatch) -> bool:
        """Whether a recorded step does what this one needs."""
        count = len(batch.input_ids)
        sequences = len(batch.rows[0].starts) - 1
        is_decode = count == sequences == len(batch.sampled_rows) and not len(batch.scored_rows)
        return is_decode and 0 < count <= self._ladder[-1] and self.capture()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """A step that :meth:`takes` approved: logits [R, V] float32, until the next one."""
        assert self._forwards is not None
        count = len(batch.input_ids)
        size = self._size(count)
        self._upload(self._arrays(batch, size), into=self._place)
        self._forwards[size].replay()
        return self._logits[:count]

    def made(self, logits: torch.Tensor) -> bool:
        """Whether these are the logits of the last recorded step, still at their place."""
        return bool(self._forwards) and logits.data_ptr() == self._logits.data_ptr()

    def choose(self, count: int) -> Chosen:
        """The most likely token of each of the last step's ``count`` rows, kept for the next step too."""
        self._choices[self._size(count)].replay()
        return Chosen(
            tokens=self._tokens[:count],
            logprobs=self._logprobs[:count],
            allowed=self._allowed[:count],
            tops=None,
            scores=self._logprobs[:0],
            score_tops=None,
        )

    def capture(self) -> bool:
        """Record the steps if that was not tried before. False where it failed: the log says why, once."""
        if self._forwards is None:
            started = time.monotonic()
            try:
                self._record_all()
            except Exception as error:  # noqa: BLE001  # whatever a model does, its steps can run without this
                self.release()
                reason = (str(error).splitlines() or [""])[0]
                log.warning("decode steps run without graphs: %s: %s", type(error).__name__, reason)
            else:
                seconds = time.monotonic() - started
                log.info("recorded decode steps of %s rows in %.1f s", ", ".join(map(str, self._ladder)), seconds)
        return bool(self._forwards)

    def release(self) -> None:
        """Let go of the recorded work and its memory. Nothing is recorded after that."""
        self._forwards, self._choices = {}, {}
        self._place = self._logits = self._tokens = self._logprobs = self._allowed = torch.empty(0)

    def _record_all(self) -> None:
        """The largest first: the others find room in what it took."""
        most, empty = self._ladder[-1], partial(torch.empty, device=self._device)
        self._place = empty(Layout.of(self._padding_arrays(most)).size, dtype=torch.uint8)
        self._logits = empty(most, self._sizes.tokens, dtype=torch.float32)
        self._tokens = empty(most, dtype=torch.long)
        self._logprobs, self._allowed = empty(most, dtype=torch.float32), empty(most, dtype=torch.bool)
        forwards: dict[int, Replayable] = {}
        for size in reversed(self._ladder):
            inputs, *others = self._upload(self._padding_arrays(size), into=self._place)
            forwards[size] = self._maker.capture(partial(self._run, size, inputs, others))
            self._choices[size] = self._maker.capture(partial(self._choose, size, inputs))
        self._forwards = forwards

    def _run(self, size: int, inputs: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """The forward of ``size`` rows, as it is recorded. ``inputs`` [4, size]."""
        ids, positions, fed, _ = inputs
        rows, each = self._padding(size), len(others) // len(self._backends)
        for number, backend in enumerate(self._backends):
            backend.begin(rows, others[number * each : (number + 1) * each])
        ids = torch.where(fed >= 0, self._last_tokens[fed.clamp(min=0)], ids)
        self._logits[:size].copy_(self._model(ids, positions))

    def _choose(self, size: int, inputs: torch.Tensor) -> None:
        tokens, logprobs, allowed = choose_greedy(self._logits[:size])
        self._last_tokens.index_copy_(0, inputs[3], tokens)
        self._tokens[:size].copy_(tokens)
        self._logprobs[:size].copy_(logprobs)
        self._allowed[:size].copy_(allowed)

    def _arrays(self, batch: PackedBatch, size: int) -> list[Array]:
        count = len(batch.input_ids)
        inputs = self._padding_inputs(size)
        inputs[0, :count], inputs[1, :count] = batch.input_ids, batch.positions
        inputs[2, batch.fed_rows] = batch.fed_slots
        inputs[3, :count] = batch.sampled_slots
        return [inputs, *self._tables(batch.rows, size)]

    def _padding_arrays(self, size: int) -> list[Array]:
        return [self._padding_inputs(size), *self._tables([self._padding(size)] * len(self._backends), size)]

    def _padding_inputs(self, size: int) -> Array:
        inputs = np.zeros((_INPUTS, size), np.int64)
        inputs[2], inputs[3] = -1, self._spare
        return inputs

    def _padding(self, size: int) -> PackedRows:
        """Sequences of one token each, in the null page."""
        tables = np.zeros((size, self._sizes.width), np.int32)
        return PackedRows(np.arange(size + 1, dtype=np.int32), np.zeros(size, np.int32), tables, self._sizes.page_size)

    def _tables(self, rows: Sequence[PackedRows], size: int) -> list[Array]:
        """What the backends need, one after the other; each needs as many arrays."""
        each = zip(self._backends, rows, strict=True)
        return [array for backend, own in each for array in backend.decode_arrays(own, size, self._sizes.width)]

    def _size(self, count: int) -> int:
        """The smallest that was recorded and holds so many rows."""
        return next(size for size in self._ladder if size >= count)


def decode_graphs(
    wanted: bool | None,
    path: DevicePath,
    model: Model,
    backends: Sequence[AttentionBackend],
    last_tokens: torch.Tensor,
    sizes: Sizes,
) -> DecodeGraphs | None:
    """None where they are not ``wanted``, or cannot be made; None for ``wanted`` means: where the device can."""
    if wanted is False:
        return None
    maker = maker_of(path.device)
    reason = f"{path.device} is no CUDA device" if maker is None else why_not(backends)
    if maker is not None and reason is None:
        return DecodeGraphs(maker, path, model, cast(Sequence[RecordableBackend], backends), last_tokens, sizes)
    if wanted or maker is not None:
        log.log(logging.WARNING if wanted else logging.INFO, "decode steps run without graphs: %s", reason)
    return None
