"""Output and error lines in OpenAI's form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from batchjobs.openai_format import openai_line, text_offsets
from batchjobs.store import StoredResult
from batchjobs.types import Endpoint, FinishReason, PromptScores, Request, RequestError, RequestStatus
from tests.support.answers import answer, failure
from tests.support.batches import STARTED
from tests.support.cases import case

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
PROMPT = {"prompt": "Hi", "max_tokens": 9}


def stored(body: dict[str, Any], endpoint: Endpoint, make: Any = answer, **changes: Any) -> StoredResult:
    request = Request(index=4, custom_id="q-1", endpoint=endpoint, body=body)
    made = make(request, **changes)
    return StoredResult(batch_id="B", request=request, state=made.status, choices=(made,), created_at=STARTED)


def line(body: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT, make: Any = answer, **changes: Any) -> Any:
    raw = openai_line(stored(body, endpoint, make, **changes))
    assert b"\n" not in raw
    return json.loads(raw, parse_constant=pytest.fail)


def test_a_chat_answer() -> None:
    assert line(CHAT, text="Hello") == {
        "id": "batch_req_B-4",
        "custom_id": "q-1",
        "response": {
            "status_code": 200,
            "request_id": "req_B-4",
            "body": {
                "id": "chatcmpl-B-4",
                "object": "chat.completion",
                "created": 1772366401,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 5,
                    "total_tokens": 15,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
                "system_fingerprint": "v1",
            },
        },
        "error": None,
    }


def test_a_completion_answer() -> None:
    body = line(PROMPT, Endpoint.COMPLETIONS, text="Hey", finish_reason=FinishReason.LENGTH)["response"]["body"]
    assert (body["id"], body["object"]) == ("cmpl-B-4", "text_completion")
    assert body["choices"] == [{"text": "Hey", "index": 0, "logprobs": None, "finish_reason": "length"}]


@case("A-sp-06")
def test_chat_logprobs_without_alternatives() -> None:
    """Logprobs true alone gives entries with an empty list."""
    logprobs = line({**CHAT, "logprobs": True}, text="Hi")["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs == {
        "content": [
            {"token": "H", "bytes": [72], "logprob": 0.0, "top_logprobs": []},
            {"token": "i", "bytes": [105], "logprob": -0.5, "top_logprobs": []},
        ],
        "refusal": None,
    }


@case("A-tok-02")
def test_chat_logprobs_keep_the_bytes_of_partial_characters() -> None:
    """An emoji over two tokens; all bytes together are its UTF-8."""
    pieces = ((240, 159), (152, 128))
    top = (((5, -0.1, pieces[0]), (9, -2.5, "x")), ((6, -0.2, pieces[1]),))
    found = line(
        {**CHAT, "logprobs": True, "top_logprobs": 2},
        text="\U0001f600",
        tokens=pieces,
        token_ids=(5, 6),
        logprobs=(-0.1, -0.2),
        token_times=(0.1, 0.2),
        top_logprobs=top,
    )["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in found] == ["\\xf0\\x9f", "\\x98\\x80"]
    assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == "\U0001f600"
    assert found[0]["top_logprobs"] == [
        {"token": "\\xf0\\x9f", "bytes": [240, 159], "logprob": -0.1},
        {"token": "x", "bytes": [120], "logprob": -2.5},
    ]


def test_completion_logprobs() -> None:
    top = (((72, 0.0, "H"), (74, -3.0, "J")), ((8, -0.1, "e"), (9, -0.2, "a")))
    choice = line({**PROMPT, "logprobs": 2, "top_logprobs": 2}, Endpoint.COMPLETIONS, text="Hi", top_logprobs=top)
    assert choice["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [0.0, -0.5],
        "top_logprobs": [{"H": 0.0, "J": -3.0}, {"e": -0.1, "a": -0.2, "i": -0.5}],
        "text_offset": [0, 1],
    }


@case("A-sp-05")
def test_completion_logprobs_zero_means_the_sampled_token_alone() -> None:
    logprobs = line({**PROMPT, "logprobs": 0}, Endpoint.COMPLETIONS, text="Hi")["response"]["body"]["choices"][0][
        "logprobs"
    ]
    assert logprobs["token_logprobs"] == [0.0, -0.5]
    assert logprobs["top_logprobs"] is None


@case("A-tok-03")
def test_of_two_ids_with_one_text_the_likelier_stays() -> None:
    """In the form that is keyed by text."""
    top = (((1, -0.1, "a"), (2, -5.0, "a")),)
    body = {**PROMPT, "logprobs": 2, "top_logprobs": 2}
    made = line(body, Endpoint.COMPLETIONS, text="a", top_logprobs=top)["response"]["body"]["choices"][0]
    assert made["logprobs"]["top_logprobs"] == [{"a": -0.1}]


@case("A-num-02")
def test_logprobs_that_are_no_number_are_very_unlikely() -> None:
    """Strict JSON everywhere, and a number where the API's types want one: its own for what cannot happen."""
    never = float("-inf")
    changes = {"text": "ab", "logprobs": (never, float("nan")), "top_logprobs": (((1, -0.1, "x"), (2, never, "y")), ())}
    choice = line({**CHAT, "logprobs": True, "top_logprobs": 2}, **changes)["response"]["body"]["choices"][0]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-9999.0, -9999.0]
    assert [top["logprob"] for top in choice["logprobs"]["content"][0]["top_logprobs"]] == [-0.1, -9999.0]
    choice = line({**PROMPT, "logprobs": 2}, Endpoint.COMPLETIONS, **changes)["response"]["body"]["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]
    assert choice["logprobs"]["top_logprobs"] == [{"x": -0.1, "y": -9999.0, "a": -9999.0}, {"b": -9999.0}]


@case("A-out-05")
def test_a_failure_has_an_error_and_no_response() -> None:
    assert line(CHAT, make=failure) == {
        "id": "batch_req_B-4",
        "custom_id": "q-1",
        "response": None,
        "error": {"code": "context_length_exceeded", "message": "too long"},
    }


@pytest.mark.parametrize(
    ("status", "code"), [(RequestStatus.CANCELLED, "batch_cancelled"), (RequestStatus.EXPIRED, "batch_expired")]
)
@case("A-out-05")
def test_cancelled_and_expired_requests_are_failures(status: RequestStatus, code: str) -> None:
    made = line(CHAT, text="Hel", status=status, finish_reason=FinishReason.CANCELLED)
    assert made["response"] is None
    assert made["error"]["code"] == code


def test_an_own_error_wins_over_the_general_one() -> None:
    error = RequestError(code="worker_crashed", message="m")
    assert line(CHAT, status=RequestStatus.EXPIRED, error=error)["error"] == {"code": "worker_crashed", "message": "m"}


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (("Hel", "lo", "!"), "Hello!", [0, 3, 5]),
        (("Hi", "<|im_end|>"), "Hi", [0, 2]),
        (("A", "<|pad|>", "B"), "AB", [0, 1, 1]),
        (("one", " two", " END"), "one tw", [0, 3, 6]),
        (((240, 159), (152, 128), "!"), "\U0001f600!", [0, 0, 1]),
        ((), "", []),
    ],
)
def test_text_offsets_point_into_the_text(tokens: Any, text: str, offsets: list[int]) -> None:
    assert text_offsets(tokens, text) == offsets


