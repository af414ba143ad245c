"""An answer with a response format always fits it, and a format that cannot be held is refused."""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from batchjobs.types import FinishReason
from tests.support import engines
from tests.support.cases import case
from tests.support.models import save_chat_model
from tests.support.schemas import random_schema, response_format
from workers.engine import Engine, PromptError, SamplingParams, structured
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


def allowed(matcher: GrammarMatcher, vocab_size: int = VOCABULARY) -> list[int]:
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def byte(character: str) -> int:
    """The token of a printable character: the byte-level alphabet stands behind three special tokens."""
    return ord(character) - ord("!") + 3


def walk(matcher: GrammarMatcher, rng: random.Random, vocab_size: int = VOCABULARY) -> list[int]:
    """Tokens at random among those allowed, to the end."""
    tokens: list[int] = []
    while not matcher.is_complete:
        token = rng.choice(allowed(matcher, vocab_size))
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
    assert at.accept(byte("7"))
    assert set(allowed(at)) >= EOS
    assert not at.is_complete  # another digit may follow
    assert at.accept(2)
    assert at.is_complete


def test_columns_beyond_the_vocabulary_are_never_allowed(compiler: GrammarCompiler) -> None:
    at = matcher(compiler, {"type": "string"})
    at.accept(allowed(at)[0])
    assert max(allowed(at)) < 259


def test_a_tokenizer_may_know_more_tokens_than_the_model_has_logits_for(tokenizer: PreTrainedTokenizerFast) -> None:
    """Gemma 3's smallest does, by one."""
    fewer = GrammarCompiler(tokenizer, 250, EOS)
    at = matcher(fewer, {"type": "string", "maxLength": 5})
    assert at.accept(byte('"'))
    assert max(allowed(at, 250)) < 250
    assert isinstance(json.loads(tokenizer.decode([byte('"'), *walk(at, random.Random(0), 250)])), str)


