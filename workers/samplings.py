"""The sampling parameters of requests, each with a seed.

Most requests of a batch ask for the same but for their seeds. What was checked once is remembered by its own JSON, in
which 1, 1.0 and true are three values.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import TYPE_CHECKING

import orjson

from batchjobs.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from batchjobs.types import Request

_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 4096
_SEED_BYTES = 6
_NAMES = frozenset(field.name for field in fields(SamplingParams)) - {"seed"}


class Samplings:
    """For one thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, SamplingParams] = {}

    def of(self, request: Request, batch_id: str) -> SamplingParams:
        """What the request asks for. One without a seed gets one that belongs to this very request, the same on every
        worker.

        Raises:
            InvalidParameter: Of a stored request, which was checked, none should.
        """
        body = request.body
        seed = body.get("seed")
        if seed is None:
            seed = own_seed(batch_id, request.index)
        elif type(seed) is not int:
            return SamplingParams.from_fields(body)
        return self._without_seed(body).with_seed(seed)

    def _without_seed(self, body: Mapping[str, Any]) -> SamplingParams:
        asked = {name: value for name, value in body.items() if name in _NAMES}
        key = orjson.dumps(asked)
        known = self._known.get(key)
        if known is None:
            known = SamplingParams.from_fields(asked)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            if len(key) <= _MAX_REMEMBERED_BYTES:
                self._known[key] = known
        return known


def own_seed(batch_id: str, index: int) -> int:
    digest = hashlib.blake2b(f"{batch_id}/{index}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest)
