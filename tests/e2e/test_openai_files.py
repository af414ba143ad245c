"""Batch files as people have them for hosted batches and for vLLM's run-batch, unchanged, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from tests.support.cases import case
from tests.support.machine import Machine
from tests.support.models import save_chat_model

HOSTED = """\
{"custom_id": "ticket-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", \
"messages": [{"role": "system", "content": "You sort support tickets."}, \
{"role": "user", "content": "The printer smells of smoke."}], "max_tokens": 40}}
{"custom_id": "ticket-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", \
"messages": [{"role": "system", "content": "You sort support tickets in one word."}, \
{"role": "user", "content": "Where is my invoice?"}], "max_tokens": 40}}
"""
VLLM = """\
{"custom_id": "row-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": \
"meta-llama/Meta-Llama-3-8B-Instruct", "messages": [{"role": "system", "content": "You know rivers."}, \
{"role": "user", "content": "Name one in Spain."}], "max_completion_tokens": 40}}
{"custom_id": "row-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": \
"meta-llama/Meta-Llama-3-8B-Instruct", "messages": [{"role": "system", "content": "You know rivers."}, \
{"role": "user", "content": "xxxxx"}], "max_completion_tokens": 40}}
""".replace("xxxxx", "x" * 600)  # longer than the tiny model's context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@case("A-out-05", "A-out-06")
def test_public_batch_files_run_unchanged(embedded: Machine, home: Path) -> None:
    (home / "hosted.jsonl").write_text(HOSTED)
    (home / "vllm.jsonl").write_text(VLLM)
    names = ("hosted", "vllm")
    running = [
        embedded.start(
            *("run", str(home / f"{name}.jsonl"), "--format", "openai"),
            *("-o", str(home / f"{name}-out.jsonl"), "--errors", str(home / f"{name}-errors.jsonl")),
        )
        for name in names
    ]
    assert [process.wait(100) for process in running] == [0, 5]
    hosted, vllm = ((home / f"{name}-out.jsonl").read_text().splitlines() for name in names)
    answers = [json.loads(line) for line in (*hosted, *vllm)]
    assert [line["custom_id"] for line in answers] == ["ticket-1", "ticket-2", "row-1"]
    for line in answers:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        chat = ChatCompletion.model_validate(line["response"]["body"], strict=True, extra="forbid")
        assert chat.model == Path(embedded.environment["BATCHJOBS_MODEL"]).name, "what ran, not what the line named"
        assert chat.choices[0].finish_reason in ("stop", "length")
        assert chat.usage is not None
        assert (chat.usage.completion_tokens == 40) >= (chat.choices[0].finish_reason == "length")
    assert (home / "hosted-errors.jsonl").read_text() == ""
    (failed,) = map(json.loads, (home / "vllm-errors.jsonl").read_text().splitlines())
    assert (failed["custom_id"], failed["response"]) == ("row-2", None)
    assert failed["error"]["code"] == "context_length_exceeded"
    assert "512" in failed["error"]["message"]