def test_an_end_token_that_is_text_too_ends_no_answer_in_its_middle(tokenizer: PreTrainedTokenizerFast) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, frozenset({2, byte("b"), 900}))  # 900 stands for nothing
    at = matcher(compiler, {"type": "string", "pattern": "^[abc]{3}$"})
    assert at.accept(byte('"'))
    assert allowed(at) == [byte("a"), byte("c")]
    number = matcher(compiler, {"type": "integer"})
    assert number.accept(byte("7"))
    assert set(allowed(number)) >= {2, byte("b")}


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


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (response_format({"type": "object", "properties": {"foo": "bar"}}), "schema must be an object or boolean"),
        (response_format({"type": "strange"}), "Invalid type"),
        (response_format({"not": {"type": "string"}}), "Unimplemented keys"),
        (
            response_format(
                {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}
            ),
            "oneOf",
        ),
        (response_format({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "Unimplemented"),
        (response_format({"type": "string", "pattern": "("}), "regex parse error"),
        (response_format({"$ref": "http://example.org/schema"}), "does not fetch"),
        (response_format({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (response_format({"$ref": "#"}), "no text fits the schema"),
        (response_format({"enum": ["x" * 200_000]}), "has 200013 bytes; 131072 are the most"),
        (response_format({"const": float("nan")}), "is not JSON"),
        (response_format({"const": {1, 2}}), "is not JSON"),
        (response_format({"const": "\ud800"}), "not JSON"),
        (response_format(nested(5000)), "recursion"),
        (response_format(nested(200)), "recursion"),
        ({"type": "json_schema"}, "json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "must be an object"),
        ({"type": "grammar"}, "must be text, json_object or json_schema"),
    ],
)
@case("A-sp-15")
def test_a_format_that_cannot_be_held_is_refused_in_a_sentence(
    compiler: GrammarCompiler, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(PromptError, match=words) as refused:
        compiler.matcher(asked)
    assert refused.value.code == "invalid_response_format"
    assert len(refused.value.message) < 400
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "slow",
    [
        {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(1, 40)]},
        {"type": "integer", "multipleOf": 999_983},
    ],
)
def test_a_schema_that_takes_too_long_is_refused_in_bounded_time(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, slow: dict[str, Any]
) -> None:
    """The library alone needs more than 20 seconds for either."""
    monkeypatch.setattr(structured, "MAX_COMPILE_SECONDS", 0.5)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    compile_one, compiled = compiler._compile, []
    monkeypatch.setattr(compiler, "_compile", lambda schema: compiled.append(schema) or compile_one(schema))
    for _ in range(3):
        with pytest.raises(PromptError, match=r"takes more than 0\.5 seconds to compile") as refused:
            compiler.matcher(response_format(slow))
        assert refused.value.code == "invalid_response_format"
    assert len(compiled) == 1  # the refusal is kept too
    walk(matcher(compiler, {"const": 1}), random.Random(0))  # and the next one is compiled


def test_when_the_trial_process_has_gone_another_takes_its_place(tokenizer: PreTrainedTokenizerFast) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    matcher(compiler, {"const": 1})
    first = compiler._trial._process
    assert first is not None
    first.kill()
    first.wait()
    matcher(compiler, {"const": 2})
    second = compiler._trial._process
    assert second is not None
    assert second.poll() is None
    del compiler
    assert second.poll() == 0  # it goes with its compiler


def test_formats_compile_and_walk_in_many_threads(compiler: GrammarCompiler) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(500, 512)]
    alone = [walk(matcher(compiler, schema), random.Random(1)) for schema in schemas]
    shared = GrammarCompiler(compiler._tokenizer, VOCABULARY, EOS)
    found: list[list[list[int]]] = []
    threads = [
        threading.Thread(
            target=lambda: found.append([walk(matcher(shared, schema), random.Random(1)) for schema in schemas])
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4


def test_a_schema_cannot_set_options_that_make_other_texts_than_json(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerFast
) -> None:
    schema = {"x-guidance": {"item_separator": ";", "key_separator": "="}, "const": {"a": 1, "b": [2, 3]}}
    for seed in range(5):
        text = tokenizer.decode(walk(matcher(compiler, schema), random.Random(seed)))
        assert json.loads(text) == schema["const"]


def test_where_the_library_meets_its_limit_no_token_is_allowed(compiler: GrammarCompiler) -> None:
    at = matcher(
        compiler, {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(500)}}
    )
    for character in '{"':  # which of them meets the limit is the library's matter
        at.accept(byte(character))
    assert allowed(at) == []
    assert not at.is_complete
    assert allowed(at.fork()) == []


def test_a_sentencepiece_tokenizer_with_bytes_for_what_it_lacks() -> None:
    tokenizer = sentencepiece_tokenizer()
    size = len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size, frozenset({2}))
    rng = random.Random(11)
    for _ in range(60):
        schema = random_schema(rng)
        at = matcher(compiler, schema)
        value = json.loads(tokenizer.decode([t for t in walk(at, rng, size) if t not in EOS]))
        jsonschema.validate(value, schema)
    spaced = matcher(compiler, {"enum": ["a red house", "あ"]})
    ids = tokenizer.encode('"a red house"', add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ['"', "a", "▁red", "▁", "h", "o", "u", "s", "e", '"']
    assert all(token in allowed(spaced, size) and spaced.accept(token) for token in ids)
    assert spaced.is_complete


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: ``▁`` for a blank, and 256 tokens of single bytes."""
    merges = [("▁", "r"), ("▁r", "e"), ("▁re", "d"), ('"', ":"), ("{", '"')]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [chr(code) for code in range(ord("!"), 127)] + [first + second for first, second in merges]
    backend = Tokenizer(
        BPE({name: index for index, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


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
    return engines.make(folder, **({"num_blocks": 500} | settings))


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


@case("A-sp-15")
def test_a_bad_format_fails_its_own_request(chat_model: Path) -> None:
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
        temperature=0, max_tokens=9, response_format={"type": "json_object"}, logit_bias={byte("}"): 100}
    )
    assert json.loads(make(chat_model).generate(["x"], closing)[0].text) == {}


def test_where_a_ban_and_a_format_leave_nothing_the_request_fails(chat_model: Path) -> None:
    """The only token that the format allows is a stop token, and min_tokens bans it."""
    sampling = asking({"const": 1}, min_tokens=3, stop_token_ids=(byte("1"),))
    output = make(chat_model).generate(["x"], sampling)[0]
    assert output.error is not None
    assert output.error.code == "no_token_allowed"


def test_nobody_whose_format_is_known_waits_while_another_is_compiled(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    compiler.matcher(response_format({"const": 1}))
    compile_one, begun, go_on = compiler._compile, threading.Event(), threading.Event()

    def slow(schema: str) -> object:
        begun.set()
        assert go_on.wait(60)
        return compile_one(schema)

    monkeypatch.setattr(compiler, "_compile", slow)
    thread = threading.Thread(target=compiler.matcher, args=(response_format({"const": 2}),))
    thread.start()
    assert begun.wait(60)
    assert compiler.matcher(response_format({"const": 1})) is not None  # would never come back
    go_on.set()
    thread.join()


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_trial_that_is_stopped_or_killed_refuses_its_request_and_not_the_next(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(structured, "MAX_TRIAL_SECONDS", 0.5)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    compiler.matcher(response_format({"const": 1}))
    process = compiler._trial._process
    assert process is not None
    monkeypatch.setattr(compiler._trial, "_running", lambda: process)
    process.send_signal(sent)
    with pytest.raises(PromptError) as refused:
        compiler.matcher(response_format({"const": 2}))
    assert refused.value.code == "response_format_not_supported"
    monkeypatch.undo()
    assert compiler.matcher(response_format({"const": 2})) is not None
