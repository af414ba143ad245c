"""Prompts and chats become token ids with each special token exactly once."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.support.cases import case
from workers.engine import PromptError
from workers.engine.prompts import PromptEncoder

BOS = 0
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama's: the tokenizer puts a BOS before every text, and the chat template writes one too."""
    backend = Tokenizer(BPE({"<s>": BOS, **{chr(97 + i): i + 1 for i in range(26)}}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    made.chat_template = TEMPLATE
    return made


@case("A-tok-01")
def test_there_is_one_bos_however_the_text_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = PromptEncoder(tokenizer, 27)
    assert prompts.prompt("abc") == prompts.prompt("<s>abc") == (BOS, 1, 2, 3)
    assert prompts.chat([{"role": "user", "content": "abc"}]) == (BOS, 1, 2, 3)
    assert prompts.prompt([1, 2]) == (1, 2)  # ids are taken as they are


@case("A-tok-01")
def test_a_chat_has_the_tokens_that_the_template_gives(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(PromptEncoder(tokenizer, 27).chat(messages)) == expected


def test_a_model_without_a_template_or_a_tokenizer_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        PromptEncoder(tokenizer, 27).chat([{"role": "user", "content": "a"}])
    bare = PromptEncoder(None, 27)
    assert bare.prompt([3]) == (3,)
    with pytest.raises(PromptError, match="no tokenizer"):
        bare.prompt("a")


def test_a_template_cannot_reach_out_of_its_sandbox(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ cycler.__init__.__globals__.os.getcwd() }}"
    with pytest.raises(PromptError) as refused:
        PromptEncoder(tokenizer, 27).chat([{"role": "user", "content": "a"}])
    assert refused.value.code == "chat_template_error"
