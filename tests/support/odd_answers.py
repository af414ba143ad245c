"""A batch with one answer of each odd kind, for whatever reads results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchjobs.types import (
    Completion,
    Endpoint,
    FinishReason,
    PromptScores,
    Request,
    RequestStatus,
    ShardId,
    VersionSpan,
)
from tests.support.batches import FOREVER, answer, create, failure

if TYPE_CHECKING:
    from batchjobs.store import Store

ODD = 'Ωmega ☃ 𝄞 "quoted", =1+1\r\nend\rof\u2028line\x85\ttab\x1b[31m'
"""Whatever a reader of lines, of cells or a terminal may stumble over."""
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)")
UNEVEN = ("a", (0xF0, 0x9F), (0x8E, 0x89), "", "é")
"""Tokens, some of which are no text alone."""
SPANS = (
    VersionSpan(version="sha256:aa", from_token=0, worker="w1", attempt=1),
    VersionSpan(version="sha256:bb", from_token=2, worker="w2", attempt=2),
)
SCORES = PromptScores(
    token_ids=(72, 105), tokens=("H", "i"), logprobs=(None, -0.75), top_logprobs=(None, ((105, -0.75, "i"),))
)
ENDED = 10
"""Requests that have ended; one more is still queued."""


def odd_batch(store: Store, source: str | None = None) -> str:
    """The id of a batch that runs: an odd text, odd tokens, three choices, a failed and a cancelled request, a scored
    prompt, four texts that look like formulas, and one request without an outcome."""
    batch_id = create(store, shard_size=ENDED, source=source)
    names = [ODD.replace("\x85", ""), "uneven", "three", "bad", "stopped", "scored", *FORMULAS, "late"]
    requests = [
        Request(
            index=index,
            custom_id=name,
            endpoint=Endpoint.CHAT if name == "uneven" else Endpoint.COMPLETIONS,
            body={"prompt": name, "max_tokens": 8, "logprobs": 2, "n": 3 if name == "three" else 1},
        )
        for index, name in enumerate(names)
    ]
    store.add_requests(batch_id, requests)
    store.open_batch(batch_id)
    [lease] = store.claim([ShardId(batch_id, 0)], "w1", FOREVER)
    store.record([(lease, made) for made in _outcomes()])
    return batch_id


def _outcomes() -> list[Completion]:
    return [
        answer(0, text=ODD),
        _uneven(1),
        *_three(2),
        failure(3, message=ODD),
        answer(4, text="par", status=RequestStatus.CANCELLED, finish_reason=FinishReason.CANCELLED),
        replace(answer(5, tokens=0, text="Hi", first_token_at=None), prompt_scores=SCORES),
        *(answer(6 + number, text=text) for number, text in enumerate(FORMULAS)),
    ]


def _uneven(index: int) -> Completion:
    top = ((7, -0.25, "a"), (8, float("nan"), (0xF0, 0x9F)))
    made = answer(
        index,
        tokens=len(UNEVEN),
        text="a🎉\0é",
        logprobs=(-0.25, float("nan"), float("-inf"), -1e-300, 0.0),
        top_logprobs=(top, top[:1], (), top, top),
    )
    return replace(made, tokens=UNEVEN)


def _three(index: int) -> list[Completion]:
    return [
        answer(index, text="red", version_spans=SPANS[:1]),
        replace(answer(index, tokens=5, text="green", finish_reason=FinishReason.LENGTH), choice=1),
        replace(answer(index, text="blue", version_spans=SPANS, model_version="sha256:bb"), choice=2),
    ]
