"""An answer with a response format always fits it, and a format that cannot be held is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from batchjobs.types import FinishReason
from tests.support.models import save_chat_model
from tests.support.schemas import random_schema, response_format
from workers.engine import Engine, EngineConfig, PromptError, SamplingParams
from workers.engine.structured import COMPILED_FORMATS, GrammarCompiler, GrammarMatcher

VOCABULARY = 300  # of the logits; the tokenizer has 259
EOS = frozenset({0, 2})


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(chat_model)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, EOS)


def matcher(compiler: GrammarCompiler, schema: dict[str, Any]) -> GrammarMatcher:
    made = compiler.matcher(response_format(schema))
    assert made is not None
    return made


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = np.full(-(-VOCABULARY // 32), -1, np.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def walk(matcher: GrammarMatcher, rng: random.Random) -> list[int]:
    """Tokens at random among those allowed, to the end."""
    tokens: list[int] = []
    while not matcher.is_complete:
        token = rng.choice(allowed(matcher))
        assert matcher.accept(token)
        if token in EOS:
            break
        tokens.append(token)
        assert len(tokens) < 3000
    return tokens


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_through_random_schemas_fit_them(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        schema = random_schema(rng)
        value = json.loads(tokenizer.decode(walk(matcher(compiler, schema), rng)))
        jsonschema.validate(value, schema)


def test_a_token_that_is_not_allowed_is_refused(compiler: GrammarCompiler) -> None:
    rng = random.Random(1)
    for _ in range(30):
        at = matcher(compiler, random_schema(rng))
        for _ in range(rng.randint(0, 20)):
            if at.is_complete:
                break
            at.accept(rng.choice(allowed(at)))
        if at.is_complete:
            continue
        rest = sorted(set(range(VOCABULARY)) - set(allowed(at)))
        for token in rng.sample(rest, 5):
            assert not at.fork().accept(token)


def test_the_end_is_allowed_where_the_answer_may_end_by_every_end_token(compiler: GrammarCompiler) -> None:
    at = compiler.matcher(response_format({"type": "integer"}))
    assert at is not None
    assert not EOS & set(allowed(at))
    assert at.accept(ord("7") - ord("!") + 3)  # the byte-level alphabet stands behind three special tokens
    assert set(allowed(at)) >= EOS
    assert not at.is_complete  # another digit may follow
    assert at.accept(2)
    assert at.is_complete


def test_columns_beyond_the_vocabulary_are_never_allowed(compiler: GrammarCompiler) -> None:
    at = matcher(compiler, {"type": "string"})
    at.accept(allowed(at)[0])
    assert max(allowed(at)) < 259


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler) -> None:
    rng = random.Random(3)
    first = matcher(compiler, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    second = first.fork()
    walk(first, rng)
    assert first.is_complete
    assert not second.is_complete
    walk(second, rng)


def test_a_format_is_compiled_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    compile_one, compiled = compiler._compile, []
    monkeypatch.setattr(compiler, "_compile", lambda schema: compiled.append(schema) or compile_one(schema))
    for _ in range(3):
        for number in range(4):
            compiler.matcher(response_format({"const": number}))
    assert len(compiled) == 4
    for number in range(COMPILED_FORMATS):
        compiler.matcher(response_format({"const": 100 + number}))
    compiler.matcher(response_format({"const": 0}))
    assert len(compiled) == 4 + COMPILED_FORMATS + 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (response_format({"type": "object", "properties": {"foo": "bar"}}), "schema must be an object or boolean"),
        (response_format({"type": "strange"}), "Invalid type"),
        (response_format({"not": {"type": "string"}}), "Unimplemented keys"),
        (response_format({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "Unimplemented"),
        (response_format({"type": "string", "pattern": "("}), "regex parse error"),
        (response_format({"$ref": "http://example.org/schema"}), "does not fetch"),
        (response_format({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (response_format({"enum": ["x" * 200_000]}), "characters"),
        ({"type": "json_schema"}, "json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "must be an object"),
        ({"type": "grammar"}, "must be text, json_object or json_schema"),
    ],
)
def test_a_format_that_cannot_be_held_is_refused_in_a_sentence(
    compiler: GrammarCompiler, asked: dict[str, Any], words: str
) -> None:
    """A-sp-15."""
    with pytest.raises(PromptError, match=words) as refused:
        compiler.matcher(asked)
    assert refused.value.code == "invalid_response_format"
    assert len(refused.value.message) < 400
    assert "\n" not in refused.value.message


def test_without_the_library_or_a_tokenizer_no_answer_is_made(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PromptError, match="no fast tokenizer") as refused:
        GrammarCompiler(None, 10, frozenset()).matcher({"type": "json_object"})
    assert refused.value.code == "response_format_not_supported"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PromptError, match="pip install llguidance") as refused:
        GrammarCompiler(tokenizer, VOCABULARY, EOS).matcher({"type": "json_object"})
    assert refused.value.code == "response_format_not_supported"


def test_text_is_no_format(compiler: GrammarCompiler) -> None:
    assert compiler.matcher({"type": "text"}) is None


def make(folder: Path, **settings: object) -> Engine:
    chosen = {"device": "cpu", "page_size": 4, "num_blocks": 500, "max_requests_per_batch": 8} | settings
    return Engine(str(folder), EngineConfig(**chosen))  # type: ignore[arg-type]


def asking(schema: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 400, "seed": 1} | more), response_format=response_format(schema))


@pytest.mark.parametrize("async_batching", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_of_the_engine_fit_their_schemas_beside_free_ones(
    chat_model: Path, async_batching: bool, temperature: float
) -> None:
    rng = random.Random(7)
    schemas = [random_schema(rng, depth=1) for _ in range(8)]
    free = SamplingParams(temperature=temperature, seed=1, max_tokens=20)
    engine = make(chat_model, use_async_batching=async_batching)
    alone = engine.generate(["hello"], free)[0]
    asked = [asking(schema, temperature=temperature) for schema in schemas]
    *held, beside = engine.generate(["hello"] * 9, [*asked, free])
    for output, schema in zip(held, schemas, strict=True):
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), schema)
    assert beside.token_ids == alone.token_ids
    assert [o.token_ids for o in make(chat_model).generate(["hello"] * 8, asked)] == [o.token_ids for o in held]


def test_choices_and_giving_way_keep_their_place_in_the_format(chat_model: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["north", "south"]}, "minItems": 4, "maxItems": 4}
    asked = asking(schema, n=3, temperature=1.0, max_tokens=60)
    ample = make(chat_model).generate(["where"] * 3, asked)
    engine = make(chat_model, num_blocks=36, use_async_batching=True)
    engine.scheduler.expected_answer_share = 0.0
    tight = engine.generate(["where"] * 3, asked)
    assert engine.stats().preemptions > 0
    for ours, theirs in zip(tight, ample, strict=True):
        assert [c.token_ids for c in ours.choices] == [c.token_ids for c in theirs.choices]
        for choice in ours.choices:
            jsonschema.validate(json.loads(choice.text), schema)


def test_an_answer_that_is_cut_says_so(chat_model: Path) -> None:
    output = make(chat_model).generate(["x"], asking({"type": "string", "minLength": 50}, max_tokens=10))[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 10)


def test_a_bad_format_fails_its_own_request(chat_model: Path) -> None:
    """A-sp-15."""
    bad, good = make(chat_model).generate(["a", "b"], [asking({"properties": {"foo": "bar"}}), asking({"const": 1})])
    assert bad.error is not None
    assert (bad.error.code, bad.text, bad.token_ids) == ("invalid_response_format", "", ())
    assert (good.text, good.error) == ("1", None)


def test_json_object_is_any_object(chat_model: Path) -> None:
    for seed in range(3):
        sampling = SamplingParams(seed=seed, max_tokens=500, response_format={"type": "json_object"}, temperature=0.7)
        output = make(chat_model).generate(["x"], sampling)[0]
        if output.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(output.text), dict)
        else:
            assert output.text.startswith("{")
    closing = SamplingParams(
        temperature=0, max_tokens=9, response_format={"type": "json_object"}, logit_bias={93 + 3: 100}
    )
    assert json.loads(make(chat_model).generate(["x"], closing)[0].text) == {}


def test_where_a_ban_and_a_format_leave_nothing_the_request_fails(chat_model: Path) -> None:
    """The only token that the format allows is a stop token, and min_tokens bans it."""
    digit = ord("1") - ord("!") + 3
    sampling = asking({"const": 1}, min_tokens=3, stop_token_ids=(digit,))
    output = make(chat_model).generate(["x"], sampling)[0]
    assert output.error is not None
    assert output.error.code == "no_token_allowed"
