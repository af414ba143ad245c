"""How ``compare.py`` talks to a peer: one JSON object a line, commands on stdin and answers on stdout.

A peer runs in an environment of its own, so this file needs nothing but Python. It loads its model once, says that it
is ready, and then runs work whenever it is told to; between two runs it waits. What libraries print goes to stderr.

| command | answer |
| --- | --- |
| first line: the options | ``{"ready": true, "versions": {...}, "settings": {...}}`` |
| ``{"work": [[[ids], tokens], ...]}`` | ``{"seconds": s, "made": [tokens, ...]}`` |

The files are called ``..._peer.py``: a script ``vllm.py`` would hide the package of that name from itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Work = Sequence[tuple[list[int], int]]
"""Of each request the ids of its prompt, and how many tokens are to be made."""


class Peer(Protocol):
    """``versions`` and ``settings`` stand in the report. ``run`` makes the tokens; seconds, and tokens by request."""

    versions: dict[str, str]
    settings: dict[str, Any]

    def run(self, work: Work) -> tuple[float, list[int]]: ...


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Loads the peer with the options of the first line, and answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        peer = load(json.loads(sys.stdin.readline()))
        answer(ready=True, versions=peer.versions, settings=peer.settings)
        for line in sys.stdin:
            seconds, made = peer.run([(ids, tokens) for ids, tokens in json.loads(line)["work"]])
            answer(seconds=seconds, made=made)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}"[:2000])
        raise