# ------------------------------------------------------------------------------------------------ several choices


def several(body: dict[str, Any], endpoint: Endpoint, *choices: Any, state: str = "completed") -> Any:
    request = Request(index=4, custom_id="q-1", endpoint=endpoint, body=body)
    made = tuple(replace(choice(request), choice=number) for number, choice in enumerate(choices))
    found = StoredResult(batch_id="B", request=request, state=state, choices=made, created_at=STARTED)
    return json.loads(openai_line(found), parse_constant=pytest.fail)


def saying(text: str, **changes: Any) -> Any:
    return lambda request: answer(request, text, **changes)


def test_every_choice_is_given_out_and_the_prompt_counted_once() -> None:
    body = several({**CHAT, "n": 3}, Endpoint.CHAT, saying("red"), saying("green"), saying("blue"))["response"]["body"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "red", "stop"),
        (1, "green", "stop"),
        (2, "blue", "stop"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body["created"] == 1772366401, "when the last choice ended"


def test_one_choice_that_failed_fails_the_request() -> None:
    made = several({**PROMPT, "n": 2}, Endpoint.COMPLETIONS, saying("red"), failure, state="failed")
    assert made["response"] is None
    assert made["error"] == {"code": "context_length_exceeded", "message": "too long"}
    made = several({**PROMPT, "n": 2}, Endpoint.COMPLETIONS, saying("red"), failure, state="cancelled")
    assert made["error"]["code"] == "batch_cancelled"


# ---------------------------------------------------------------------------------------------------------- echo

NEWLINE = "\n1. Carol has 20"
TOKENS = ("\n", "1", ".", " Carol", " has", " ", "20")


def scores(*tokens: Any, top: bool = True) -> PromptScores:
    tops = tuple(((7, -0.1, "x"), (8, -0.9, token)) for token in tokens[1:])
    return PromptScores(
        token_ids=tuple(range(len(tokens))),
        tokens=tokens,
        logprobs=(None, *(-0.9 for _ in tokens[1:])),
        top_logprobs=(None, *tops) if top else None,
    )


def echoed(prompt: Any, found: PromptScores, *texts: str, **changes: Any) -> list[Any]:
    """The choices of a request with echo whose prompt and answers read as given."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1, "top_logprobs": 1, "n": len(texts)}
    repeated = prompt if isinstance(prompt, str) else "".join(found.tokens)  # type: ignore[arg-type]
    making = []
    for number, text in enumerate(texts):
        with_scores = {"prompt_scores": found if number == 0 else None}
        tops = tuple(((5, -0.3, "z"),) for _ in text)
        given = {"tokens": tuple(text), "top_logprobs": tops, **with_scores, **changes}
        making.append(lambda request, t=text, g=given: replace(answer(request, t, **g), text=repeated + t))
    choices: list[Any] = several(body, Endpoint.COMPLETIONS, *making)["response"]["body"]["choices"]
    return choices


@case("A-tok-11")
def test_an_echo_has_an_entry_for_each_token_of_the_prompt() -> None:
    """The first one too, with null; offsets point into the text."""
    first, second = echoed(NEWLINE, scores(*TOKENS), " a!", "b")
    assert (first["text"], second["text"]) == (NEWLINE + " a!", NEWLINE + "b")
    logprobs = first["logprobs"]
    assert logprobs["tokens"] == [*TOKENS, " ", "a", "!"]
    assert logprobs["token_logprobs"] == [None, *[-0.9] * 6, 0.0, -0.5, -1.0]
    assert logprobs["top_logprobs"][:2] == [None, {"x": -0.1, "1": -0.9}]
    assert logprobs["top_logprobs"][-1] == {"z": -0.3, "!": -1.0}
    assert len(logprobs["top_logprobs"]) == 10
    assert logprobs["text_offset"] == [0, 1, 2, 3, 9, 13, 14, 16, 17, 18]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert first["text"].startswith(token, offset)
    assert second["logprobs"]["tokens"] == [*TOKENS, "b"], "the scores are with the first choice, and hold for all"
    assert second["logprobs"]["token_logprobs"][:2] == [None, -0.9]


@case("A-sp-09")
def test_scoring_gives_the_prompt_and_no_token_more() -> None:
    (choice,) = echoed("The sky", scores("The", " sky"), "", finish_reason=FinishReason.LENGTH)
    assert choice == {
        "text": "The sky",
        "index": 0,
        "logprobs": {
            "tokens": ["The", " sky"],
            "token_logprobs": [None, -0.9],
            "top_logprobs": [None, {"x": -0.1, " sky": -0.9}],
            "text_offset": [0, 3],
        },
        "finish_reason": "length",
    }


def test_an_echo_without_alternatives_has_none() -> None:
    (choice,) = echoed("Hi", scores("H", "i", top=False), "!", top_logprobs=None)
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["token_logprobs"] == [None, -0.9, 0.0]


def test_an_echo_of_ids_and_of_a_prompt_with_a_token_that_is_not_in_it() -> None:
    (choice,) = echoed([1, 2], scores("<s>", "Hi"), "!")
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<s>Hi!", [0, 3, 5])
    (choice,) = echoed("Hi you", scores("<s>", " Hi", " you"), "!")  # a blank put in front by the tokenizer
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 6]
    (choice,) = echoed("Cafe\u0301 au lait", scores("Caf", "\u00e9", " au", " lait"), "!")  # composed by the tokenizer
    assert choice["logprobs"]["text_offset"] == [0, 3, 5, 8, 13]


def test_an_echo_without_logprobs_has_only_the_text() -> None:
    body = {"prompt": "Hi", "max_tokens": 3, "echo": True}
    (choice,) = several(body, Endpoint.COMPLETIONS, saying("Hi!"))["response"]["body"]["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Hi!", None)
