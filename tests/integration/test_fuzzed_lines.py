"""Whatever the parser of lines lets through, good or refused, both databases store and give back."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from batchjobs.jsonl import InvalidLineError, parse_line
from batchjobs.types import Endpoint, Request
from tests.fuzz.line_checks import written
from tests.fuzz.line_mutators import SEEDS, mutated
from tests.fuzz.line_mutators import written as line_of
from tests.support.batches import create

if TYPE_CHECKING:
    from batchjobs.errors import LineError
    from batchjobs.store import Store

LINES = 900


def drawn(seed: int) -> tuple[list[Request], dict[int, LineError]]:
    """Requests of mutated lines, the refused ones as failures, and their errors by index."""
    rng = Random(seed)
    corpus = [line_of(rng, line) for line in SEEDS]
    requests, errors = [], {}
    for index in range(LINES):
        try:
            made = parse_line(mutated(rng, corpus), index + 1, index)
        except InvalidLineError as refusal:
            errors[index] = refusal.error
            made = Request(index=index, custom_id="x", endpoint=Endpoint.COMPLETIONS, body={})
        requests.append(replace(made, custom_id=f"{index} {made.custom_id}"))
    return requests, errors


def test_mutated_lines_are_stored_as_they_were_understood(store: Store) -> None:
    requests, errors = drawn(seed=3)
    assert 100 < len(errors) < LINES - 100
    batch = create(store)
    store.add_requests(batch, requests, errors)
    store.open_batch(batch)
    found = list(store.results(batch))
    assert [row.request.custom_id for row in found] == [request.custom_id for request in requests]
    assert [written(row.request.body) for row in found] == [written(request.body) for request in requests]
    assert {row.request.index for row in found if row.state == "failed"} == set(errors)
    for row in found:
        if row.error is not None:
            assert row.error.message == str(errors[row.request.index])


def test_their_prompts_can_be_read_in_sql(store: Store) -> None:
    """The databases take the bodies apart themselves."""
    requests, errors = drawn(seed=4)
    batch = create(store)
    store.add_requests(batch, requests, errors)
    store.open_batch(batch)
    _, rows = store.select(f"SELECT \"index\", prompt FROM results WHERE batch_id = '{batch}'")
    prompts = {int(index): prompt for index, prompt in rows}
    for request in requests:
        if isinstance(prompt := request.body.get("prompt"), str):
            assert prompts[request.index] == prompt
