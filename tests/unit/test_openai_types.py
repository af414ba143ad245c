"""What we write is read with the types of the `openai` package, strictly: no field that they do not know, none of
another type, none missing but those listed here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import BatchError, Completion
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel, ValidationError

from batchjobs.jsonl import InvalidLineError, parse_line
from batchjobs.openai_format import openai_line
from batchjobs.openai_lines import OTHER_NAMES, UNSUPPORTED
from batchjobs.sampling_fields import SAMPLING_NAMES
from batchjobs.store import StoredResult
from batchjobs.types import FinishReason, PromptScores, Request, RequestError, RequestStatus
from tests.support.answers import answer, failure
from tests.support.batches import STARTED
from tests.support.cases import case

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "m", "prompt": "Hi"}
ACCEPTED_LABELS = {"model", "model_version", "metadata", "chat_template_kwargs"}
LEFT_OUT = {
    # What batchjobs has nothing to say about: readers of the API have to do without these anyway.
    "ChatCompletion": {"metadata", "moderation", "service_tier"},
    "ChatCompletionMessage": {"annotations", "audio", "function_call", "tool_calls"},
    "CompletionUsage": {"completion_tokens_details"},
    "PromptTokensDetails": {"audio_tokens", "cache_write_tokens", "image_tokens", "text_tokens"},
    "BatchError": {"line", "param"},
}


def request(body: dict[str, Any]) -> Request:
    """As it is stored, from a line as people have it."""
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return parse_line(json.dumps({"custom_id": "q-1", "method": "POST", "url": url, "body": body}).encode(), 1, 4)


def written(body: dict[str, Any], *choices: dict[str, Any]) -> Any:
    """The output line of a request; one dict of what differs from a plain answer for each choice."""
    asked = request(body)
    made = tuple(answer(asked, **{"choice": n, "text": "Hello", **given}) for n, given in enumerate(choices or ({},)))
    state = RequestStatus.of_choices(each.status for each in made)
    stored = StoredResult(batch_id="B", request=asked, state=state, choices=made, created_at=STARTED)
    return json.loads(openai_line(stored), parse_constant=pytest.fail)


def missing(model: BaseModel) -> set[str]:
    """The fields that were not given and should be, as ``Type.field``, all the way down."""
    name = type(model).__name__
    absent = type(model).model_fields.keys() - model.model_fields_set - LEFT_OUT.get(name, set())
    found = {f"{name}.{field}" for field in absent}
    for value in dict(model).values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, BaseModel):
                found |= missing(inner)
    return found


def read(kind: type[BaseModel], value: Any) -> Any:
    """The value as the package reads it. Fails for what its types do not say."""
    model = kind.model_validate(value, strict=True, extra="forbid")
    assert missing(model) == set()
    assert model.to_dict(mode="json") == value, "nothing is lost"  # type: ignore[attr-defined]
    return model


def body_of(line: Any) -> Any:
    """What a line with an answer holds; its envelope is checked."""
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["custom_id"], line["error"]) == ("q-1", None)
    assert isinstance(line["id"], str)
    assert list(line["response"]) == ["status_code", "request_id", "body"]
    assert line["response"]["status_code"] == 200
    assert isinstance(line["response"]["request_id"], str)
    return line["response"]["body"]


PARTIAL = {"text": "\U0001f600", "tokens": ((240, 159), (152, 128)), "token_ids": (5, 6), "token_times": (0.1, 0.2)}
TOP = {"top_logprobs": (((5, -0.1, (240, 159)), (9, -2.5, "x")), ((6, -0.2, (152, 128)), (7, float("-inf"), "")))}
ODD = {**PARTIAL, **TOP, "logprobs": (-0.1, float("-inf"))}


@case("A-out-06")
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_chats(reason: str) -> None:
    chat = read(ChatCompletion, body_of(written(CHAT, {"finish_reason": FinishReason(reason)})))
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", reason)
    assert (chat.model, chat.system_fingerprint, choice.logprobs) == ("tiny", "v1", None)
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (10, 5, 15)
    assert chat.usage.prompt_tokens_details.cached_tokens == 4


@case("A-tok-02", "A-num-02", "A-sp-06")
def test_chats_with_logprobs() -> None:
    plain = read(ChatCompletion, body_of(written({**CHAT, "logprobs": True}, {"text": "Hi"})))
    assert [(each.token, each.logprob, each.top_logprobs) for each in plain.choices[0].logprobs.content] == [
        ("H", 0.0, []),
        ("i", -0.5, []),
    ]
    odd = read(ChatCompletion, body_of(written({**CHAT, "logprobs": True, "top_logprobs": 2}, ODD)))
    content = odd.choices[0].logprobs.content
    assert bytes(byte for each in content for byte in each.bytes).decode() == odd.choices[0].message.content
    assert (content[1].logprob, content[1].top_logprobs[1].logprob) == (-9999.0, -9999.0)


def test_chats_with_several_choices() -> None:
    chat = read(ChatCompletion, body_of(written({**CHAT, "n": 3, "logprobs": True}, {}, {"text": "Bye"}, {"text": ""})))
    assert [(each.index, each.message.content) for each in chat.choices] == [(0, "Hello"), (1, "Bye"), (2, "")]
    assert chat.usage.completion_tokens == 8


@case("A-out-06")
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_completions(reason: str) -> None:
    made = read(Completion, body_of(written(PROMPT, {"finish_reason": FinishReason(reason)})))
    assert [(each.text, each.finish_reason, each.logprobs) for each in made.choices] == [("Hello", reason, None)]
    assert (made.usage.total_tokens, made.usage.prompt_tokens_details.cached_tokens) == (15, 4)


@case("A-sp-05", "A-tok-03", "A-num-02")
def test_completions_with_logprobs() -> None:
    made = read(Completion, body_of(written({**PROMPT, "logprobs": 0}, {"text": "Hi"})))
    assert made.choices[0].logprobs.token_logprobs == [0.0, -0.5]
    same = {"text": "a", "top_logprobs": (((1, -0.1, "a"), (2, -5.0, "a")),)}
    made = read(Completion, body_of(written({**PROMPT, "logprobs": 2, "n": 2}, ODD, same)))
    assert [each.logprobs.top_logprobs[-1] for each in made.choices] == [
        {"\\x98\\x80": -0.2, "": -9999.0},
        {"a": -0.1},
    ]


@case("A-tok-11", "A-sp-09")
@pytest.mark.parametrize("wanted", [1, 0])
def test_an_echo_differs_from_the_types_in_the_first_token_alone(wanted: int) -> None:
    """Nothing precedes it, so the API has null there; its types do not say so."""
    scores = PromptScores(
        token_ids=(1, 2),
        tokens=("H", "i"),
        logprobs=(None, -0.9),
        top_logprobs=(None, ((2, -0.9, "i"),)) if wanted else None,
    )
    given = {"text": "Hi!", "tokens": ("!",), "token_ids": (3,), "token_times": (0.1,), "logprobs": (-0.2,)}
    if wanted:
        given["top_logprobs"] = (((3, -0.2, "!"),),)
    line = written({**PROMPT, "echo": True, "logprobs": wanted}, {**given, "prompt_scores": scores})
    body = body_of(line)
    with pytest.raises(ValidationError) as caught:
        read(Completion, body)
    where = ("choices", 0, "logprobs")
    places = [(*where, "token_logprobs", 0)] + [(*where, "top_logprobs", 0)] * wanted
    assert [error["loc"] for error in caught.value.errors()] == places
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.9, -0.2]
    logprobs["token_logprobs"][0] = 0.0
    if wanted:
        logprobs["top_logprobs"][0] = {}
    read(Completion, body)


@case("A-out-05")
@pytest.mark.parametrize("body", [CHAT, PROMPT])
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"error": RequestError(code="context_length_exceeded", message="too long")}, "context_length_exceeded"),
        ({"status": RequestStatus.CANCELLED}, "batch_cancelled"),
        ({"status": RequestStatus.EXPIRED}, "batch_expired"),
    ],
)
def test_lines_of_the_error_file(body: dict[str, Any], changes: dict[str, Any], error: str) -> None:
    asked = request(body)
    made = replace(failure(asked), **{"error": None, **changes})
    stored = StoredResult(batch_id="B", request=asked, state=made.status, choices=(made,), created_at=STARTED)
    line = json.loads(openai_line(stored))
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["id"], line["custom_id"], line["response"]) == ("batch_req_B-4", "q-1", None)
    found = read(BatchError, line["error"])
    assert found.code == error
    assert found.message


def test_the_check_itself_finds_what_differs() -> None:
    body = body_of(written({**CHAT, "logprobs": True}))
    for path, value in [
        (("model",), None),
        (("created",), 1.5),
        (("usage", "prompt_tokens"), "10"),
        (("usage", "extra"), 1),
        (("choices", 0, "finish_reason"), "error"),
        (("choices", 0, "logprobs", "content", 0, "logprob"), None),
    ]:
        broken = json.loads(json.dumps(body))
        place = broken
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises(ValidationError):
            read(ChatCompletion, broken)
    for path in ("system_fingerprint", "usage"):
        with pytest.raises(AssertionError):
            read(ChatCompletion, {name: value for name, value in body.items() if name != path})


# ------------------------------------------------------------------------------------------------ docs/openai.md

PAGE = (Path(__file__).parents[2] / "docs/openai.md").read_text()
OF_THE_API = {
    name for kind in (chat_params, text_params) for name in get_type_hints(kind.CompletionCreateParamsBase)
} | {"stream"}


def listed(section: str) -> set[str]:
    """The fields in the first column of a section's table."""
    (text,) = re.findall(rf"^### {section}\n(.*?)(?=^##)", PAGE, re.M | re.DOTALL)
    cells = re.findall(r"^\|([^|]*)\|", text, re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def complaint(name: str, value: Any) -> str | None:
    """What is said of a chat, or else of a completion, with this field."""
    said = []
    for body in (CHAT, PROMPT):
        try:
            request({**body, name: value})
        except InvalidLineError as problem:
            said.append(f"{problem.error.field}: {problem.error.message}")
        else:
            return None
    return said[0]


def test_the_page_lists_the_fields_that_are_accepted() -> None:
    assert listed("Accepted fields") == SAMPLING_NAMES | ACCEPTED_LABELS | {"messages", "prompt"}
    assert listed("Ignored fields") == OTHER_NAMES - ACCEPTED_LABELS - listed("Accepted with one value only")
    for name in listed("Ignored fields"):
        assert request({**CHAT, name: "anything"}).body.keys() == request(CHAT).body.keys()
    for name, value in {"stream": False, "store": False, "modalities": ["text"], "tools": []}.items():
        assert complaint(name, value) is None
        assert complaint(name, True) is not None
    assert listed("Accepted with one value only") == {"stream", "store", "modalities", "tools"}


def test_the_page_lists_the_fields_of_the_api_that_are_refused() -> None:
    known = listed("Accepted fields") | listed("Ignored fields") | listed("Accepted with one value only")
    assert listed("Refused fields") == OF_THE_API - known
    for name in listed("Refused fields"):
        assert (complaint(name, {"a": 1}) or "").startswith(f"body.{name}: "), name
        assert name not in UNSUPPORTED or complaint(name, None) is None


def test_the_page_lists_what_comes_out() -> None:
    out = PAGE.split("## What comes out")[1].split("## What differs")[0]
    named = set(re.findall(r"`([\w.]+)`", out))
    for body in (body_of(written({**CHAT, "logprobs": True})), body_of(written({**PROMPT, "logprobs": 1}))):
        assert body.keys() - named == {"id"} - named
        choice = body["choices"][0]
        assert choice.keys() | choice["logprobs"].keys() <= named | {"index"}
        assert body["usage"].keys() - named == {"prompt_tokens_details"}
    left_out = {name for kind, names in LEFT_OUT.items() if kind.startswith("ChatCompletion") for name in names}
    assert left_out <= named
