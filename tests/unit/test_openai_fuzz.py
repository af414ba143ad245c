"""Any result that the types allow becomes strict JSON lines with the right ids, lists of one length and offsets inside
the text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchjobs.echo import prompt_text
from batchjobs.openai_format import is_success, openai_line, text_offsets
from batchjobs.results import Result
from batchjobs.store import StoredResult
from batchjobs.types import (
    Completion,
    Endpoint,
    FinishReason,
    PromptScores,
    Request,
    RequestError,
    RequestStatus,
    VersionSpan,
)

texts = st.text(max_size=12) | st.sampled_from(["\U0001f600", "\u2028\u0085", '"\\\x1b', "e\u0301", "<|end|>", " a"])
token_texts = texts | st.binary(min_size=1, max_size=4).map(tuple) | st.sampled_from([(240, 159), (152, 128), ""])
logprobs = st.floats(max_value=0) | st.just(-math.inf) | st.just(math.nan)
ids = st.integers(0, 2**31 - 1)
moments = st.none() | st.integers(0, 10**6).map(lambda s: datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=s / 7))
tops = st.lists(st.tuples(ids, logprobs, token_texts), max_size=3).map(tuple)
labels = st.none() | texts


def lists_of(values: Any, length: int) -> Any:
    return st.lists(values, min_size=length, max_size=length).map(tuple)


@st.composite
def scores(draw: st.DrawFn) -> PromptScores:
    count = draw(st.integers(1, 3))
    return PromptScores(
        token_ids=draw(lists_of(ids, count)),
        tokens=draw(lists_of(token_texts, count)),
        logprobs=(None, *draw(lists_of(logprobs, count - 1))),
        top_logprobs=draw(st.none() | lists_of(tops, count - 1).map(lambda found: (None, *found))),
    )


@st.composite
def completions(draw: st.DrawFn, choice: int) -> Completion:
    count = draw(st.integers(0, 3))
    status = draw(st.sampled_from(list(RequestStatus)))
    tokens = draw(lists_of(token_texts, count))
    read = b"".join(token.encode() if isinstance(token, str) else bytes(token) for token in tokens)
    error = st.builds(RequestError, code=texts, message=texts)
    return Completion(
        index=3,
        choice=choice,
        status=status,
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        text=draw(texts | st.just(read.decode(errors="replace"))),
        prompt_tokens=draw(st.integers(0, 10**6)),
        cached_tokens=draw(st.integers(0, 10**6)),
        token_ids=draw(lists_of(ids, count)),
        tokens=tokens,
        logprobs=draw(lists_of(logprobs, count)),
        token_times=draw(lists_of(st.floats(0, 1e6), count)),
        top_logprobs=draw(st.none() | lists_of(tops, count)),
        model=draw(labels),
        model_version=draw(labels),
        version_spans=draw(
            st.just(()) | st.builds(VersionSpan, version=texts, from_token=st.just(0)).map(lambda s: (s,))
        ),
        worker=draw(labels),
        started_at=draw(moments),
        finished_at=draw(moments),
        error=draw(error if status is RequestStatus.FAILED else st.none() | error),
    )


@st.composite
def stored_results(draw: st.DrawFn) -> StoredResult:
    endpoint = draw(st.sampled_from(list(Endpoint)))
    body: dict[str, Any] = {"max_tokens": 9, "n": draw(st.integers(1, 3))}
    body |= draw(st.sampled_from([{}, {"logprobs": True}, {"logprobs": False}, {"logprobs": 0}, {"logprobs": 2}]))
    choices = tuple(draw(completions(number)) for number in range(body["n"]))
    if endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": draw(texts)}]
    else:
        body["prompt"] = draw(texts.filter(bool) | st.lists(ids, min_size=1, max_size=3))
        found = draw(st.none() | scores())
        if draw(st.booleans()):
            body["echo"] = True
            front = prompt_text(body["prompt"], found.tokens if found else ())
            choices = tuple(replace(choice, text=front + choice.text) for choice in choices)
        choices = (replace(choices[0], prompt_scores=found), *choices[1:])
    request = Request(index=3, custom_id=draw(st.text(min_size=1, max_size=9)), endpoint=endpoint, body=body)
    state = RequestStatus.of_choices(choice.status for choice in choices)
    created = datetime(2026, 3, 1, tzinfo=UTC)
    return StoredResult(batch_id="B", request=request, state=state, choices=choices, created_at=created)


def strictly(raw: bytes) -> Any:
    text = raw.decode()
    assert len(text.splitlines()) == 1

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a key twice"
        return dict(pairs)

    return json.loads(text, parse_constant=pytest.fail, object_pairs_hook=once)


@settings(max_examples=80, deadline=None)
@given(stored_results())
def test_every_result_is_a_strict_line_of_the_openai_form(stored: StoredResult) -> None:
    line = strictly(openai_line(stored))
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["id"], line["custom_id"]) == ("batch_req_B-3", stored.request.custom_id)
    assert (line["response"] is None) != (line["error"] is None)
    assert is_success(stored) == (line["error"] is None)
    if line["error"] is not None:
        assert line["error"].keys() == {"code", "message"}
        return
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "req_B-3")
    body = line["response"]["body"]
    assert body["usage"]["completion_tokens"] == sum(made.completion_tokens for made in stored.choices)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(stored.choices)))
    for choice, made in zip(body["choices"], stored.choices, strict=True):
        check_choice(choice, made, stored)


def check_choice(choice: Any, made: Completion, stored: StoredResult) -> None:
    found = choice["logprobs"]
    asked = stored.request.body.get("logprobs", False) is not False
    assert (found is not None) == asked
    if stored.request.endpoint is Endpoint.CHAT:
        assert choice["message"]["content"] == made.text
        if asked:
            check_chat_logprobs(found["content"], made)
        return
    assert choice["text"] == made.text
    if asked:
        check_text_logprobs(found, made, stored.choices[0].prompt_scores)


def check_chat_logprobs(content: Any, made: Completion) -> None:
    assert [entry["logprob"] for entry in content] == list(map(finite, made.logprobs))
    for entry, token in zip(content, made.tokens, strict=True):
        assert bytes(entry["bytes"]) == (token.encode() if isinstance(token, str) else bytes(token))
    assert [len(entry["top_logprobs"]) for entry in content] == [
        len(t) for t in made.top_logprobs or [()] * len(content)
    ]


def check_text_logprobs(found: Any, made: Completion, prompt: PromptScores | None) -> None:
    scored = list(prompt.logprobs) if prompt else []
    assert found["token_logprobs"] == [*map(finite, scored), *map(finite, made.logprobs)]
    count = len(scored) + made.completion_tokens
    assert len(found["tokens"]) == len(found["text_offset"]) == count
    assert found["top_logprobs"] is None or len(found["top_logprobs"]) == count
    check_offsets(found["text_offset"], made.text)


def check_offsets(offsets: list[int], text: str) -> None:
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


def finite(logprob: float | None) -> float | None:
    """As the API writes it: its types have no null for a token that was sampled."""
    return -9999.0 if logprob is not None and not math.isfinite(logprob) else logprob


@settings(max_examples=40, deadline=None)
@given(stored_results())
def test_every_result_is_a_strict_flat_line(stored: StoredResult) -> None:
    result = Result.of(stored)
    line = strictly(result.as_json())
    assert (line["custom_id"], line["index"], line["status"]) == (stored.request.custom_id, 3, stored.state)
    lengths = {len(line[name]) for name in ("token_ids", "logprobs", "token_times")}
    assert lengths == {line["completion_tokens"]}
    assert ("choices" in line) == (stored.request.n > 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(token_texts, max_size=8).map(tuple), texts)
def test_offsets_lie_in_any_text(tokens: Any, text: str) -> None:
    check_offsets(text_offsets(tokens, text), text)


@settings(max_examples=100, deadline=None)
@given(st.lists(texts.filter(bool), max_size=8))
def test_offsets_of_tokens_that_make_the_text_are_where_each_begins(tokens: list[str]) -> None:
    lengths = [len("".join(tokens[:count])) for count in range(len(tokens))]
    assert text_offsets(tokens, "".join(tokens)) == lengths
