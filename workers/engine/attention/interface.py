"""What the engine asks of an attention backend, and the plain data that crosses that border.

Kept true here:
- One step is one packed row of T tokens, cut into sequences by `PackedRows.starts`. A row sees only its own sequence.
- Position p of a sequence lives in page `tables[s, p // page_size]`, slot `p % page_size`, in every layer.
- Page 0 is the null page. No sequence ever owns it, so unused table entries may point at it.
- Pages are handed on without being cleared: slots past a sequence's last position hold whatever an earlier owner left
  there, NaN included. A backend never lets such a slot reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer's shapes and arithmetic, found by a probe forward."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values and of the output
    scaling: float
    sliding_window: int | None = None  # positions a row sees, itself included; None sees all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    has_sinks: bool = False  # one learned logit a head takes part in the softmax and is dropped

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        if min(sizes) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"layer {self.index}: {self.num_heads} heads over {self.num_kv_heads} key/value heads of size "
                f"{self.head_dim}/{self.value_dim} cannot be grouped"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"layer {self.index}: a sliding window of {self.sliding_window} lets a row see nothing")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"layer {self.index}: scores cannot be capped at {self.softcap}")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One step's rows, shared by all layers of the same page geometry.

    Sequence s owns rows `starts[s]:starts[s + 1]`; their positions are `cached[s]`, `cached[s] + 1`, … A sequence may
    have no row in this step. `tables[s]` names the page of every position that one of its rows sees, up to its last
    row's; entries before them (behind the window of these layers) and after them are unused (0). No page is written by
    two sequences in one step.
    """

    starts: NDArray[np.int32]  # [S + 1]
    cached: NDArray[np.int32]  # [S]
    tables: NDArray[np.int32]  # [S, max_pages]
    page_size: int

    @property
    def num_rows(self) -> int:
        """T: rows of all sequences together."""
        return int(self.starts[-1])


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages. The layout is the backend's own; only the first axis, the page id, is common to all."""

    keys: torch.Tensor
    values: torch.Tensor


class AttentionBackend(Protocol):
    """Attention over paged keys and values for one packed step at a time.

    `host_arrays` and `begin` once a step, then `attend` once a layer, all from one thread.
    """

    name: str
    page_size: int  # tokens of a page where nobody asks for another size

    def allocate(
        self, spec: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        """Make a layer's pages; page 0 is the null page and counts among `num_pages`."""
        ...

    def host_arrays(self, rows: PackedRows) -> list[NDArray[Any]]:
        """What it needs on the device in this step: copied there with the step's other arrays, all in one."""
        ...

    def begin(self, rows: PackedRows, arrays: Sequence[torch.Tensor] = ()) -> None:
        """Precompute what the layers of this step share. ``arrays`` are those of `host_arrays`, on the device."""
        ...

    def attend(
        self,
        spec: LayerSpec,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values into their pages, then attend.

        query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv], any strides; sinks [Hq] -> [1, T, Hq, Dv],
        contiguous, in the query's dtype. A row at position p sees positions max(0, p - window + 1) .. p of its own
        sequence.
        """
        ...
